"""One generation on one sequence: resume a prefix, prefill the rest, then step until the sampler says stop.

prompt ids -> longest common prefix with what memory holds -> prefill chunks -> first token from the last row
  -> SpeculativeExecution.step: draft, verify, accept, commit -> tokens, until `sampler.finished`
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from tsgg.errors import ContextFullError, UsageError
from tsgg.memory.sequence import Sequence
from tsgg.model import Model
from tsgg.results import Chunk, GenerationResult, Timings, Usage
from tsgg.sampling import RowSampler
from tsgg.speculative import Batch, CostGovernor, SpeculativeExecution, Want
from tsgg.speculative.guard import SpeculativeRequest


class Generation:
    """Iterate over it for chunks; `result` is there at the end. An abandoned one leaves the sequence committed.

    `prompt` is token ids, not empty and at most the context's capacity: `ContextFullError`, `UsageError`.
    """

    def __init__(
        self, model: Model, execution: SpeculativeExecution, sequence: Sequence, sampler: RowSampler, prompt: list[int]
    ) -> None:
        if not prompt:
            raise UsageError("the prompt is empty: give text or token ids")
        if len(prompt) > sequence.capacity:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens and the context holds {sequence.capacity}: "
                "load the model with a larger n_ctx or shorten the prompt"
            )
        self.model, self.execution, self.sequence, self.sampler, self.prompt = (
            model,
            execution,
            sequence,
            sampler,
            prompt,
        )
        self.cached = 0
        self._request: SpeculativeRequest | None = None
        self._times = [time.perf_counter()] * 3  # started, first token, last token

    def __iter__(self) -> Iterator[Chunk]:
        self._times = [time.perf_counter()] * 3
        try:
            yield self._prefill()
            assert self._request is not None
            while self.sampler.finished is None:
                for step in self.execution.step([self._request]):
                    self._times[2] = time.perf_counter()
                    yield from self._chunks(step.tokens, step.from_draft)
        finally:
            if self._request is not None:
                self.execution.disarm(self._request)

    def result(self) -> GenerationResult:
        """What has been generated so far; an unfinished generation counts as cancelled."""
        sampler, request = self.sampler, self._request
        if sampler.finished is None:
            sampler.finish("cancelled")
        started, first, last = self._times
        fresh = len(self.prompt) - self.cached
        after = max(0, len(sampler.tokens) - 1)
        timings = Timings(first - started, last - first, _rate(fresh, first - started), _rate(after, last - first))
        counters = (request or self.execution).counters
        return GenerationResult(
            text=sampler.visible_text(),
            tokens=tuple(sampler.tokens),
            logprobs=tuple(sampler.logprobs),
            finish_reason=str(sampler.finished),
            stop_reason=sampler.stop_reason,
            seed=sampler.seed,
            usage=Usage(len(self.prompt), len(sampler.tokens), self.cached),
            timings=timings,
            speculation=counters.snapshot(),
            governor=self.execution.policy.report() if isinstance(self.execution.policy, CostGovernor) else None,
        )

    def switch(self, execution: SpeculativeExecution) -> None:
        """Goes on, from the next step, with another drafter or with none; it is told of all tokens that memory holds."""
        before = self._request
        if before is not None:
            self.execution.disarm(before)
        if before is not None and before.finished is None and before.remaining != 1:  # else nothing is drafted any more
            request = execution.arm(self.sequence, self.sampler, before.last, before.remaining)
            before.counters.dropped, request.counters = request.counters.dropped, before.counters
            self._request = request
        self.execution = execution

    def _prefill(self) -> Chunk:
        """Forwards what memory does not hold yet, draws the first token, and arms the drafter over everything."""
        sequence, prompt = self.sequence, self.prompt
        self.cached = resume(sequence, prompt)
        limit = self.sampler.params.max_tokens
        request = self.execution.arm(sequence, self.sampler, remaining=None if limit is None else limit - 1)
        self._request = request
        for start, end in self.model.memory.chunks(self.cached, len(prompt)):
            chunk, last = prompt[start:end], end == len(prompt)
            want = self.execution.prefill_want(request)
            want = want if last else Want("none", want.hidden, want.taps)
            rows = self.model.forward(Batch((sequence,), np.array([chunk], np.int32), want))
            if last:
                request.last = self.sampler.sample(rows.logits(0, len(chunk) - 1), len(prompt))
            sequence.commit(len(chunk))
            self.execution.catch_up(request, rows, 0)
        self._times[1] = self._times[2] = time.perf_counter()
        return next(self._chunks((self.sampler.tokens[0],), (False,)))

    def _chunks(self, tokens: tuple[int, ...], from_draft: tuple[bool, ...]) -> Iterator[Chunk]:
        """A step's tokens, each with the text that it made showable."""
        sampler = self.sampler
        first = len(sampler.tokens) - len(tokens)
        for i, (token, drafted) in enumerate(zip(tokens, from_draft, strict=True), start=first):
            logprob = sampler.logprobs[i] if sampler.logprobs else None
            last = i == len(sampler.tokens) - 1
            yield Chunk(sampler.released[i], token, logprob, drafted, sampler.finished if last else None)


def resume(sequence: Sequence, prompt: list[int]) -> int:
    """Truncates the sequence to its longest common prefix with the prompt and returns its length.

    At least the prompt's last token is left to forward: its row gives the first token.
    """
    common = 0
    for held, wanted in zip(sequence.tokens, prompt[:-1], strict=False):
        if held != wanted:
            break
        common += 1
    return sequence.truncate(common)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
