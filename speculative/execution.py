"""The draft-verify-accept-commit loop: one implementation for every algorithm and every model, plain decoding included.

One step of a sequence whose memory holds n tokens: the speculator drafts d1..dK to follow `last`; the trunk forwards
`[last, d1..dK]` at positions n..n+K; the sampler draws row by row and a draft is accepted while the drawn token equals
it; the row that ends this gives its token for free, and that is the new `last`. Memory keeps `last` and the accepted
drafts, and the speculator is told of exactly those.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tsgg.errors import Interrupted, TsggError, UsageError
from tsgg.speculative.guard import Guard, SpeculativeRequest
from tsgg.speculative.options import SpeculationOptions
from tsgg.speculative.protocol import (
    Batch,
    CommittedRows,
    Decline,
    Draft,
    DraftContext,
    Origin,
    Rows,
    Sampler,
    Sequence,
    Speculator,
    Trunk,
    Want,
    WindowContext,
    WindowPolicy,
)
from tsgg.speculative.stats import SpeculationCounters, StepSample

log = logging.getLogger("tsgg.speculative")

PLAIN = Want(logits="last")  # what plain decoding asks for: a step without drafts must run that very graph

NO_ROOM = "no room for a draft"
PARKED = "parked"
DOUBTFUL = "draft not worth its verify"
FAILED = "the verify failed"


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave one request; no tokens, and no sample, if it had finished before.

    With an error and tokens: these were drawn before it, as plain decoding would have drawn them; memory keeps their rows.
    """

    request: SpeculativeRequest
    tokens: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()  # per token
    finished: str | None = None
    sample: StepSample | None = None
    error: Exception | None = None  # why no more tokens come

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """Per token: drafted, and accepted."""
        return tuple(origin != "drawn" for origin in self.origins)


class FixedWindow:
    """Window policy that always drafts as much as is allowed."""

    def choose(self, context: WindowContext) -> int:
        return context.ceiling

    def keep(self, context: WindowContext, draft: Draft) -> int:
        return len(draft.tokens)

    def record(self, sample: StepSample) -> None:
        pass


@dataclass(slots=True)
class Plan:
    """A request's part in the step under way."""

    execution: SpeculativeExecution
    request: SpeculativeRequest
    sequences: int  # that decode side by side
    want: Want = PLAIN
    window: int = 0
    draft: tuple[int, ...] = ()
    guess: int | None = None  # first token of a draft that is not verified
    discarded: int = 0
    silence: str = ""
    draft_seconds: float = 0.0


class SpeculativeExecution:
    """The loop over one trunk, for any number of requests.

    speculator: None or a `Decline` decodes plainly, through the same code. clock: seconds, monotonic.
    keys: names of requests; executions that share a policy must share them.
    """

    def __init__(
        self,
        trunk: Trunk,
        speculator: Speculator | Decline | None,
        options: SpeculationOptions,
        policy: WindowPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
        keys: Iterator[int] | None = None,
    ) -> None:
        self.trunk = trunk
        self.policy: WindowPolicy = policy if policy is not None else FixedWindow()
        self.counters = SpeculationCounters()  # over all requests
        self._guard: Guard | None = None
        self._window = 0
        if isinstance(speculator, Decline):
            self.counters.dropped = speculator.reason
        elif speculator is not None:
            self._guard = Guard(speculator, trunk.vocab_size)
            self._window = options.window(trunk, speculator)
        self.clock = clock
        self._keys = itertools.count() if keys is None else keys

    def describe(self) -> str:
        """What drafts, and how much at most; or why nothing does."""
        if self._guard is None:
            return self.counters.dropped or "no speculator"
        return f"{self._guard.name}, up to {self._window} tokens per step"

    # -- a request comes and goes ------------------------------------------------------------------------------------

    def arm(
        self, sequence: Sequence, sampler: Sampler, last: int | None = None, remaining: int | None = None
    ) -> SpeculativeRequest:
        """Take a request in, before or after its prefill; the speculator is told of the tokens that memory holds.

        last: the drawn token that is not in memory; to be set on the request later if the prefill is still to come.
        remaining: tokens still wanted behind `last`, None for no limit. Where the request cannot be armed it decodes
        plainly and `request.counters.dropped` says why.
        """
        request = SpeculativeRequest(next(self._keys), sequence, sampler, last, remaining)
        if self._guard is None:
            request.counters.dropped = self.counters.dropped
        elif remaining is not None and remaining < 2:
            request.counters.dropped = "fewer than two tokens are wanted: nothing to draft"
        else:
            self.seed_committed(request)
        return request

    def seed_committed(self, request: SpeculativeRequest) -> None:
        """Open the speculator over the tokens that memory holds.

        Anew where the caller has truncated the sequence and put other tokens in: `catch_up` sees only what is shorter.
        """
        if self._guard is not None and request.counters.dropped is None:
            self._guard.open(request)

    def prefill_want(self, request: SpeculativeRequest) -> Want:
        """What the forward of a prefill chunk must hand back, to be passed on to `catch_up`."""
        if self._guard is None or not request.armed or not self._guard.speculator.wants_prompt_rows():
            return PLAIN
        return Want(logits="last", hidden="all", taps=self._guard.speculator.taps)

    def catch_up(self, request: SpeculativeRequest, rows: Rows | None = None, index: int = 0) -> None:
        """Tell the speculator of tokens committed outside `step`: a prefill chunk, an interlude of plain decoding.

        rows, index: the forward of `prefill_want` that made these tokens and the sequence's place in it, before the
        trunk's next forward; None where no rows were captured.
        """
        if request.armed and request.seen > request.sequence.length:
            self.seed_committed(request)
        if self._guard is not None and request.armed and request.seen < request.sequence.length:
            tokens = request.sequence.tokens[request.seen :]
            if rows is None or not self._guard.speculator.wants_prompt_rows():
                self._guard.commit(request, tokens, None)
            else:
                self._guard.commit(request, tokens, CommittedRows(rows, index, len(tokens)))

    def disarm(self, request: SpeculativeRequest) -> None:
        """The request leaves, or is to go on plainly."""
        if self._guard is not None and request.armed:
            self._guard.close(request)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self, requests: list[SpeculativeRequest]) -> Iterator[Step]:
        """One step of every request: one call for all drafts, forwards grouped by row count, one `Step` per request.

        Iterate to the end. Where a forward or a sampler raises, what was yielded before holds, tokens drawn before the
        error among it, and the memory of every sequence that was not yielded stands where it stood.
        Raises `UsageError` for a request without a `last` token.
        """
        error: Exception | None = None
        for step in advance(self.trunk, [(self, requests)]):
            if step.error is None or step.tokens:
                yield step
            error = step.error or error
        if error is not None:
            raise error

    def plan(self, requests: list[SpeculativeRequest], sequences: int) -> list[Plan]:
        """Decides what each request verifies next; one that has finished gets no plan.

        `sequences` are decoding side by side, these among them: what a row costs depends on it.
        """
        plans = [Plan(self, request, sequences) for request in requests if self._ready(request)]
        self._draft(plans)
        for plan in plans:
            plan.want = self.want(plan)
        return plans

    def _ready(self, request: SpeculativeRequest) -> bool:
        """A step starts neither behind a stop nor without a free row."""
        if request.finished is None and request.last is None:
            raise UsageError(
                f"request {request.key} has no token to decode from: "
                "draw one from the prompt's last row and set request.last"
            )
        if request.finished is None and self.trunk.context_left(request.sequence) < 1:
            request.context_full = True
        return request.finished is None

    def _draft(self, plans: list[Plan]) -> None:
        """Choose every request's window and ask for all drafts in one call."""
        drafting = []
        for plan in plans:
            self.catch_up(plan.request)
            if plan.request.armed:
                plan.window, plan.silence = self._choose_window(plan.request, plan.sequences)
                if plan.window:
                    drafting.append(plan)
        if self._guard is None or not drafting:
            return
        start = self.clock()
        contexts = [DraftContext(p.request.key, p.request.next_input, p.request.seen, p.window) for p in drafting]
        proposals = self._guard.propose([p.request for p in drafting], contexts)
        seconds = (self.clock() - start) / len(drafting)
        for plan, (draft, discarded) in zip(drafting, proposals, strict=True):
            plan.draft, plan.silence, plan.draft_seconds = draft.tokens, draft.silence, seconds
            plan.discarded = discarded
            if draft.tokens:
                self._keep(plan, draft)

    def _keep(self, plan: Plan, draft: Draft) -> None:
        """The policy, which now knows the draft, may verify less of it."""
        request = plan.request
        context = WindowContext(request.key, plan.window, request.sequence.length, plan.sequences)
        plan.draft = draft.tokens[: max(0, self.policy.keep(context, draft))]
        if not plan.draft:
            plan.silence, plan.guess = DOUBTFUL, draft.tokens[0]

    def _choose_window(self, request: SpeculativeRequest, sequences: int) -> tuple[int, str]:
        """Most tokens to draft now, and why none: a verify has a row for `last`, and emits one more than it accepts."""
        ceiling = min(self._window, self.trunk.context_left(request.sequence) - 1)
        if request.remaining is not None:
            ceiling = min(ceiling, request.remaining - 1)
        if ceiling < 1:
            return 0, NO_ROOM
        window = self.policy.choose(WindowContext(request.key, ceiling, request.sequence.length, sequences))
        return (min(window, ceiling), "") if window > 0 else (0, PARKED)

    def want(self, plan: Plan) -> Want:
        """What its forward hands back.

        A parked step asks for no rows where the speculator bears the gap: it costs what plain decoding costs."""
        verify = Want(logits="all") if plan.draft else PLAIN
        if self._guard is None or not plan.request.armed:
            return verify
        speculator = self._guard.speculator
        if not speculator.needs_hidden_state or (plan.window == 0 and speculator.takes_tokens_alone()):
            return verify
        return Want(verify.logits, "all" if plan.draft else "last", speculator.taps)

    def accept(self, plan: Plan, rows: Rows, index: int, want: Want, seconds: float) -> Step:
        """Draw, accept, commit to memory, then to the speculator. `seconds`: the sequence's share of the forward.

        Raises what the sampler raises at the first row. At a later one it is the step's error, behind the tokens of the
        rows before: plain decoding would have emitted them.
        """
        request, draft = plan.request, plan.draft
        start = self.clock()
        length = request.sequence.length
        tokens: list[int] = []
        error: Exception | None = None
        for row in range(len(draft) + 1):
            try:
                tokens.append(int(request.sampler.sample(rows.logits(index, row), length + row + 1)))
            except Exception as raised:
                if not tokens:
                    raise
                error = raised
                break
            if request.sampler.finished is not None or row == len(draft) or tokens[-1] != draft[row]:
                break
        again = request.sequence.commit(len(tokens))
        committed = [request.next_input, *tokens[:-1]]
        request.advance(tokens)
        drawn = self.clock()
        if self._guard is not None and request.armed:
            kept = CommittedRows(rows, index, len(tokens)) if plan.want.hidden != "none" else None
            self._guard.commit(request, committed, kept)
        sample = StepSample(
            key=request.key,
            window=plan.window,
            drafted=len(draft),
            accepted=len(tokens) - 1,
            emitted=len(tokens),
            discarded=plan.discarded,
            silence=plan.silence,
            finished=request.finished is not None or error is not None,
            length=length,
            sequences=plan.sequences,
            draft_seconds=plan.draft_seconds + self.clock() - drawn,
            forward_seconds=seconds + drawn - start,
            bare=want.hidden == "none" and not want.taps,
            again=again,
            foreseen=None if plan.guess is None else tokens[0] == plan.guess,
        )
        for listener in (request.counters, self.counters, self.policy):
            listener.record(sample)
        origins: list[Origin] = ["drafted"] * (len(tokens) - 1)
        origins.append("drawn" if error is None else "drafted")  # behind a draft came the row that failed
        return Step(request, tuple(tokens), tuple(origins), request.finished if error is None else None, sample, error)


def advance(
    trunk: Trunk, work: Sequences[tuple[SpeculativeExecution, list[SpeculativeRequest]]], sequences: int | None = None
) -> Iterator[Step]:
    """One step of requests that may have different executions: whoever has equally many rows shares a forward.

    One `Step` per request, in no particular order; that of a request whose sampler or forward fails has its error, and
    the others go on. `sequences`: how many decode side by side, if that is more than take part in this step. Raises
    `Interrupted` where a forward was interrupted: what was not yielded stands where it stood, and can be asked for again.
    """
    if sequences is None:
        sequences = sum(request.finished is None for _, requests in work for request in requests)
    plans: list[Plan] = []
    for execution, requests in work:
        planned = execution.plan(requests, sequences)
        plans += planned
        if len(planned) < len(requests):
            ready = {id(plan.request) for plan in planned}
            for request in requests:
                if id(request) not in ready:
                    yield Step(request, finished=request.finished)
    groups: dict[int, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(len(plan.draft), []).append(plan)
    for group in groups.values():
        for indices in trunk.batches([plan.request.sequence for plan in group]):
            yield from _verify(trunk, [group[i] for i in indices])


def _verify(trunk: Trunk, plans: list[Plan]) -> Iterator[Step]:
    """One forward over sequences with equally many rows, and what each of them accepts.

    Where it fails, each of them has a plain step alone, so that only the one at fault is lost.
    """
    want = plans[0].want if len(plans) == 1 else _union(plan.want for plan in plans)
    clock = plans[0].execution.clock
    start = clock()
    tokens = np.array([(plan.request.last, *plan.draft) for plan in plans], dtype=np.int32)
    try:
        rows = trunk.forward(Batch(tuple(plan.request.sequence for plan in plans), tokens, want))
    except Interrupted:
        raise
    except TsggError as error:
        if len(plans) == 1 and not plans[0].draft:
            yield Step(plans[0].request, error=error)
            return
        log.warning("a forward of %d x %d rows failed (%s): each request goes on alone", *tokens.shape, error)
        for plan in plans:
            plan.draft, plan.guess, plan.silence = (), None, FAILED
            plan.want = plan.execution.want(plan)
            yield from _verify(trunk, [plan])
        return
    seconds = (clock() - start) / len(plans)
    steps: list[Step] = []  # accepted, all of them, before the caller gets one and may run a forward of its own
    for i, plan in enumerate(plans):
        try:
            steps.append(plan.execution.accept(plan, rows, i, want, seconds))
        except Exception as error:  # one request's sampler: its neighbours' tokens must reach their readers
            steps.append(Step(plan.request, error=error))
    yield from steps


def _union(wants: Iterable[Want]) -> Want:
    """What serves all of these, which have equally many rows: then all want the logits of the same rows."""
    wants = list(wants)
    hidden: Literal["none", "last", "all"] = "none"
    for want in wants:
        if want.hidden == "all" or hidden == "none":
            hidden = want.hidden
    taps = tuple(sorted({layer for want in wants for layer in want.taps}))
    return Want(wants[0].logits, hidden, taps)
