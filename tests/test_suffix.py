"""The suffix drafter and its automaton against brute force over the text, which knows nothing of states or links."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted import ScriptedSequence, ScriptedTrunk, plain_stream
from tests.scripted_loop import LIMIT, PROMPT, begin, finish
from tsgg.errors import UsageError
from tsgg.settings import settings as defaults
from tsgg.speculative import REGISTRY, Draft, DraftContext, SpeculationOptions, SpeculativeExecution
from tsgg.speculative import automaton as automaton_module
from tsgg.speculative.automaton import NONE, ROOT, SuffixAutomaton
from tsgg.speculative.ngram import GAP, NO_MATCH, WEAK_MATCH
from tsgg.speculative.suffix import BORDER, DOUBT, LONGEST, SHORTEST, AnswerCorpus, SuffixSpeculator

texts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 20), min_size=1, max_size=25).map(lambda part: part * 3),
)


def built(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def ends(text: list[int], context: list[int]) -> list[int]:
    """Where `context` ends in the text."""
    k = len(context)
    return [end for end in range(k, len(text) + 1) if text[end - k : end] == context]


def followers(text: list[int], context: list[int]) -> dict[int, list[int]]:
    """Token -> places where it followed the context."""
    found: dict[int, list[int]] = {}
    for end in ends(text, context):
        if end < len(text):
            found.setdefault(text[end], []).append(end)
    return found


def favourite(text: list[int], context: list[int]) -> tuple[int, int] | None:
    """The token that followed most, of equals the latest, and how often."""
    found = followers(text, context)
    if not found:
        return None
    token = max(found, key=lambda token: (len(found[token]), found[token][-1]))
    return token, len(found[token])


def brute_force(text: list[int], last: int, window: int, pmin: float) -> tuple[list[int], list[float]]:
    """The rule in words: the longest suffix of the text and `last` that occurs in the text; what followed it most; on with the
    context that is longer by that token; a context that nothing follows gives way to the longest shorter one that occurs more
    often; until the tokens together are less likely than `pmin`."""
    whole = [*text, last]
    length = next((k for k in range(len(whole), 0, -1) if ends(text, whole[-k:])), 0)
    context, tokens, confidences, survival = whole[len(whole) - length :], list[int](), list[float](), 1.0
    while len(tokens) < window and len(context) >= SHORTEST:
        found = favourite(text, context)
        if found is None:
            occurs = len(ends(text, context))
            while context and len(ends(text, context)) == occurs:
                context = context[1:]
            continue
        token, follows = found
        confidence = follows / (len(ends(text, context)) + DOUBT / len(context) ** 2)
        survival *= confidence
        if survival < pmin:
            break
        tokens.append(token)
        confidences.append(confidence)
        context = [*context, token]
    return tokens, confidences


def opened(tokens: list[int], pmin: float = 0.0, corpus: int = 0) -> SuffixSpeculator:
    speculator, sequence = SuffixSpeculator(pmin, corpus), ScriptedSequence()
    sequence.tokens = list(tokens)
    speculator.open(0, sequence)
    return speculator


def propose(speculator: SuffixSpeculator, position: int, last: int, window: int = 8, key: int = 0) -> Draft:
    (draft,) = speculator.propose([DraftContext(key, last, position, window)])
    return draft


def answered(speculator: SuffixSpeculator, key: int, prompt: list[int], answer: list[int]) -> None:
    """One request from its prompt to its end."""
    sequence = ScriptedSequence()
    sequence.tokens = list(prompt)
    speculator.open(key, sequence)
    propose(speculator, len(prompt), answer[0], key=key)
    speculator.commit(key, answer, len(prompt), None)
    speculator.close(key)


# -- the automaton -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(texts)
def test_every_context_has_its_count_and_its_most_frequent_successor(text: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automaton_module, "MOST_COUNTED", 1000)
        automaton = built(text)
    contexts = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, min(i + 9, len(text)) + 1)}
    for context in contexts:
        state = ROOT
        for token in context:
            state = automaton.after(state, token)
            assert state != NONE
        successor, token, follows, occurs = automaton.best(state)
        assert occurs == len(ends(text, list(context)))
        expected = favourite(text, list(context))
        assert (None if successor == NONE else (token, follows)) == expected
        assert {t for t in set(text) | {99} if automaton.after(state, t)} == set(followers(text, list(context)))


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(0, 20), st.lists(st.integers(0, 4), max_size=12))
def test_the_longest_suffix_that_occurs_is_found(text: list[int], last: int, tail: list[int]) -> None:
    automaton, whole = built(text), [*text, last]
    longest = next((k for k in range(len(whole), 0, -1) if ends(text, whole[-k:])), 0)
    assert automaton.repeated(last)[1] == longest
    assert automaton.find(tail)[1] == next((k for k in range(len(tail), 0, -1) if ends(text, tail[-k:])), 0)


@pytest.mark.parametrize("text", [[7] * 4000, [0, 1, 2] * 1500, list(range(3000)), [i * i % 97 for i in range(4000)]])
def test_a_token_costs_the_same_wherever_it_stands(text: list[int]) -> None:
    """Look-ups per token and states per token are bounded, for texts that are one long repetition too."""

    class Counting(SuffixAutomaton):
        looked = 0

        def after(self, state: int, token: int) -> int:
            Counting.looked += 1
            return super().after(state, token)

    automaton = Counting()
    for token in text:
        automaton.repeated(token)  # as a drafter does: before the token is committed
        automaton.append(token)
    assert Counting.looked <= len(text) * (automaton_module.MOST_COUNTED + 15)
    assert len(automaton._length) < 2 * len(text) + 1


def test_counts_that_are_cut_short_are_never_too_high() -> None:
    text = [5] * 200
    automaton, state = built(text), ROOT
    for k in range(1, 60):
        state = automaton.after(state, 5)
        assert 0 < automaton.best(state)[3] <= 200 - k + 1


# -- the drafts ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(0, 20), st.integers(1, 16), st.sampled_from([0.0, 0.2, 0.5, 0.9]))
def test_a_draft_is_what_brute_force_finds(text: list[int], last: int, window: int, pmin: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automaton_module, "MOST_COUNTED", 1000)
        draft = propose(opened(text, pmin), len(text), last, window)
    tokens, confidences = brute_force(text, last, window, pmin)
    assert list(draft.tokens) == tokens and list(draft.confidences) == pytest.approx(confidences)
    assert bool(draft.tokens) != bool(draft.silence)


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(0, 20), st.integers(1, 16))
def test_nothing_is_drafted_that_did_not_follow_its_context_before(text: list[int], last: int, window: int) -> None:
    """And the draft ends where what was drafted is no longer likely, whatever the counts behind it."""
    draft = propose(opened(text, 0.3), len(text), last, window)
    assert len(draft.tokens) <= window and len(draft.tokens) == len(draft.confidences)
    assert math.prod(draft.confidences) >= 0.3 and all(0.0 < c < 1.0 for c in draft.confidences)
    whole = [*text, last]
    for token in draft.tokens:
        assert token in followers(text, whole[-SHORTEST:])
        whole.append(token)


@settings(max_examples=80, deadline=None)
@given(texts, st.data())
def test_committing_piece_by_piece_drafts_the_same_as_seeding_at_once(text: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text) - 1), max_size=12)) | {len(text) - 1})
    speculator, done = opened(text[: cuts[0]]), cuts[0]
    for cut in cuts[1:]:
        propose(speculator, done, text[done])
        speculator.commit(0, text[done:cut], done, None)
        done = cut
    assert propose(speculator, done, text[-1]) == propose(opened(text[:-1]), len(text) - 1, text[-1])


def test_what_followed_most_wins_over_what_followed_last() -> None:
    text = [1, 2, 8, 0, 1, 2, 8, 3, 1, 2, 9, 4]
    assert propose(opened([*text, 1]), 13, 2, 1).tokens == (8,)
    assert propose(opened([1, 2, 8, 0, 1, 2, 9, 4, 1]), 9, 2, 1).tokens == (9,)  # once each: the latest


def test_confidence_grows_with_the_context_and_with_the_count() -> None:
    once = propose(opened([*range(10), 30, *range(5)]), 16, 5, 1).confidences[0]
    short = propose(opened([4, 5, 6, 30, 31, 4]), 6, 5, 1).confidences[0]
    often = propose(opened([4, 5, 6, 30, 4, 5, 6, 31, 4, 5, 6, 32, 4]), 13, 5, 1).confidences[0]
    split = propose(opened([4, 5, 6, 30, 4, 5, 7, 31, 4]), 9, 5, 1).confidences[0]
    assert split < often and short < often < once


def test_a_text_that_repeats_itself_is_drafted_past_its_own_end() -> None:
    assert propose(opened([4, 5, 6] * 4), 12, 4, 8).tokens == (5, 6, 4, 5, 6, 4, 5, 6)


def test_silence_has_a_reason() -> None:
    assert propose(opened(list(range(50))), 50, 7) == Draft(silence=NO_MATCH)  # one token of context is none
    assert propose(opened([4, 5, 6, 30, 31, 4], 0.9), 6, 5) == Draft(silence=WEAK_MATCH)
    assert propose(opened([]), 0, 5) == Draft(silence=NO_MATCH)


@pytest.mark.parametrize("start", [4, 8])
def test_behind_a_gap_it_stays_silent_until_it_is_seeded_again(start: int) -> None:
    speculator = opened([1, 2, 3, 1, 2, 3])
    assert propose(speculator, 6, 1).tokens
    speculator.commit(0, [1, 2, 3], start, None)
    assert propose(speculator, start + 3, 1) == Draft(silence=GAP)
    speculator.commit(0, [1, 2, 3], 6, None)  # fits, but what lies between is unknown
    assert propose(speculator, 9, 1) == Draft(silence=GAP)
    sequence = ScriptedSequence()
    sequence.tokens = [1, 2, 3] * 3
    speculator.open(0, sequence)
    assert propose(speculator, 9, 1).tokens


# -- what requests share -------------------------------------------------------------------------------------------------------


def test_a_request_drafts_from_the_answer_to_an_earlier_one() -> None:
    speculator = SuffixSpeculator(corpus=1000)
    answered(speculator, 0, [1, 2, 3], [10, 11, 12, 13, 14, 15])
    sequence = ScriptedSequence()
    sequence.tokens = [90, 91, 10, 11]
    speculator.open(1, sequence)
    assert propose(speculator, 4, 12, 3, key=1).tokens == (13, 14, 15)


def test_prompts_and_unasked_requests_are_not_shared() -> None:
    for corpus, prompt in ((1000, [10, 11, 12, 13, 14, 15]), (0, [1, 2, 3])):
        speculator = SuffixSpeculator(corpus=corpus)
        answered(speculator, 0, prompt, [20, 21] if corpus else [10, 11, 12, 13, 14, 15])
        sequence = ScriptedSequence()
        sequence.tokens = [90, 91, 10, 11]
        speculator.open(1, sequence)
        assert propose(speculator, 4, 12, 3, key=1) == Draft(silence=NO_MATCH)


def test_no_draft_reaches_from_one_answer_into_the_next() -> None:
    corpus = AnswerCorpus(1000)
    corpus.add([1, 2, 3])
    corpus.add([4, 5, 6])
    assert [length for *_, length in corpus.matches([2, 3, 4])] == [1]
    speculator = SuffixSpeculator(0.0, 1000)
    speculator.corpus = corpus
    sequence = ScriptedSequence()
    sequence.tokens = [2]
    speculator.open(0, sequence)
    draft = propose(speculator, 1, 3)
    assert BORDER not in draft.tokens and draft.silence == WEAK_MATCH


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 60), st.lists(st.integers(1, 80), max_size=30))
def test_the_corpus_is_bounded_and_keeps_the_latest(most: int, lengths: list[int]) -> None:
    corpus, token, answer = AnswerCorpus(most), 0, list[int]()
    for length in lengths:
        answer = list(range(token, token + length))
        token += length
        corpus.add(answer)
        assert corpus.size <= most
    tail = answer[-LONGEST:]
    expected = min(len(tail), max(1, most // 2 - 1))
    assert not answer or max(length for *_, length in corpus.matches(tail)) == expected


def test_what_a_closed_request_held_is_gone() -> None:
    speculator = opened([1, 2, 3, 1, 2])
    speculator.close(0)
    speculator.close(0)
    assert not speculator._histories


# -- in the loop ---------------------------------------------------------------------------------------------------------------


def test_the_registry_makes_it_and_heeds_the_options() -> None:
    for options, pmin, shared in (
        (SpeculationOptions(enabled=True, type="suffix"), SuffixSpeculator.default_min_draft_prob, True),
        (SpeculationOptions(enabled=True, type="suffix", pmin=0.5, shared_corpus=False), 0.5, False),
    ):
        speculator = REGISTRY.create("suffix", ScriptedTrunk(), options)
        assert isinstance(speculator, SuffixSpeculator)
        assert speculator._pmin == pmin and (speculator.corpus is not None) == shared
    with pytest.raises(UsageError, match="shared_corpus"):
        SpeculationOptions(shared_corpus=1)  # type: ignore[arg-type]
    assert not SpeculationOptions.from_environment({"TS_SPEC_SHARED_CORPUS": "0"}).shared_corpus


@pytest.mark.parametrize("seed", [None, 5])
def test_the_stream_is_the_plain_one(seed: int | None) -> None:
    options = SpeculationOptions(enabled=True, type="suffix", pmin=0.0)
    execution = SpeculativeExecution(ScriptedTrunk(), REGISTRY.create("suffix", ScriptedTrunk(), options), options)
    for _ in range(2):  # the second request finds the answer to the first
        request, _, sampler = begin(execution, PROMPT, LIMIT, seed=seed)
        steps = finish(execution, request)
        execution.disarm(request)
        assert sampler.tokens == plain_stream(PROMPT, LIMIT, seed=seed)
    assert len(steps) < LIMIT / 3, "the answer was known"


def test_the_debug_switch_logs_why_it_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tsgg.suffix")
    speculator = opened([1, 2, 3])
    propose(speculator, 3, 9)
    assert not caplog.records
    monkeypatch.setattr("tsgg.speculative.suffix.settings", dataclasses.replace(defaults, ngram_debug=True))
    propose(speculator, 3, 9)
    speculator.commit(0, [9], 7, None)
    assert NO_MATCH in caplog.messages[0] and "history ends at 3" in caplog.messages[1]
