"""What an engine is doing and has done, in numbers, for whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass

from tsgg.engine.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Where a step runs meanwhile, each number is right at a moment of its own."""

    running: int  # requests with a slot
    waiting: int  # requests without one
    slots: int
    steps: int
    prompt_tokens: int  # computed by prefills, those that were computed again after a preemption included
    cached_tokens: int  # of prompts, found in memory when their requests were first admitted
    generated_tokens: int
    finished: int  # requests that ended by themselves: a stop, their limit, a full context
    cancelled: int
    timed_out: int
    failed: int
    tree_tokens: int  # of prefixes that no slot holds
    tree_bytes: int
    tree_budget: int  # bytes


class Tally:
    """What has happened so far. Written by the engine's thread alone."""

    def __init__(self) -> None:
        self.steps = self.generated = self.failed = 0
        self.ended: dict[str, int] = {}  # requests by finish reason
        self.tree_tokens = self.tree_bytes = 0

    def end(self, reason: str) -> None:
        self.ended[reason] = self.ended.get(reason, 0) + 1

    def see(self, tree: PrefixTree) -> None:
        """Counts the tree's tokens where it has changed: nobody else may walk through it."""
        if tree.nbytes != self.tree_bytes:
            self.tree_tokens, self.tree_bytes = len(tree), tree.nbytes
