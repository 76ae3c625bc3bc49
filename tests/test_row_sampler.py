"""RowSampler over a whole answer: bias, penalties, log-probabilities, the ends of an answer and its visible text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsgg.errors import TsggError
from tsgg.sampling import RepetitionGuard, RowSampler, SamplingParams, StopText

VOCAB = 64
END = 63


def row_for(token: int) -> np.ndarray:
    row = np.zeros(VOCAB, np.float32)
    row[token] = 5
    return row


def greedy(tokens: list[int], decode: Any = None, **keywords: Any) -> RowSampler:
    """A greedy sampler that was shown rows whose maxima are `tokens`, until it finished."""
    ends = keywords.pop("end_of_generation", [END])
    limit = keywords.pop("token_limit", None)
    params = SamplingParams(temperature=0, **keywords)
    sampler = RowSampler(params, VOCAB, end_of_generation=ends, decode_step=decode, token_limit=limit)
    for position, token in enumerate(tokens):
        sampler.sample(row_for(token), position)
        if sampler.finished is not None:
            break
    return sampler


def letter(token: int) -> str:
    return chr(ord("a") + token)


def ids(text: str) -> list[int]:
    return [ord(character) - ord("a") for character in text]


# --- bias and penalties -----------------------------------------------------------------------------------------------


def test_bias_comes_before_penalties_and_a_forbidden_token_is_never_drawn() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[4, 7, 9]] = [3.0, 2.5, 2.0]
    sampler = RowSampler(SamplingParams(temperature=0, logit_bias={4: -np.inf, 9: 1.0}), VOCAB)
    assert sampler.sample(row, 0) == 9
    row = np.full(VOCAB, -9, np.float32)
    row[[1, 2]] = [2.0, 3.4]
    params = SamplingParams(temperature=0, logit_bias={1: 3.0}, repetition_penalty=2.0)
    # bias first: (2 + 3) / 2 = 2.5 < 3.4; penalty first would be 2 / 2 + 3 = 4 > 3.4
    assert RowSampler(params, VOCAB, prompt=[1]).sample(row, 0) == 2


def test_suppressed_tokens_are_forbidden_whatever_the_request_says() -> None:
    sampler = RowSampler(SamplingParams(temperature=0, logit_bias={5: 9.0}), VOCAB, suppressed=[5])
    row = row_for(5)
    row[6] = 1
    assert sampler.sample(row, 0) == 6


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 7), max_size=12),
    st.integers(0, 1000),
    st.sampled_from([-1, 1, 3, 8, 64]),
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_penalties_follow_the_window_token_by_token(
    prompt: list[int], seed: int, last_n: int, repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        penalty_last_n=last_n,
    )
    sampler = RowSampler(params, 8, prompt=prompt)
    history = list(prompt)
    for position, row in enumerate(np.random.default_rng(seed).standard_normal((12, 8)).astype(np.float32)):
        expected = row.astype(np.float64)
        window = history if last_n < 0 else history[-last_n:]
        for token in set(window):
            value = expected[token]
            value = value * repetition if value <= 0 else value / repetition
            expected[token] = value - window.count(token) * frequency - presence
        token = sampler.sample(row, position)
        assert expected[token] >= expected.max() - 1e-5
        history.append(token)


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [VOCAB, 20_000])
def test_logprobs_are_those_of_the_raw_row(size: int) -> None:
    row = (np.random.default_rng(3).standard_normal(size) * 4).astype(np.float32)
    exact = row.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    params = SamplingParams(temperature=1.7, logprobs=20, repetition_penalty=1.5, logit_bias={7: 30.0}, seed=1)
    sampler = RowSampler(params, size, prompt=[7, 8])
    token = sampler.sample(row, 0)
    assert token == 7  # its bias decides, but its log-probability is that of the raw row
    (recorded,) = sampler.logprobs
    assert recorded.token == token
    assert recorded.logprob == pytest.approx(exact[7], abs=2e-5)
    assert [best for best, _ in recorded.top] == np.argsort(-row, kind="stable")[:20].tolist()
    assert [value for _, value in recorded.top] == pytest.approx(exact[[best for best, _ in recorded.top]], abs=2e-5)


def test_logprobs_zero_records_the_token_alone_and_none_records_nothing() -> None:
    assert [entry.top for entry in greedy([1, 2], logprobs=0).logprobs] == [(), ()]
    assert greedy([1, 2]).logprobs == []


# --- the end of an answer ---------------------------------------------------------------------------------------------


def test_an_end_of_generation_token_ends_the_answer_and_has_no_text() -> None:
    sampler = greedy([*ids("ab"), END, *ids("c")], letter)
    assert (sampler.finished, sampler.stop_reason) == ("stop", END)
    assert sampler.tokens == [0, 1, END]
    assert (sampler.texts, sampler.visible_text()) == (["a", "b", ""], "ab")


def test_nothing_is_drawn_after_the_end() -> None:
    sampler = greedy([END])
    for attempt in (lambda: sampler.sample(row_for(1), 1), lambda: sampler.accept(1), lambda: sampler.finish("length")):
        with pytest.raises(TsggError, match="has ended"):
            attempt()
    assert sampler.tokens == [END]


def test_stop_token_ids_end_the_answer_even_where_eos_is_ignored() -> None:
    assert greedy([1, 2, 3], stop_token_ids=[2]).tokens == [1, 2]
    row = row_for(END)
    row[3] = 1
    ignoring = RowSampler(SamplingParams(temperature=0, ignore_eos=True), VOCAB, end_of_generation=[END])
    assert ignoring.sample(row, 0) == 3
    assert ignoring.needs_logits
    named = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[END])
    sampler = RowSampler(named, VOCAB, end_of_generation=[END])
    assert sampler.sample(row, 0) == END
    assert sampler.finished == "stop"


@pytest.mark.parametrize(
    ("most", "room", "tokens", "reason"),
    [(4, None, 4, "length"), (4, 2, 2, "context"), (None, 3, 3, "context"), (3, 3, 3, "length"), (3, 4, 3, "length")],
)
def test_an_answer_is_cut_by_max_tokens_or_by_the_context_whichever_is_less_and_says_which(
    most: int | None, room: int | None, tokens: int, reason: str
) -> None:
    sampler = greedy([1] * 9, max_tokens=most, token_limit=room)
    assert (len(sampler.tokens), sampler.finished) == (tokens, reason)
    assert sampler.texts == [""] * tokens


def test_an_end_in_the_last_place_is_a_stop_and_not_a_cut() -> None:
    assert greedy([1, END], max_tokens=2).finished == "stop"
    assert greedy([1, END], token_limit=2).finished == "stop"


def test_a_device_may_record_the_maximum_it_took_only_where_nothing_else_decides() -> None:
    sampler = RowSampler(SamplingParams(temperature=0, max_tokens=2), VOCAB)
    assert [sampler.accept(4), sampler.accept(5)] == [4, 5]
    assert sampler.finished == "length"
    for field, value in (("temperature", 1.0), ("logprobs", 0), ("presence_penalty", 0.1), ("logit_bias", {1: 0.5})):
        params = SamplingParams.parse(SamplingParams(temperature=0), **{field: value})
        with pytest.raises(TsggError, match="sample"):
            RowSampler(params, VOCAB).accept(1)


# --- the repetition guard ---------------------------------------------------------------------------------------------


def is_loop(tokens: list[int], guard: RepetitionGuard) -> bool:
    """Brute force: some suffix is long enough and consists of enough copies of one short cycle."""
    for cycle in range(1, guard.max_cycle + 1):
        length = max(cycle * guard.min_repeats, guard.min_tokens)
        tail = tokens[-length:]
        if len(tail) == length and all(tail[place] == tail[place - cycle] for place in range(cycle, length)):
            return True
    return False


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=120), st.integers(1, 6), st.integers(2, 4), st.integers(2, 20))
def test_the_guard_ends_an_answer_at_the_token_that_completes_a_loop(
    tokens: list[int], max_cycle: int, min_repeats: int, min_tokens: int
) -> None:
    guard = RepetitionGuard(max_cycle, min_repeats, min_tokens)
    sampler = greedy(tokens, repetition_guard=guard)
    expected = next((n for n in range(1, len(tokens) + 1) if is_loop(tokens[:n], guard)), None)
    assert sampler.finished == (None if expected is None else "repetition")
    assert len(sampler.tokens) == (expected or len(tokens))


def test_a_loop_goes_on_unless_the_guard_was_asked_for() -> None:
    assert greedy([1, 2] * 200).finished is None
    guarded = greedy([1, 2] * 200, repetition_guard=True)
    assert (guarded.finished, len(guarded.tokens)) == ("repetition", RepetitionGuard().min_tokens)


# --- stop strings and visible text ------------------------------------------------------------------------------------


def test_a_stop_string_across_token_borders_is_never_shown() -> None:
    sampler = greedy(ids("xystopzz"), letter, stop="stop")
    assert (sampler.finished, sampler.stop_reason, sampler.visible_text()) == ("stop", "stop", "xy")
    assert len(sampler.tokens) == 6  # the token that completed it counts, nothing after it was drawn


def test_text_behind_a_stop_string_in_the_same_token_is_cut() -> None:
    sampler = greedy([1, 2, 3], {1: "Hi\nUs", 2: "er: no", 3: "!"}.__getitem__, stop=["\nUser:", "###"])
    assert (sampler.visible_text(), sampler.tokens) == ("Hi", [1, 2])
    assert sampler.texts == ["Hi\nUs", "er: no"]


def test_text_that_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    pieces = {1: "a#", 2: "#", 3: "b", 4: "##"}
    sampler = RowSampler(SamplingParams(temperature=0, stop="###"), VOCAB, decode_step=pieces.__getitem__)
    taken = []
    for position, token in enumerate((1, 2, 3, 4)):
        sampler.sample(row_for(token), position)
        taken.append(sampler.take_text())
    assert taken == ["a", "", "##b", ""]
    sampler.finish("length")
    assert sampler.take_text() == "##"
    assert sampler.visible_text() == "a##b##"


def test_the_end_releases_what_the_detokenizer_still_holds() -> None:
    params = SamplingParams(temperature=0, max_tokens=1, stop="zz")
    sampler = RowSampler(params, VOCAB, decode_step=lambda token: "az", decode_end=lambda: "�")
    sampler.sample(row_for(0), 0)
    assert sampler.take_text() == "az�"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_pieces_release_what_a_search_of_the_whole_text_allows(pieces: list[str], stops: list[str]) -> None:
    scanner = StopText(stops)
    whole = shown = ""
    for piece in pieces:
        whole += piece
        shown += scanner.push(piece)
        places = [whole.find(stop) for stop in stops if stop in whole]
        if places:
            assert shown == whole[: min(places)]
            assert scanner.matched is not None
            assert scanner.push("more") + scanner.flush() == ""
            return
        assert scanner.matched is None
        held = whole[len(shown) :]
        assert shown + held == whole
        suffixes = [whole[start:] for start in range(len(whole))]
        assert held == next((s for s in suffixes if any(stop.startswith(s) for stop in stops)), "")
    assert shown + scanner.flush() == whole
