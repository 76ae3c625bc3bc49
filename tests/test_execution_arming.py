"""What a drafter is told: the trunk's rows, and tokens that it did not see being made."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.scripted import (
    Guess,
    ScriptedDrafter,
    ScriptedSampler,
    ScriptedSequence,
    ScriptedTrunk,
    empty,
    features_of,
    fold,
    mixed,
    plain_stream,
    right,
    wrong,
)
from tests.scripted_loop import LIMIT, PROMPT, Windows, begin, decode, finish, options
from tsgg.speculative import (
    Batch,
    SpeculativeExecution,
    Want,
)
from tsgg.speculative.execution import NO_ROOM, PLAIN

# -- rows for a learned drafter ----------------------------------------------------------------------------------------


class Learned(ScriptedDrafter):
    needs_hidden_state = True
    taps = (2, 5)


class Resuming(Learned):
    can_arm_after_prefix_reuse = True


class Prefilling(Learned):
    handles_own_prefill = True


def assert_rows(drafter: ScriptedDrafter, key: int, end: int) -> None:
    """The drafter was handed the trunk's rows of exactly the tokens committed before position `end`."""
    tokens = drafter.corpus[key]
    rows = np.vstack(drafter.rows[key])
    expected = [[*features_of(fold(tokens[: p + 1]), p)[:3], 2, 5] for p in range(end)]
    np.testing.assert_array_equal(rows, np.array(expected, np.float32))


@pytest.mark.parametrize("guess", [right, wrong, mixed, empty])
@pytest.mark.parametrize("kind", [Learned, Resuming])
def test_a_drafter_that_needs_rows_gets_those_of_exactly_the_committed_tokens(
    kind: type[Learned], guess: Guess
) -> None:
    drafter, trunk = kind(guess), ScriptedTrunk()
    request, sequence, sampler, _ = decode(drafter, 4, trunk=trunk)
    assert sampler.tokens == plain_stream(PROMPT, LIMIT)
    assert drafter.corpus[request.key] == sequence.tokens
    bare = trunk.forwards.count((1, 1, PLAIN))  # the last token wanted: no room for a draft, and a gap may be borne
    assert bare == (request.counters.snapshot().silence_reasons.get(NO_ROOM, 0) if kind is Resuming else 0)
    assert_rows(drafter, request.key, sequence.length - bare)


@pytest.mark.parametrize(
    ("kind", "want"),
    [(ScriptedDrafter, PLAIN), (Prefilling, PLAIN), (Learned, Want("last", "all", (2, 5)))],
)
def test_a_prompt_is_forwarded_with_rows_for_a_drafter_that_wants_them_and_plainly_for_any_other(
    kind: type[ScriptedDrafter], want: Want
) -> None:
    drafter, trunk = kind(right), ScriptedTrunk()
    request, sequence, sampler, _ = decode(drafter, 4, limit=21, trunk=trunk)
    assert trunk.forwards[:2] == [(1, 4, want), (1, len(PROMPT) - 4, want)]
    assert sampler.tokens == plain_stream(PROMPT, 21)
    assert drafter.corpus[request.key] == sequence.tokens and request.counters.snapshot().accepted > 0


@pytest.mark.parametrize("kind", [Learned, Resuming])
def test_of_a_forward_over_many_sequences_each_gets_its_own_rows(kind: type[Learned]) -> None:
    def partly_right(prefix: list[int], window: int) -> list[int]:
        good = fold(prefix) % (window + 1)
        return [*right(prefix, good), *wrong(prefix, window)[good:]]

    drafter = kind(partly_right)
    execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(4))
    prompts = [[*PROMPT, 2], PROMPT[::-1], [0, *PROMPT, 1]]
    begun = [begin(execution, prompt, 1000, slot=i) for i, prompt in enumerate(prompts)]
    kept: set[tuple[int, ...]] = set()
    for _ in range(15):
        steps = list(execution.step([request for request, _, _ in begun]))
        assert all(step.sample is not None and step.sample.sequences == 3 for step in steps)
        kept.add(tuple(len(step.tokens) for step in steps))
    assert any(len(set(counts)) > 1 for counts in kept)
    for request, sequence, _ in begun:
        assert drafter.corpus[request.key] == sequence.tokens
        assert_rows(drafter, request.key, sequence.length)


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


# -- tokens that the drafter did not see being made --------------------------------------------------------------------


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


def test_a_sequence_that_was_truncated_and_given_other_tokens_is_seeded_again_on_demand() -> None:
    drafter, trunk = ScriptedDrafter(right), ScriptedTrunk()
    execution = SpeculativeExecution(trunk, drafter, options(4))
    request, sequence, _ = begin(execution, PROMPT, 40)
    list(execution.step([request]))
    sequence.truncate(6)
    other = list(range(12))  # longer than before: only the caller knows what happened
    trunk.forward(Batch((sequence,), np.array([other], np.int32), PLAIN))
    sequence.commit(len(other))
    execution.seed_committed(request)
    sampler = ScriptedSampler([*sequence.tokens, 0], 20)
    request.last, request.sampler, request.remaining = 0, sampler, 20
    finish(execution, request)
    assert sampler.tokens == plain_stream(sampler.prompt, 20)
    assert drafter.corpus[request.key] == sequence.tokens == [*PROMPT[:6], *other, 0, *sampler.tokens[:-1]]


def test_a_drafter_that_cannot_do_without_rows_is_dropped_behind_tokens_that_came_without_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tsgg.speculative")
    drafter, trunk = Learned(right), ScriptedTrunk()
    execution = SpeculativeExecution(trunk, drafter, options(4))
    request, sequence, sampler = begin(execution, PROMPT, 40)
    list(execution.step([request]))
    rows = trunk.forward(Batch((sequence,), np.array([[request.last]], np.int32), PLAIN))
    request.advance([sampler.sample(rows.logits(0, 0), sequence.length + 1)])
    sequence.commit(1)
    trunk.forwards.clear()
    finish(execution, request)
    assert sampler.tokens == plain_stream(PROMPT, 40)
    assert set(trunk.forwards) == {(1, 1, PLAIN)} and drafter.closed == [request.key]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "hidden rows of 1 tokens" in str(request.counters.dropped)


def test_a_request_for_a_single_token_is_never_armed() -> None:
    drafter = ScriptedDrafter(right)
    execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(4))
    request = execution.arm(ScriptedSequence(), ScriptedSampler(PROMPT, 1), remaining=1)
    assert not request.armed and drafter.corpus == {} and request.counters.dropped
