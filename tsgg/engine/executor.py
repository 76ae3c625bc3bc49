"""Runs what the scheduler has chosen: a chunk of a prompt, and a step of the requests that decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tsgg.engine.planner import Planner
from tsgg.engine.request import Request
from tsgg.errors import Interrupted
from tsgg.model import Model
from tsgg.speculative import (
    Batch,
    Origin,
    SpeculationOptions,
    SpeculativeExecution,
    SpeculativeRequest,
    StepSample,
    Want,
)
from tsgg.speculative.execution import advance


@dataclass(frozen=True, slots=True)
class Given:
    """What a forward gave one request."""

    request: Request
    tokens: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    finished: str | None = None
    sample: StepSample | None = None
    error: Exception | None = None  # there will be no more tokens than these


class Executor:
    """For the engine's thread, but for `serving`. Whatever it raises is `Interrupted`: then the step can be run again."""

    def __init__(self, model: Model, planner: Planner) -> None:
        self._model, self._planner = model, planner
        self.serving: tuple[Request, ...] = ()  # whose rows are being computed; any thread may look
        self.prefilled = 0  # tokens computed by prefills, so far

    def prefill(self, request: Request, end: int) -> Iterator[Given]:
        """Forwards the request's target up to `end`. With the last row of a new request's prompt comes its first token.

        The drafter is told of the rows after that token was handed out: its reader need not wait for it.
        """
        self.serving = (request,)
        try:
            speculative, execution = self.arm(request)
            sequence, first = speculative.sequence, not request.sampler.tokens
            chunk, last = request.target[request.held : end], end == len(request.target)
            rows = None
            if chunk:
                want = execution.prefill_want(speculative)
                want = want if last and first else Want("none", want.hidden, want.taps)
                rows = self._model.forward(Batch((sequence,), np.array([chunk], np.int32), want))
                self.prefilled += len(chunk)
            if last and first:
                assert rows is not None
                speculative.last = request.sampler.sample(rows.logits(0, len(chunk) - 1), len(request.prompt))
            sequence.commit(len(chunk))
        except Interrupted:
            raise
        except Exception as error:  # of one request: its sampler, its drafter's file, its share of memory
            yield Given(request, error=error)
            return
        if last:
            request.phase = "decode"
        if last and first:
            yield Given(request, (request.sampler.tokens[-1],), ("drawn",), speculative.finished)
        execution.catch_up(speculative, rows, 0)

    def decode(self, requests: Sequence[Request], decoding: int) -> Iterator[Given]:
        """One step of each. `decoding` run side by side, those that sit this step out included."""
        self.serving = tuple(requests)
        owners: dict[int, Request] = {}
        work: dict[int, tuple[SpeculativeExecution, list[SpeculativeRequest]]] = {}
        for request in requests:
            speculative, execution = self.arm(request)
            owners[id(speculative)] = request
            work.setdefault(id(execution), (execution, []))[1].append(speculative)
        for step in advance(self._model, list(work.values()), decoding):
            owner = owners[id(step.request)]
            yield Given(owner, step.tokens, step.origins, step.finished, step.sample, step.error)

    def switch(self, request: Request, options: SpeculationOptions) -> None:
        """From its next step on the request is served by other options' drafter, which `arm` tells of all that memory holds."""
        if request.speculative is not None and request.execution is not None:
            request.execution.disarm(request.speculative)
        request.options, request.execution, request.speculative = options, self._planner.execution(options), None

    def arm(self, request: Request) -> tuple[SpeculativeRequest, SpeculativeExecution]:
        """The request in the loop of its execution, taken in over all that memory holds if it was not yet."""
        assert request.sequence is not None
        if request.execution is None:
            request.execution = self._planner.execution(request.options)
        if request.speculative is None:
            last = request.sampler.tokens[-1] if request.sampler.tokens else None
            armed = request.execution.arm(request.sequence, request.sampler, last, request.remaining)
            if request.counters is not None:  # it goes on after an interlude
                request.counters.dropped, armed.counters = armed.counters.dropped, request.counters
            request.speculative, request.counters = armed, armed.counters
        return request.speculative, request.execution
