"""A request on its way through the engine. Only the engine's thread reads or changes one, but for what says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tsgg.engine.stream import Outcome, Stream
from tsgg.memory import Sequence
from tsgg.sampling import RowSampler
from tsgg.speculative import CostGovernor, SpeculationCounters, SpeculationOptions, SpeculativeExecution
from tsgg.speculative.guard import SpeculativeRequest

Phase = Literal["waiting", "prefill", "decode", "done"]


@dataclass(slots=True, eq=False)
class Request:
    """`waiting` has no slot; `prefill` forwards `target`, what memory must hold before the next token can be drawn; `decode`
    steps. A request that is preempted waits again, with all its tokens."""

    number: int  # in the order of submission
    prompt: list[int]
    sampler: RowSampler
    options: SpeculationOptions
    stream: Stream
    follows_default: bool  # takes part in `Engine.update_speculation`
    submitted: float
    priority: int = 0  # greater ones first
    deadline: float | None = None  # moment of the engine's clock
    cancelled: bool = False  # set by any thread

    phase: Phase = "waiting"
    target: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    start: int = 0  # tokens of `target` that its slot held when it got it
    execution: SpeculativeExecution | None = None
    speculative: SpeculativeRequest | None = None
    counters: SpeculationCounters | None = None  # carried across a preemption
    cached: int | None = None  # tokens of the prompt that were in memory at the first admission
    splits: set[int] = field(
        default_factory=set
    )  # lengths at which a prefill chunk has to end, for others to go on from
    debt: float = 0.0  # seconds that its verifies took from its neighbours, see `Fairness`
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.target = self.prompt

    @property
    def ended(self) -> bool:
        return self.phase == "done"

    @property
    def paused(self) -> bool:
        """Its reader is behind."""
        return self.stream.full

    @property
    def held(self) -> int:
        """Tokens that memory holds of it."""
        return 0 if self.sequence is None else self.sequence.length

    @property
    def to_prefill(self) -> int:
        """Tokens that are still to be forwarded before it can decode."""
        return len(self.target) - self.held

    @property
    def remaining(self) -> int | None:
        """Tokens still wanted behind the last drawn one, before its first token: behind that one. None: no limit."""
        limit = self.sampler.params.max_tokens
        return None if limit is None else limit - max(1, len(self.sampler.tokens))

    def outcome(self, now: float) -> Outcome:
        """Of a request whose sampler has finished."""
        admitted = self.submitted if self.admitted is None else self.admitted
        first = admitted if self.first_token is None else self.first_token
        policy = None if self.execution is None else self.execution.policy
        counters = self.counters or SpeculationCounters()
        return Outcome(
            finish_reason=str(self.sampler.finished),
            cached_tokens=self.cached or 0,
            submitted=self.submitted,
            admitted=admitted,
            first_token=first,
            last_token=first if self.last_token is None else self.last_token,
            speculation=counters.snapshot(),
            governor=policy.report() if isinstance(policy, CostGovernor) else None,
        )
