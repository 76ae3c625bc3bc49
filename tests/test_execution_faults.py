"""Whatever a drafter does wrong costs its request the speculation, and nothing else; what a sampler raises, no token."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from tests.scripted import (
    VOCAB,
    Guess,
    ScriptedDrafter,
    ScriptedSampler,
    ScriptedTrunk,
    empty,
    mixed,
    out_of_range,
    plain_stream,
    right,
    too_long,
    wrong,
)
from tests.scripted_loop import LIMIT, PROMPT, assert_memory, begin, decode, finish, options
from tsgg.speculative import (
    CommittedRows,
    Draft,
    DraftContext,
    Sequence,
    SpeculativeExecution,
    Speculator,
)
from tsgg.speculative.execution import NO_ROOM


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


MALFORMED: list[Any] = [None, [], [Draft()] * 2, ["drafts"]]
BAD_TOKENS: list[Any] = [("a",), (1.0,), None]


@pytest.mark.parametrize("count", [0, 2])
def test_the_reason_for_a_wrong_number_of_drafts_names_both_numbers(count: int) -> None:
    request, _, _, _ = decode(Odd([Draft()] * count), 4, limit=10)
    assert f"{count} drafts came back for 1 contexts" in str(request.counters.dropped)


class Bare(Speculator):
    """Raises an error that cannot be printed, and has no name."""

    def open(self, key: int, sequence: Sequence) -> None:
        pass

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        class Unprintable(Exception):
            def __str__(self) -> str:
                raise ValueError("no words")

        raise Unprintable

    def commit(self, key: int, tokens: list[int], start_position: int, rows: CommittedRows | None) -> None:
        pass

    def close(self, key: int) -> None:
        pass


def test_a_drafter_without_a_name_whose_error_cannot_be_printed_is_dropped_like_any_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request, _, sampler, _ = decode(Bare(), 4, limit=10)
    assert sampler.tokens == plain_stream(PROMPT, 10)
    assert len(caplog.records) == 1 and "Bare failed in propose" in str(request.counters.dropped)


@pytest.mark.parametrize("silence", [None, 3, ["unhashable"]], ids=repr)
def test_whatever_a_drafter_gives_as_its_reason_for_silence_is_counted_as_text(silence: Any) -> None:
    request, _, sampler, _ = decode(Odd([Draft(silence=silence)]), 4, limit=4)
    assert sampler.tokens == plain_stream(PROMPT, 4)
    reason = "no reason given" if silence is None else str(silence)
    assert dict(request.counters.snapshot().silence_reasons) == {reason: 2, NO_ROOM: 1}


@pytest.mark.parametrize("result", [*MALFORMED, *([Draft(tokens)] for tokens in BAD_TOKENS)], ids=repr)
def test_a_malformed_proposal_counts_as_raising(result: object, caplog: pytest.LogCaptureFixture) -> None:
    request, _, sampler, _ = decode(Odd(result), 4, limit=10)
    assert sampler.tokens == plain_stream(PROMPT, 10)
    assert len(caplog.records) == 1 and "failed in propose" in str(request.counters.dropped)


def test_tokens_outside_the_vocabulary_or_the_window_are_counted_and_never_forwarded() -> None:
    trunk = ScriptedTrunk()  # asserts on every token that it is given
    request, _, _, _ = decode(ScriptedDrafter(out_of_range), 8, limit=21, trunk=trunk)
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


class Failing(ScriptedSampler):
    """Raises instead of the draw behind so many tokens, and draws on if it is asked again."""

    def __init__(self, tokens: int) -> None:
        super().__init__(PROMPT, LIMIT)
        self.fails_behind: int | None = tokens

    def sample(self, logits: np.ndarray, position: int) -> int:
        if len(self.tokens) == self.fails_behind:
            self.fails_behind = None
            raise RuntimeError("sampler broke")
        return super().sample(logits, position)


@pytest.mark.parametrize("guess", [right, mixed, wrong, empty])
def test_a_sampler_that_raises_in_the_middle_of_a_verify_takes_no_token_from_before_the_error(guess: Guess) -> None:
    expected = plain_stream(PROMPT, LIMIT)
    for good in range(1, 16):
        drafter = ScriptedDrafter(guess)
        execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(4))
        request, sequence, _ = begin(execution, PROMPT, LIMIT)
        sampler = request.sampler = Failing(good)
        sampler.tokens = expected[:1]
        emitted, finishes = expected[:1], []
        with pytest.raises(RuntimeError, match="sampler broke"):
            while True:
                for step in execution.step([request]):
                    assert step.sample is not None and step.sample.emitted == len(step.tokens) == len(step.from_draft)
                    emitted += step.tokens
                    finishes.append(step.finished)
                    assert all(step.from_draft) == (step.error is not None), "what stood before the error was drafted"
        assert emitted == expected[:good] and set(finishes) <= {None}
        assert_memory(sequence, PROMPT, emitted)
        assert drafter.corpus[request.key] == sequence.tokens
        finish(execution, request)  # nothing that could go on is damaged
        assert sampler.tokens == expected
        assert_memory(sequence, PROMPT, expected)
