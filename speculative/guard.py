"""The guard around a speculator: whatever it raises or hands back costs one request its speculation, and nothing else."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from tsgg.errors import TsggError
from tsgg.speculative.protocol import CommittedRows, Draft, DraftContext, Sampler, Sequence, Speculator
from tsgg.speculative.stats import SpeculationCounters

log = logging.getLogger("tsgg.speculative")

NO_REASON = "no reason given"
INVALID = "no valid token in the draft"

Proposal = tuple[tuple[int, ...], int, str]  # tokens to verify, tokens discarded, why there are none


@dataclass(slots=True, eq=False)
class SpeculativeRequest:
    """One request in the loop. Whoever prefills it sets `last` to the token drawn from the prompt's last row."""

    key: int
    sequence: Sequence
    sampler: Sampler
    last: int | None = None  # drawn, not in memory
    remaining: int | None = None  # tokens still wanted behind `last`; None = no limit
    armed: bool = False  # a speculator drafts for it
    seen: int = 0  # committed tokens that the speculator was told of
    context_full: bool = False
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)
