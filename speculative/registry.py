"""Which drafting algorithms exist: a name, a factory each. The only place that knows.

A new algorithm is one class plus one `REGISTRY.register` call; it may stand in anybody's package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsgg.errors import UsageError
from tsgg.speculative.draft_head import make_draft_head
from tsgg.speculative.ngram import make_ngram
from tsgg.speculative.protocol import Decline, DraftHead, Speculator, Trunk
from tsgg.speculative.suffix import make_suffix

if TYPE_CHECKING:
    from tsgg.speculative.options import SpeculationOptions

AUTO = "auto"

Factory = Callable[[Trunk, "SpeculationOptions", "DraftHead | None"], "Speculator | None"]


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: Factory
    requires_draft_head: bool


class SpeculatorRegistry:
    """Maps a name to a factory and turns a factory's refusal into a reason for the operator."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def register(self, name: str, factory: Factory, requires_draft_head: bool = False) -> None:
        """Add an algorithm; `factory(trunk, options, head)` returns None where it cannot serve that trunk or head.

        `requires_draft_head`: decline early, with a reason, where no drafter weights are loaded; `head` is never None.
        Raises `UsageError` for a name that is taken.
        """
        if not name or name == AUTO or name in self._entries:
            raise UsageError(
                f"speculator name {name!r} is empty, reserved or taken ({', '.join(self.names())}); choose another"
            )
        self._entries[name] = _Entry(factory, requires_draft_head)

    def names(self) -> tuple[str, ...]:
        """Registered names, in order of registration."""
        return tuple(self._entries)

    def requires_draft_head(self, name: str) -> bool:
        """Raises `UsageError` for an unknown name."""
        return self._entry(name).requires_draft_head

    def create(
        self, name: str, trunk: Trunk, options: SpeculationOptions, head: DraftHead | None = None
    ) -> Speculator | Decline:
        """The speculator called `name` for `trunk`, or why there is none. Raises `UsageError` for an unknown name.

        "auto" takes the first algorithm that serves the loaded drafter weights, else the first that needs none, and
        heeds the trunk's speed verdict; a name that the operator typed wins over that. Nothing wins over its verdict of
        correctness.
        """
        candidates = self._by_preference(head) if name == AUTO else [(name, self._entry(name))]
        if not options.enabled:
            return Decline("speculation is switched off")
        if trunk.speculation_refusal is not None:
            return Decline(f"this model refuses speculation: {trunk.speculation_refusal}")
        reasons = []
        for candidate, entry in candidates:
            if entry.requires_draft_head and head is None:
                return Decline(
                    f"{candidate} needs drafter weights and none are loaded: the model file carries no draft head and "
                    "no drafter file was given; attach one, or choose a type that needs none"
                )
            if name == AUTO and not entry.requires_draft_head and not trunk.speculation_profitable:
                reasons.append(f"{candidate} would make this model slower; name the type to run it all the same")
                continue
            speculator = entry.factory(trunk, options, head)
            if speculator is not None:
                return speculator
            reasons.append(f"{candidate} cannot serve this {'draft head' if entry.requires_draft_head else 'model'}")
        return Decline("; ".join(reasons) or "no algorithm is registered")

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UsageError(f"unknown speculator {name!r}; registered are: {', '.join(self.names())}")
        return self._entries[name]

    def _by_preference(self, head: DraftHead | None) -> list[tuple[str, _Entry]]:
        """Candidates of "auto": trained weights, where loaded, guess better than lookup."""
        learned = [(n, e) for n, e in self._entries.items() if e.requires_draft_head and head is not None]
        return learned + [(n, e) for n, e in self._entries.items() if not e.requires_draft_head]


REGISTRY = SpeculatorRegistry()
REGISTRY.register("draft-head", make_draft_head, requires_draft_head=True)
# "auto" takes the first that serves: suffix is 1 to 2 % faster than ngram over benchmarks/workloads.py, and remembers answers.
REGISTRY.register("suffix", make_suffix)
REGISTRY.register("ngram", make_ngram)
