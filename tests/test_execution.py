"""The draft-verify-accept-commit loop against a trunk whose every row is known.

Wherever `decode` runs, the sampler checks invariant 1 at each draw: the row's logits are the truth behind what was emitted before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted import (
    VOCAB,
    Guess,
    ScriptedDrafter,
    ScriptedSampler,
    ScriptedSequence,
    ScriptedTrunk,
    empty,
    features_of,
    fold,
    mixed,
    numpy_integers,
    out_of_range,
    plain_stream,
    random_tokens,
    right,
    too_long,
    wrong,
)
from tsgg.errors import UsageError
from tsgg.speculative import (
    Batch,
    Decline,
    Draft,
    DraftContext,
    SpeculationOptions,
    SpeculativeExecution,
    SpeculativeRequest,
    Speculator,
    Step,
    StepSample,
    Want,
    WindowContext,
)
from tsgg.speculative.execution import NO_ROOM, PARKED, PLAIN
from tsgg.speculative.ngram import NgramSpeculator

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
WINDOWS = [1, 2, 3, 4, 7, 8, 15, 16]
GUESSES = [right, wrong, mixed, random_tokens, too_long, empty, out_of_range, numpy_integers]
LIMIT = 60


def options(draft: int | None = None) -> SpeculationOptions:
    return SpeculationOptions(enabled=True, draft=draft)


def begin(
    execution: SpeculativeExecution, prompt: list[int], limit: int, stops: tuple[int, ...] = (), seed: int | None = None
) -> tuple[SpeculativeRequest, ScriptedSequence, ScriptedSampler]:
    """Arm, prefill in two chunks, draw the first token: what an engine does before the first step."""
    sequence, sampler = ScriptedSequence(), ScriptedSampler(prompt, limit, stops, seed)
    request = execution.arm(sequence, sampler, remaining=limit - 1)
    for chunk in (prompt[:4], prompt[4:]):
        want = execution.prefill_want(request)
        rows = execution.trunk.forward(Batch((sequence,), np.array([chunk], np.int32), want))
        if sequence.length:
            request.last = sampler.sample(rows.logits(0, len(chunk) - 1), len(prompt))
        sequence.commit(len(chunk))
        execution.catch_up(request, rows, 0)
    return request, sequence, sampler


def finish(execution: SpeculativeExecution, *requests: SpeculativeRequest) -> list[Step]:
    steps: list[Step] = []
    while any(request.finished is None for request in requests):
        steps += execution.step(list(requests))
    return steps


def decode(
    speculator: Speculator | None,
    draft: int | None = None,
    limit: int = LIMIT,
    stops: tuple[int, ...] = (),
    seed: int | None = None,
    trunk: ScriptedTrunk | None = None,
) -> tuple[SpeculativeRequest, ScriptedSequence, ScriptedSampler, list[Step]]:
    execution = SpeculativeExecution(trunk or ScriptedTrunk(), speculator, options(draft))
    request, sequence, sampler = begin(execution, PROMPT, limit, stops, seed)
    return request, sequence, sampler, finish(execution, request)


def assert_memory(sequence: ScriptedSequence, prompt: list[int], emitted: list[int]) -> None:
    """Memory holds all that was emitted but the last token, in the state of a plain replay."""
    assert sequence.tokens == prompt + emitted[:-1]
    assert sequence.states[-1] == fold(sequence.tokens)


# -- the stream is plain decoding's, whatever drafts ------------------------------------------------------------------


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
def test_the_ngram_drafter_leaves_the_stream_of_plain_decoding(window: int, seed: int | None) -> None:
    request, sequence, sampler, _ = decode(NgramSpeculator(), window, limit=150, seed=seed)
    assert sampler.tokens == plain_stream(PROMPT, 150, seed=seed)
    assert_memory(sequence, PROMPT, sampler.tokens)
    assert request.counters.snapshot().drafted > 0


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


# -- the window -------------------------------------------------------------------------------------------------------


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


def test_the_end_of_the_context_narrows_the_window_and_then_ends_the_request() -> None:
    trunk = ScriptedTrunk(context=len(PROMPT) + 12)
    request, sequence, sampler, _ = decode(ScriptedDrafter(right), 8, limit=100, trunk=trunk)
    assert [rows for _, rows, _ in trunk.forwards[2:]] == [9, 3]
    assert sequence.length == trunk.context
    assert request.finished == "length" and sampler.finished is None
    assert sampler.tokens == plain_stream(PROMPT, 13)


def test_with_one_row_left_a_step_is_plain_and_says_that_there_was_no_room() -> None:
    request, _, _, _ = decode(ScriptedDrafter(right), 8, trunk=ScriptedTrunk(context=len(PROMPT) + 1))
    assert dict(request.counters.snapshot().silence_reasons) == {NO_ROOM: 1}


class Windows:
    """A policy that walks through a list of windows and keeps what it is told."""

    def __init__(self, windows: list[int]) -> None:
        self.windows, self.contexts, self.samples = windows, list[WindowContext](), list[StepSample]()

    def choose(self, context: WindowContext) -> int:
        self.contexts.append(context)
        return self.windows[(len(self.contexts) - 1) % len(self.windows)]

    def record(self, sample: StepSample) -> None:
        self.samples.append(sample)


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


# -- stops ------------------------------------------------------------------------------------------------------------


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


# -- what a drafter may do wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [0, 2])
@pytest.mark.parametrize("method", ["open", "propose", "commit", "close"])
def test_a_drafter_that_raises_is_dropped_with_one_logged_reason_and_the_request_goes_on(
    method: str, fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at = 0 if method in ("open", "close") else fail_at
    drafter = ScriptedDrafter(mixed, fail_in=method, fail_at=fail_at)
    execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(4))
    with caplog.at_level(logging.WARNING):
        request, sequence, sampler = begin(execution, PROMPT, LIMIT)
        finish(execution, request)
        execution.disarm(request)
        execution.disarm(request)
    assert sampler.tokens == plain_stream(PROMPT, LIMIT)
    assert_memory(sequence, PROMPT, sampler.tokens)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    dropped = request.counters.snapshot().dropped
    assert dropped is not None and dropped in caplog.text and f"broken in {method}" in dropped
    assert drafter.closed == [request.key]  # what it held for the request is released, once


def test_a_drafter_that_raises_after_the_trunk_committed_drafts_no_more() -> None:
    drafter = ScriptedDrafter(right, fail_in="commit", fail_at=3)  # two chunks of the prompt, one step
    _, sequence, sampler, steps = decode(drafter, 4, limit=20)
    assert [len(step.tokens) for step in steps[:3]] == [5, 5, 1]
    assert_memory(sequence, PROMPT, sampler.tokens)


class Odd(ScriptedDrafter):
    """Hands back something that is not one draft per context."""

    def __init__(self, result: object) -> None:
        super().__init__(empty)
        self.result = result

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        return self.result  # type: ignore[return-value]


@pytest.mark.parametrize(
    "result",
    [None, [], [Draft()] * 2, ["drafts"], [Draft(("a",))], [Draft((1.0,))], [Draft(None)]],
    ids=repr,  # type: ignore[arg-type]
)
def test_a_malformed_proposal_counts_as_raising(result: object, caplog: pytest.LogCaptureFixture) -> None:
    request, _, sampler, _ = decode(Odd(result), 4, limit=10)
    assert sampler.tokens == plain_stream(PROMPT, 10)
    assert len(caplog.records) == 1 and "failed in propose" in str(request.counters.dropped)


def test_tokens_outside_the_vocabulary_or_the_window_are_counted_and_never_forwarded() -> None:
    trunk = ScriptedTrunk()  # asserts on every token that it is given
    request, _, _, steps = decode(ScriptedDrafter(out_of_range), 8, limit=21, trunk=trunk)
    stats = request.counters.snapshot()
    assert set(stats.drafted_per_position) == {stats.verifies} and stats.drafted == stats.verifies
    assert stats.discarded == 3 * stats.verifies
    request, _, _, _ = decode(ScriptedDrafter(too_long), 4, limit=1 + 5 * 3)
    assert request.counters.snapshot().discarded == 5 * 3


def test_a_draft_of_nothing_valid_is_a_silent_step() -> None:
    request, _, _, _ = decode(ScriptedDrafter(lambda prefix, window: [VOCAB, 0]), 4, limit=5)
    stats = request.counters.snapshot()
    assert stats.verifies == 0 and stats.discarded == 2 * 3
    assert dict(stats.silence_reasons) == {"no valid token in the draft": 3, NO_ROOM: 1}


# -- rows for a learned drafter ---------------------------------------------------------------------------------------


class Learned(ScriptedDrafter):
    needs_hidden_state = True
    taps = (2, 5)


class Resuming(Learned):
    can_arm_after_prefix_reuse = True


def assert_rows(drafter: ScriptedDrafter, key: int, first: int = 0) -> None:
    """The drafter was handed the trunk's rows of exactly the tokens committed from position `first` on."""
    tokens = drafter.corpus[key]
    rows = np.vstack(drafter.rows[key])
    expected = [[*features_of(fold(tokens[: p + 1]), p)[:3], 2, 5] for p in range(first, len(tokens))]
    np.testing.assert_array_equal(rows, np.array(expected, np.float32))


@pytest.mark.parametrize("guess", [right, wrong, mixed, empty])
@pytest.mark.parametrize("kind", [Learned, Resuming])
def test_a_drafter_that_needs_rows_gets_those_of_exactly_the_committed_tokens(
    kind: type[Learned], guess: Guess
) -> None:
    drafter = kind(guess)
    request, sequence, sampler, _ = decode(drafter, 4)
    assert sampler.tokens == plain_stream(PROMPT, LIMIT)
    assert drafter.corpus[request.key] == sequence.tokens
    if kind is Learned:
        assert_rows(drafter, request.key)


def test_a_parked_step_asks_for_no_rows_where_the_drafter_bears_a_gap_and_for_rows_where_it_does_not() -> None:
    for kind, want in ((Resuming, PLAIN), (Learned, Want("last", "last", (2, 5)))):
        trunk = ScriptedTrunk()
        execution = SpeculativeExecution(trunk, kind(right), options(4), Windows([0]))
        request, _, _ = begin(execution, PROMPT, 20)
        list(execution.step([request]))
        assert trunk.forwards[-1] == (1, 1, want)


def test_a_prefix_without_rows_is_declined_by_a_drafter_that_cannot_resume_and_taken_by_one_that_can() -> None:
    for kind in (Learned, Resuming):
        drafter = kind(right)
        execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(4))
        donor, sequence, sampler = begin(execution, PROMPT, 10)
        assert donor.armed
        follower = execution.arm(sequence, sampler, donor.last, remaining=9)
        assert follower.armed == (kind is Resuming)
        assert ("did not see" in str(follower.counters.dropped)) == (kind is Learned)
        finish(execution, follower)
        assert sampler.tokens == plain_stream(PROMPT, 10)


# -- tokens that the drafter did not see being made -------------------------------------------------------------------


def test_arming_behind_a_plain_prefill_tells_the_drafter_of_what_memory_holds() -> None:
    drafter = ScriptedDrafter(right)
    trunk = ScriptedTrunk()
    _, sequence, sampler = begin(SpeculativeExecution(trunk, None, options()), PROMPT, 30)
    execution = SpeculativeExecution(trunk, drafter, options(4))
    request = execution.arm(sequence, sampler, sampler.tokens[-1], remaining=29)
    assert drafter.corpus[request.key] == PROMPT
    finish(execution, request)
    assert sampler.tokens == plain_stream(PROMPT, 30)
    assert drafter.corpus[request.key] == sequence.tokens
    assert request.counters.snapshot().accepted > 0


def test_chunks_of_one_prompt_arm_once() -> None:
    opened: list[int] = []

    class Counting(ScriptedDrafter):
        def open(self, key: int, sequence: object) -> None:
            opened.append(key)
            super().open(key, sequence)  # type: ignore[arg-type]

    request, _, _, _ = decode(Counting(right), 4)
    assert opened == [request.key]


def test_tokens_decoded_outside_the_loop_reach_the_drafter_before_it_drafts_again() -> None:
    drafter = ScriptedDrafter(right)
    trunk = ScriptedTrunk()
    execution = SpeculativeExecution(trunk, drafter, options(4))
    request, sequence, sampler = begin(execution, PROMPT, 40)
    list(execution.step([request]))
    for _ in range(3):  # an interlude of plain decoding
        rows = trunk.forward(Batch((sequence,), np.array([[request.last]], np.int32), PLAIN))
        request.advance([sampler.sample(rows.logits(0, 0), sequence.length + 1)])
        sequence.commit(1)
    finish(execution, request)
    assert sampler.tokens == plain_stream(PROMPT, 40)
    assert drafter.corpus[request.key] == sequence.tokens


def test_a_truncated_sequence_is_seeded_again() -> None:
    drafter = ScriptedDrafter(right)
    execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(4))
    request, sequence, _ = begin(execution, PROMPT, 40)
    list(execution.step([request]))
    sequence.truncate(6)
    request.last, request.sampler, request.remaining = PROMPT[6], ScriptedSampler(PROMPT[:7], 20), 20
    finish(execution, request)
    assert isinstance(request.sampler, ScriptedSampler) and request.sampler.tokens == plain_stream(PROMPT[:7], 20)
    assert drafter.corpus[request.key] == sequence.tokens


def test_a_request_for_a_single_token_is_never_armed() -> None:
    drafter = ScriptedDrafter(right)
    execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(4))
    request = execution.arm(ScriptedSequence(), ScriptedSampler(PROMPT, 1), remaining=1)
    assert not request.armed and drafter.corpus == {} and request.counters.dropped


# -- many requests ----------------------------------------------------------------------------------------------------


def test_one_step_of_many_requests_is_one_proposal_and_one_forward_per_row_count() -> None:
    def by_length(prefix: list[int], window: int) -> list[int]:
        return right(prefix, len(prefix) % 3)

    trunk, calls = ScriptedTrunk(), list[int]()

    class Counting(ScriptedDrafter):
        def propose(self, contexts: list[DraftContext]) -> list[Draft]:
            calls.append(len(contexts))
            return super().propose(contexts)

    drafter = Counting(by_length)
    execution = SpeculativeExecution(trunk, drafter, options(8))
    prompts = [PROMPT[: 5 + i] for i in range(6)]
    begun = [begin(execution, prompt, 30) for prompt in prompts]
    before = len(trunk.forwards)
    steps = list(execution.step([request for request, _, _ in begun]))
    assert calls == [6]
    assert sorted(trunk.forwards[before:], key=lambda f: f[1]) == [
        (2, 1, PLAIN),
        (2, 2, Want(logits="all")),
        (2, 3, Want(logits="all")),
    ]
    assert {step.request.key for step in steps} == {request.key for request, _, _ in begun}
    finish(execution, *(request for request, _, _ in begun))
    for prompt, (request, sequence, sampler) in zip(prompts, begun, strict=True):
        assert sampler.tokens == plain_stream(prompt, 30)
        assert_memory(sequence, prompt, sampler.tokens)
        assert drafter.corpus[request.key] == sequence.tokens


def test_among_many_requests_only_the_one_whose_draft_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    def fails_for_the_short(prefix: list[int], window: int) -> list[int]:
        if prefix[:7] == PROMPT[:6] + [0]:
            raise RuntimeError("cannot stand this prompt")
        return right(prefix, window)

    execution = SpeculativeExecution(ScriptedTrunk(), ScriptedDrafter(fails_for_the_short), options(4))
    prompts = [PROMPT, [*PROMPT[:6], 0, 5], PROMPT[::-1]]
    begun = [begin(execution, prompt, 25) for prompt in prompts]
    finish(execution, *(request for request, _, _ in begun))
    assert [sampler.tokens for _, _, sampler in begun] == [plain_stream(prompt, 25) for prompt in prompts]
    assert [request.armed for request, _, _ in begun] == [True, False, True]
    assert len(caplog.records) == 1
    assert execution.counters.snapshot().emitted == 24 * 3


def test_a_forward_that_raises_leaves_its_sequences_and_all_others_whole() -> None:
    trunk = ScriptedTrunk()
    drafter = ScriptedDrafter(lambda prefix, window: right(prefix, window if prefix[0] == 3 else 1))
    execution = SpeculativeExecution(trunk, drafter, options(4))
    prompts = [PROMPT, PROMPT[::-1], [*PROMPT[::-1], 7]]
    begun = [begin(execution, prompt, 30) for prompt in prompts]
    requests = [request for request, _, _ in begun]
    trunk.fails = lambda batch: batch.tokens.shape[1] == 2
    done: list[Step] = []
    with pytest.raises(RuntimeError, match="refused"):
        for step in execution.step(requests):
            done.append(step)
    assert [step.request for step in done] == requests[:1]
    trunk.fails = lambda batch: False
    finish(execution, *requests)
    for prompt, (request, sequence, sampler) in zip(prompts, begun, strict=True):
        assert sampler.tokens == plain_stream(prompt, 30)
        assert_memory(sequence, prompt, sampler.tokens)
        assert drafter.corpus[request.key] == sequence.tokens


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_history_of_windows_drafts_arrivals_and_departures_keeps_every_stream_and_corpus_exact(
    data: st.DataObject,
) -> None:
    windows = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6), label="windows")
    guesses = {i: data.draw(st.sampled_from(GUESSES), label="guess") for i in range(4)}
    drafter = ScriptedDrafter(lambda prefix, window: guesses[prefix[0] % 4](prefix, window))
    execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(9), Windows(windows))
    begun = []
    for arrival in range(4):
        prompt = [arrival, *data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=9), label="prompt")]
        limit, seed = data.draw(st.integers(2, 25)), data.draw(st.sampled_from([None, 1, 2]))
        stops = tuple(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=1)))
        begun.append((prompt, limit, stops, seed, *begin(execution, prompt, limit, stops, seed)))
        for _ in range(data.draw(st.integers(0, 4), label="steps")):
            list(execution.step([entry[4] for entry in begun]))
    finish(execution, *(entry[4] for entry in begun))
    for prompt, limit, stops, seed, request, sequence, sampler in begun:
        assert sampler.tokens == plain_stream(prompt, limit, stops, seed)
        assert_memory(sequence, prompt, sampler.tokens)
        if request.armed:
            assert drafter.corpus[request.key] == sequence.tokens


# -- counters ---------------------------------------------------------------------------------------------------------


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
