"""What the tests of the loop share: begin a request as an engine does, run it to its end, look at its memory."""

from __future__ import annotations

import numpy as np

from tests.scripted import (
    Guess,
    ScriptedSampler,
    ScriptedSequence,
    ScriptedTrunk,
    empty,
    fold,
    mixed,
    numpy_integers,
    out_of_range,
    random_tokens,
    right,
    too_long,
    wrong,
)
from tsgg.speculative import (
    Batch,
    Draft,
    SpeculationOptions,
    SpeculativeExecution,
    SpeculativeRequest,
    Speculator,
    Step,
    StepSample,
    WindowContext,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
WINDOWS = [1, 2, 3, 4, 7, 8, 15, 16]
GUESSES: list[Guess] = [right, wrong, mixed, random_tokens, too_long, empty, out_of_range, numpy_integers]
LIMIT = 60


def options(draft: int | None = None) -> SpeculationOptions:
    return SpeculationOptions(enabled=True, draft=draft)


def begin(
    execution: SpeculativeExecution,
    prompt: list[int],
    limit: int,
    stops: tuple[int, ...] = (),
    seed: int | None = None,
    slot: int = 0,
) -> tuple[SpeculativeRequest, ScriptedSequence, ScriptedSampler]:
    """Arm, prefill in two chunks, draw the first token: what an engine does before the first step."""
    sequence, sampler = ScriptedSequence(slot), ScriptedSampler(prompt, limit, stops, seed)
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


class Windows:
    """A policy that walks through a list of windows and keeps what it is told."""

    def __init__(self, windows: list[int]) -> None:
        self.windows, self.contexts, self.samples = windows, list[WindowContext](), list[StepSample]()

    def choose(self, context: WindowContext) -> int:
        self.contexts.append(context)
        return self.windows[(len(self.contexts) - 1) % len(self.windows)]

    def keep(self, context: WindowContext, draft: Draft) -> int:
        return len(draft.tokens)

    def record(self, sample: StepSample) -> None:
        self.samples.append(sample)
