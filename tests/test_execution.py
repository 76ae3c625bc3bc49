"""The draft-verify-accept-commit loop against a trunk whose every row is known: stream, window, stops, counters.

At each draw the sampler checks invariant 1: the row's logits are the truth behind what was emitted before.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scripted import (
    VOCAB,
    Guess,
    ScriptedDrafter,
    ScriptedSampler,
    ScriptedSequence,
    ScriptedTrunk,
    empty,
    plain_stream,
    right,
    wrong,
)
from tests.scripted_loop import GUESSES, LIMIT, PROMPT, WINDOWS, Windows, assert_memory, begin, decode, finish, options
from tsgg.errors import UsageError
from tsgg.speculative import (
    Decline,
    DraftContext,
    SpeculativeExecution,
    Step,
    Want,
)
from tsgg.speculative.execution import NO_ROOM, PARKED, PLAIN
from tsgg.speculative.ngram import NgramSpeculator

# -- the stream is plain decoding's, whatever drafts -------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "seeded"])
@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("window", WINDOWS)
def test_any_drafter_in_any_window_leaves_the_stream_memory_and_corpus_of_plain_decoding(
    window: int, guess: Guess, seed: int | None
) -> None:
    drafter = ScriptedDrafter(guess)
    request, sequence, sampler, steps = decode(drafter, window, seed=seed)
    assert sampler.tokens == plain_stream(PROMPT, LIMIT, seed=seed)
    assert_memory(sequence, PROMPT, sampler.tokens)
    assert drafter.corpus[request.key] == sequence.tokens
    assert [token for step in steps for token in step.tokens] == sampler.tokens[1:]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "seeded"])
def test_the_ngram_drafter_leaves_the_stream_of_plain_decoding_and_knows_exactly_what_is_committed(
    window: int, seed: int | None
) -> None:
    drafter, fresh = NgramSpeculator(), NgramSpeculator()
    request, sequence, sampler, _ = decode(drafter, window, limit=150, seed=seed)
    assert sampler.tokens == plain_stream(PROMPT, 150, seed=seed)
    assert_memory(sequence, PROMPT, sampler.tokens)
    assert request.counters.snapshot().drafted > 0
    fresh.open(request.key, sequence)
    everything = [DraftContext(request.key, last, sequence.length, 64) for last in range(VOCAB)]
    assert drafter.propose(everything) == fresh.propose(everything)


@pytest.mark.parametrize("speculator", [None, Decline("switched off")])
def test_without_a_speculator_the_loop_is_plain_decoding(speculator: Decline | None) -> None:
    trunk = ScriptedTrunk()
    execution = SpeculativeExecution(trunk, speculator, options())
    request, _, sampler = begin(execution, PROMPT, 20)
    finish(execution, request)
    assert sampler.tokens == plain_stream(PROMPT, 20)
    assert set(trunk.forwards[2:]) == {(1, 1, Want(logits="last"))}
    assert request.counters.dropped == (speculator.reason if speculator else None)


def test_right_drafts_are_accepted_whole_and_the_row_behind_them_is_emitted_too() -> None:
    request, _, _, steps = decode(ScriptedDrafter(right), 7, limit=1 + 8 * 5)
    assert [len(step.tokens) for step in steps] == [8] * 5
    assert all(step.from_draft == (True,) * 7 + (False,) for step in steps)
    stats = request.counters.snapshot()
    assert (stats.verifies, stats.drafted, stats.accepted, stats.emitted) == (5, 35, 35, 40)
    assert stats.acceptance == 1.0 and stats.tokens_per_verify == 8.0
    assert stats.drafted_per_position == stats.accepted_per_position == (5,) * 7


def test_wrong_drafts_cost_a_verify_each_and_give_one_token() -> None:
    request, _, _, steps = decode(ScriptedDrafter(wrong), 3, limit=10)
    assert all(step.from_draft == (False,) for step in steps)
    stats = request.counters.snapshot()
    assert (stats.steps, stats.accepted, stats.tokens_per_verify) == (9, 0, 1.0)
    assert stats.drafted == 3 * 6 + 2 + 1 + 0  # the end of the request narrows the window


def test_a_draft_is_accepted_up_to_its_first_wrong_token() -> None:
    def wrong_at_two(prefix: list[int], window: int) -> list[int]:
        draft = right(prefix, window)
        return [*draft[:2], (draft[2] + 1) % VOCAB, *draft[3:]] if len(draft) > 2 else draft

    request, sequence, sampler, steps = decode(ScriptedDrafter(wrong_at_two), 5, limit=1 + 3 * 4)
    assert [len(step.tokens) for step in steps] == [3, 3, 3, 3]
    assert_memory(sequence, PROMPT, sampler.tokens)
    assert request.counters.snapshot().accepted_per_position[:4] == (4, 4, 0, 0)


# -- the window --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "preferred", "most", "expected"),
    [
        (None, None, 64, 8),
        (None, 3, 64, 3),
        (None, 20, 64, 8),
        (12, 3, 64, 12),
        (2, 7, 64, 2),
        (64, None, 15, 15),
        (None, 7, 4, 4),
    ],
    ids=["default", "narrowed", "never widened", "explicit wins", "explicit narrow", "drafter's most", "both"],
)
def test_the_window_is_the_explicit_number_or_the_default_narrowed_by_the_trunk(
    draft: int | None, preferred: int | None, most: int, expected: int
) -> None:
    drafter = ScriptedDrafter(right)
    drafter.max_draft_tokens = most
    decode(drafter, draft, limit=90, trunk=ScriptedTrunk(preferred=preferred))
    assert drafter.contexts[0].window == expected


def test_the_last_tokens_wanted_narrow_the_window_so_that_no_row_is_drawn_in_vain() -> None:
    trunk = ScriptedTrunk()
    request, _, sampler, _ = decode(ScriptedDrafter(right), 8, limit=1 + 9 + 4, trunk=trunk)
    assert [rows for _, rows, _ in trunk.forwards[2:]] == [9, 4]
    assert len(sampler.tokens) == 14 and sampler.finished == "length"
    assert request.remaining == 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_request_ends_with_the_tokens_it_has_left_whatever_its_sampler_would_draw(window: int) -> None:
    execution = SpeculativeExecution(ScriptedTrunk(), ScriptedDrafter(right), options(window))
    request, sequence, sampler = begin(execution, PROMPT, 100)
    request.remaining = 12
    steps = finish(execution, request)
    assert sampler.tokens == plain_stream(PROMPT, 13)
    assert_memory(sequence, PROMPT, sampler.tokens)
    assert request.remaining == 0 and steps[-1].finished == "length" and sampler.finished is None
    request.context_full = True
    assert request.finished == "length", "of two limits that are reached at once, the one that was asked for is told"


def test_the_end_of_the_context_narrows_the_window_and_then_ends_the_request() -> None:
    trunk = ScriptedTrunk(context=len(PROMPT) + 12)
    request, sequence, sampler, _ = decode(ScriptedDrafter(right), 8, limit=100, trunk=trunk)
    assert [rows for _, rows, _ in trunk.forwards[2:]] == [9, 3]
    assert sequence.length == trunk.context
    assert request.finished == "context" and sampler.finished is None
    assert sampler.tokens == plain_stream(PROMPT, 13)


def test_with_one_row_left_a_step_is_plain_and_says_that_there_was_no_room() -> None:
    request, _, _, _ = decode(ScriptedDrafter(right), 8, trunk=ScriptedTrunk(context=len(PROMPT) + 1))
    assert dict(request.counters.snapshot().silence_reasons) == {NO_ROOM: 1}


def test_a_policy_chooses_each_window_and_is_told_of_each_step() -> None:
    trunk, policy = ScriptedTrunk(), Windows([0, 2, 5, 99, -1])
    execution = SpeculativeExecution(trunk, ScriptedDrafter(right), options(6), policy)
    request, _, sampler = begin(execution, PROMPT, 200)
    for _ in range(5):
        list(execution.step([request]))
    assert [rows for _, rows, _ in trunk.forwards[2:]] == [1, 3, 6, 7, 1]
    assert [sample.emitted for sample in policy.samples] == [1, 3, 6, 7, 1]
    assert [sample.window for sample in policy.samples] == [0, 2, 5, 6, 0]
    assert [context.length for context in policy.contexts] == [11, 12, 15, 21, 28]
    assert all(context.ceiling == 6 and context.sequences == 1 for context in policy.contexts)
    assert dict(request.counters.snapshot().silence_reasons) == {PARKED: 2}
    assert sampler.tokens == plain_stream(PROMPT, len(sampler.tokens))


def test_a_step_without_drafts_asks_for_exactly_what_plain_decoding_asks_for() -> None:
    trunk = ScriptedTrunk()
    decode(ScriptedDrafter(empty), 8, limit=10, trunk=trunk)
    assert set(trunk.forwards[2:]) == {(1, 1, PLAIN)}
    assert Want(logits="last") == PLAIN


# -- stops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("stop", range(VOCAB))
def test_nothing_is_accepted_behind_a_stop(stop: int, window: int) -> None:
    drafter = ScriptedDrafter(right)
    request, sequence, sampler, steps = decode(drafter, window, limit=40, stops=(stop,))
    expected = plain_stream(PROMPT, 40, stops=(stop,))
    assert sampler.tokens == expected
    assert_memory(sequence, PROMPT, expected)
    assert drafter.corpus[request.key] == sequence.tokens
    if expected[-1] == stop and steps:
        assert steps[-1].finished == "stop" and steps[-1].sample is not None and steps[-1].sample.finished


def test_a_step_never_starts_behind_a_stop() -> None:
    trunk = ScriptedTrunk()
    execution = SpeculativeExecution(trunk, ScriptedDrafter(right), options())
    first = plain_stream(PROMPT, 1)[0]
    request, _, _ = begin(execution, PROMPT, 40, stops=(first,))
    before = len(trunk.forwards)
    assert list(execution.step([request])) == [Step(request, finished="stop")]
    assert len(trunk.forwards) == before


def test_a_request_without_a_drawn_token_is_a_usage_error() -> None:
    execution = SpeculativeExecution(ScriptedTrunk(), None, options())
    with pytest.raises(UsageError, match=r"request\.last"):
        list(execution.step([execution.arm(ScriptedSequence(), ScriptedSampler([], 5))]))


# -- counters ----------------------------------------------------------------------------------------------------------


def ticking(step: float = 1.0) -> Callable[[], float]:
    now = iter(range(10_000_000))
    return lambda: step * next(now)


def test_counters_count_steps_verifies_silence_and_the_seconds_of_each_kind() -> None:
    def now_and_then(prefix: list[int], window: int) -> list[int]:
        return right(prefix, 2) if len(prefix) % 2 else []

    execution = SpeculativeExecution(ScriptedTrunk(), ScriptedDrafter(now_and_then), options(2), clock=ticking())
    request, _, _ = begin(execution, PROMPT, 12)  # 12 tokens before the first step: even, silent; then 13: verify; ...
    steps = finish(execution, request)
    assert [len(step.tokens) for step in steps] == [1, 3, 1, 3, 1, 2]
    stats, verifies = request.counters.snapshot(), 3
    assert (stats.steps, stats.verifies, stats.plain_steps) == (len(steps), verifies, len(steps) - verifies)
    assert stats.emitted == 11 and stats.silent_steps == stats.plain_steps
    assert set(stats.silence_reasons) <= {"nothing to say", NO_ROOM}
    # each forward, each draw-and-commit and each proposal takes one tick of the clock, each telling of the drafter one
    assert stats.verify_seconds == 2.0 * verifies
    assert stats.plain_seconds == 2.0 * stats.plain_steps
    assert stats.draft_seconds == 2.0 * len(steps) - stats.silence_reasons.get(NO_ROOM, 0)
    assert execution.counters.snapshot() == stats


def test_a_snapshot_does_not_change_with_later_steps() -> None:
    execution = SpeculativeExecution(ScriptedTrunk(), ScriptedDrafter(right), options(2))
    request, _, _ = begin(execution, PROMPT, 30)
    list(execution.step([request]))
    before = request.counters.snapshot()
    finish(execution, request)
    assert before.steps == 1 and before.drafted_per_position == (1, 1)
    assert request.counters.snapshot().steps > 1
