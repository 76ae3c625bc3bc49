"""The n-gram drafter against a brute-force matcher that knows nothing of hashes, indexes or increments."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted import ScriptedSequence
from tsgg.settings import Settings
from tsgg.speculative import Draft, DraftContext
from tsgg.speculative import ngram as module
from tsgg.speculative.ngram import GAP, NO_MATCH, WEAK_MATCH, NgramSpeculator


def opened(tokens: list[int], pmin: float = 0.0) -> NgramSpeculator:
    speculator, sequence = NgramSpeculator(pmin), ScriptedSequence()
    sequence.tokens = list(tokens)
    speculator.open(0, sequence)
    return speculator


def propose(speculator: NgramSpeculator, position: int, last: int, window: int = 8) -> Draft:
    (draft,) = speculator.propose([DraftContext(0, last, position, window)])
    return draft


def draft_after(text: list[int], window: int = 8, pmin: float = 0.0) -> Draft:
    """What is drafted when all of `text` but its last token is committed."""
    return propose(opened(text[:-1], pmin), len(text) - 1, text[-1], window)


def brute_force(text: list[int], window: int, required: int) -> list[int]:
    """The rule in words: longest order first, then the most recent occurrence; a match one short of `required` drafts
    only what followed its occurrence before, too; a continuation that runs out of text repeats."""
    n, lowest = len(text), required - 1

    def occurrences(k: int, before: int) -> list[int]:
        return [end for end in range(k, before) if text[end - k : end] == text[n - k :]]

    def continuation(end: int) -> list[int]:
        return [text[end + i % (n - end)] for i in range(window)]

    for k in range(min(8, n), lowest - 1, -1):
        ends = occurrences(k, n)
        if not ends:
            continue
        end = ends[-1]
        length = max(m for m in range(k, 9) if m <= end and text[end - m : end] == text[n - m :])
        if length >= required:
            return continuation(end)
        earlier = occurrences(lowest, end)
        if not earlier:
            return []
        agreed = []
        for ours, theirs in zip(continuation(end), continuation(earlier[-1]), strict=True):
            if ours != theirs:
                break
            agreed.append(ours)
        return agreed
    return []


texts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=60),
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
    st.lists(st.integers(0, 20), min_size=1, max_size=40).map(lambda part: part * 3),
)


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 16), st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]))
def test_a_draft_is_what_the_brute_force_matcher_finds(text: list[int], window: int, pmin: float) -> None:
    draft = draft_after(text, window, pmin)
    assert list(draft.tokens) == brute_force(text, window, required=3 + round(pmin * 5))
    assert bool(draft.tokens) != bool(draft.silence)


@settings(max_examples=100, deadline=None)
@given(texts, st.data())
def test_committing_piece_by_piece_drafts_the_same_as_seeding_at_once(text: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text) - 1), max_size=12)) | {len(text) - 1})
    speculator, done = opened(text[: cuts[0]]), cuts[0]
    for cut in cuts[1:]:
        propose(speculator, done, text[done])
        speculator.commit(0, text[done:cut], done, None)
        done = cut
    assert propose(speculator, done, text[-1]) == draft_after(text)


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(1, 8))
def test_a_hash_collision_never_makes_a_draft_of_something_that_did_not_occur(text: list[int], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MASK", 3)  # four values for all n-grams
        draft = draft_after(text, window).tokens
    if draft:
        n = len(text)
        ends = [e for e in range(2, n) if text[e - 2 : e] == text[n - 2 :]]
        assert any(all(token == text[end + i % (n - end)] for i, token in enumerate(draft)) for end in ends), (
            "the draft continues no occurrence of the last two tokens"
        )


def test_three_tokens_that_occurred_once_are_enough() -> None:
    assert draft_after([1, 2, 3, 7, 8, 9, 1, 2, 3], 3).tokens == (7, 8, 9)


def test_two_tokens_that_occurred_once_are_not_enough() -> None:
    assert draft_after([5, 2, 3, 7, 8, 9, 1, 2, 3], 3) == Draft(silence=WEAK_MATCH)


def test_two_tokens_draft_what_followed_both_of_their_last_occurrences() -> None:
    assert draft_after([5, 2, 3, 7, 8, 0, 6, 2, 3, 7, 8, 9, 1, 2, 3], 4).tokens == (7, 8)
    assert draft_after([5, 2, 3, 4, 8, 0, 6, 2, 3, 7, 8, 9, 1, 2, 3], 4) == Draft(silence=WEAK_MATCH)


def test_the_longer_match_wins_over_the_more_recent_and_among_equals_the_most_recent() -> None:
    assert draft_after([1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 8, 1, 2, 3, 4], 1).tokens == (50,)
    assert draft_after([1, 2, 3, 50, 1, 2, 3, 60, 9, 1, 2, 3], 1).tokens == (60,)


def test_text_that_repeats_itself_is_drafted_on_past_its_own_end() -> None:
    assert draft_after([4, 5, 6, 4, 5, 6, 4, 5, 6], 7).tokens == (4, 5, 6, 4, 5, 6, 4)
    assert draft_after([7] * 5, 4).tokens == (7, 7, 7, 7)


def test_a_text_with_nothing_repeated_is_silent_and_says_so() -> None:
    assert draft_after(list(range(50))) == Draft(silence=NO_MATCH)
    assert draft_after([1]) == Draft(silence=NO_MATCH)


@pytest.mark.parametrize(("pmin", "shortest"), [(0.0, 3), (0.2, 4), (0.4, 5), (0.6, 6), (0.8, 7), (1.0, 8)])
def test_pmin_scales_the_match_that_a_draft_needs(pmin: float, shortest: int) -> None:
    for length in range(3, 10):
        text = [*range(10, 10 + length), 99, 98, *range(10, 10 + length)]
        assert bool(draft_after(text, 2, pmin).tokens) == (length >= shortest)


@pytest.mark.parametrize("start", [4, 8])
def test_behind_a_gap_it_stays_silent_until_it_is_seeded_again(start: int) -> None:
    text = [1, 2, 3, 1, 2, 3]
    speculator = opened(text)
    assert propose(speculator, 6, 1).tokens
    speculator.commit(0, [1, 2, 3], start, None)
    assert propose(speculator, start + 3, 1) == Draft(silence=GAP)
    speculator.commit(0, [1, 2, 3], 6, None)  # fits, but what lies between is unknown
    assert propose(speculator, 9, 1) == Draft(silence=GAP)
    sequence = ScriptedSequence()
    sequence.tokens = [*text, 1, 2, 3]
    speculator.open(0, sequence)
    assert propose(speculator, 9, 1).tokens == (2, 3, 1, 2, 3, 1, 2, 3)


def test_sequences_do_not_see_each_others_history() -> None:
    speculator, other = opened([1, 2, 3, 4, 1, 2]), ScriptedSequence()
    other.tokens = [9, 8, 7, 6, 5]
    speculator.open(1, other)
    mine, theirs = speculator.propose([DraftContext(0, 3, 6, 2), DraftContext(1, 3, 5, 2)])
    assert mine.tokens == (4, 1) and theirs == Draft(silence=NO_MATCH)
    speculator.close(0)
    assert list(speculator._histories) == [1]


@pytest.mark.parametrize(("text", "on"), [(None, False), ("0", False), ("1", True)])
def test_the_debug_switch_is_an_environment_variable(text: str | None, on: bool) -> None:
    environment = {} if text is None else {"TS_NGRAM_DEBUG": text}
    assert Settings.from_environment(environment).ngram_debug == on


def test_the_debug_switch_logs_why_it_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tsgg.ngram")
    speculator = opened([1, 2, 3])
    propose(speculator, 3, 9)
    assert not caplog.records
    monkeypatch.setattr(module, "settings", Settings(ngram_debug=True))
    propose(speculator, 3, 9)
    speculator.commit(0, [9], 7, None)
    propose(speculator, 8, 9)
    assert NO_MATCH in caplog.messages[0] and "history ends at 3" in caplog.messages[1] and GAP in caplog.messages[2]


def test_confidence_grows_with_the_match_and_with_each_token_that_would_be_right() -> None:
    three = draft_after([1, 2, 3, 7, 8, 9, 1, 2, 3], 3).confidences
    five = draft_after([11, 12, 1, 2, 3, 7, 8, 9, 11, 12, 1, 2, 3], 3).confidences
    agreed = draft_after([5, 2, 3, 7, 8, 0, 6, 2, 3, 7, 8, 9, 1, 2, 3], 4).confidences
    for confidences in (three, five, agreed):
        assert list(confidences) == sorted(confidences) and confidences[0] > 0.0 and confidences[-1] < 1.0
    assert three[0] < agreed[0] < five[0]
