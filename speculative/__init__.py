"""Speculative decoding: protocols, the loop, drafters and their registry. Plain Python and numpy.

protocol.py   what loop, model, memory, drafter and sampler require of each other
execution.py  the loop: draft, verify, accept, commit; plain decoding is the same loop with no draft
guard.py      whatever a drafter raises costs one request its speculation and nothing else
options.py    what the operator said, validated
registry.py   name -> factory, and why not
ngram.py      the drafter that needs no weights: what followed last
suffix.py     the same by counts: what followed most (automaton.py), also in earlier answers
governor.py   the policy: which window, step by step (costs.py, acceptance.py; journal.py is its report)
stats.py      counters, one source of truth
"""

from tsgg.speculative.execution import FixedWindow, SpeculativeExecution, Step
from tsgg.speculative.governor import CostGovernor
from tsgg.speculative.guard import SpeculativeRequest
from tsgg.speculative.journal import GovernorReport
from tsgg.speculative.options import SpeculationOptions
from tsgg.speculative.protocol import (
    Batch,
    CommittedRows,
    Decline,
    Draft,
    DraftContext,
    DraftHead,
    HeadRows,
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
from tsgg.speculative.registry import AUTO, REGISTRY, SpeculatorRegistry
from tsgg.speculative.stats import SpeculationCounters, SpeculationStats, StepSample

__all__ = [
    "AUTO",
    "REGISTRY",
    "Batch",
    "CommittedRows",
    "CostGovernor",
    "Decline",
    "Draft",
    "DraftContext",
    "DraftHead",
    "FixedWindow",
    "GovernorReport",
    "HeadRows",
    "Origin",
    "Rows",
    "Sampler",
    "Sequence",
    "SpeculationCounters",
    "SpeculationOptions",
    "SpeculationStats",
    "SpeculativeExecution",
    "SpeculativeRequest",
    "Speculator",
    "SpeculatorRegistry",
    "Step",
    "StepSample",
    "Trunk",
    "Want",
    "WindowContext",
    "WindowPolicy",
]
