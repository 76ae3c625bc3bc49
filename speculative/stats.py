"""Counters of speculation: a sample per step, a mutable accumulator, a frozen snapshot. One source for every report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepSample:
    """What one step of one sequence cost and gave. Times of work shared by several sequences are divided among them."""

    key: int
    window: int  # draft tokens that were allowed; 0 = none
    drafted: int  # draft tokens that were verified
    accepted: int  # of those, kept in memory
    emitted: int  # tokens drawn: accepted + 1
    discarded: int  # draft tokens cut before the verify: outside the vocabulary, or more than the window
    silence: str  # why nothing was drafted although a speculator was armed; "" otherwise
    finished: bool  # the step ended at a stop: the drafts behind it were not judged
    length: int  # committed tokens before the step
    sequences: (
        int  # sequences in the step: what the window policy was told, though their forwards may have been several
    )
    draft_seconds: float  # propose + the speculator's commit
    forward_seconds: float  # forward + draws + the memory's commit
    bare: bool = True  # the forward asked for logits alone: without drafts, plain decoding's own graph
    again: int = 0  # rows that the memory's commit had to forward a second time
    foreseen: bool | None = None  # a draft was there and not verified: whether its first token is what was drawn


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Snapshot of the counters of one request, or of all."""

    steps: int = 0
    plain_steps: int = 0  # steps that verified no draft
    verifies: int = 0  # steps that verified at least one
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    discarded: int = 0
    again: int = 0  # rows forwarded a second time, on a device that cannot keep a recurrent state per row
    drafted_per_position: tuple[int, ...] = ()  # verifies that had a draft at window position i
    accepted_per_position: tuple[int, ...] = ()  # verifies that accepted it
    silent_steps: int = 0  # armed, but nothing drafted
    silence_reasons: Mapping[str, int] = field(
        default_factory=dict
    )  # a dict: results are plain data, for pickle and JSON
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    dropped: str | None = None  # why this request decodes plainly: declined at arming, or a speculator that raised

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted tokens; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_verify(self) -> float:
        """Tokens that a verify emitted on average; 0 where none ran."""
        return (self.accepted + self.verifies) / self.verifies if self.verifies else 0.0


class SpeculationCounters:
    """Accumulates samples; the same sample goes into the request's counters and into the total."""

    def __init__(self) -> None:
        self.dropped: str | None = None
        self._steps = 0
        self._emitted = 0
        self._discarded = 0
        self._again = 0
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []
        self._verifies = 0
        self._silence: Counter[str] = Counter()
        self._draft_seconds = 0.0
        self._verify_seconds = 0.0
        self._plain_seconds = 0.0

    def record(self, sample: StepSample) -> None:
        self._steps += 1
        self._emitted += sample.emitted
        self._discarded += sample.discarded
        self._again += sample.again
        self._draft_seconds += sample.draft_seconds
        if sample.silence:
            self._silence[sample.silence] += 1
        if not sample.drafted:
            self._plain_seconds += sample.forward_seconds
            return
        self._verifies += 1
        self._verify_seconds += sample.forward_seconds
        missing = sample.drafted - len(self._drafted_at)
        if missing > 0:
            self._drafted_at += [0] * missing
            self._accepted_at += [0] * missing
        for i in range(sample.drafted):
            self._drafted_at[i] += 1
        for i in range(sample.accepted):
            self._accepted_at[i] += 1

    def snapshot(self) -> SpeculationStats:
        return SpeculationStats(
            steps=self._steps,
            plain_steps=self._steps - self._verifies,
            verifies=self._verifies,
            drafted=sum(self._drafted_at),
            accepted=sum(self._accepted_at),
            emitted=self._emitted,
            discarded=self._discarded,
            again=self._again,
            drafted_per_position=tuple(self._drafted_at),
            accepted_per_position=tuple(self._accepted_at),
            silent_steps=self._silence.total(),
            silence_reasons=dict(self._silence),
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
            plain_seconds=self._plain_seconds,
            dropped=self.dropped,
        )
