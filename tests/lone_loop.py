"""A generation by the loop of `tsgg.speculative` alone, without an engine: for tests of one part at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tsgg.engine.tree import common_prefix
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.sampling import RowSampler
from tsgg.sampling.row import RowLogprobs
from tsgg.speculative import Batch, SpeculationStats, SpeculativeExecution, Want


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...]
    finish_reason: str
    cached: int  # tokens of the prompt that the sequence held
    speculation: SpeculationStats


def resume(sequence: Sequence, prompt: list[int]) -> int:
    """Cuts the sequence to what it has in common with the prompt, but for the prompt's last token; returns its length."""
    return sequence.truncate(common_prefix(sequence.tokens, prompt[:-1]))


def generate(
    model: Model, execution: SpeculativeExecution, sequence: Sequence, sampler: RowSampler, prompt: list[int]
) -> Answer:
    cached = resume(sequence, prompt)
    limit = sampler.params.max_tokens
    request = execution.arm(sequence, sampler, remaining=None if limit is None else limit - 1)
    at = cached
    while at < len(prompt):
        end = model.memory.chunk_end(cached, at, len(prompt))
        want = execution.prefill_want(request)
        want = want if end == len(prompt) else Want("none", want.hidden, want.taps)
        rows = model.forward(Batch((sequence,), np.array([prompt[at:end]], np.int32), want))
        if end == len(prompt):
            request.last = sampler.sample(rows.logits(0, end - at - 1), len(prompt))
        sequence.commit(end - at)
        execution.catch_up(request, rows, 0)
        at = end
    while sampler.finished is None:
        for _ in execution.step([request]):
            pass
    execution.disarm(request)
    return Answer(
        tuple(sampler.tokens),
        tuple(sampler.logprobs),
        sampler.finished,
        cached,
        request.counters.snapshot(),
    )
