"""How far something long has come, for whoever waits: a download, loading, the reading of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from tsgg.engine import Engine
    from tsgg.generation import Generation

T = TypeVar("T")
INTERVAL = 0.2  # seconds between two looks at a prefill


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total`: bytes of a download or of loading, tokens of a prefill. `total` None: nobody knows."""

    phase: Literal["download", "load", "prefill"]
    done: int
    total: int | None

    @property
    def finished(self) -> bool:
        return self.total is not None and self.done >= self.total


OnProgress = Callable[[Progress], None]
"""Called on the thread that waits, for loading once per tensor, else some five times a second. What it raises ends the wait,
and what was waited for."""


class PrefillWatch:
    """For a thread that waits for tokens: reports on the prompts that the engine reads for it meanwhile, if anybody listens."""

    def __init__(self, engine: Engine, generations: Sequence[Generation], on_progress: OnProgress | None) -> None:
        self._engine, self._generations, self._on_progress = engine, generations, on_progress
        self._last: Progress | None = None

    def get(self, queue: SimpleQueue[T]) -> T:
        """The next thing in the queue, waited for."""
        if self._on_progress is None:
            return queue.get()
        while True:
            try:
                found = queue.get(timeout=INTERVAL)
            except Empty:
                self._report(self._on_progress)
                continue
            self._finish(self._on_progress)
            return found

    def _report(self, on_progress: OnProgress) -> None:
        for request in self._engine.executor.serving:
            sequence = request.sequence  # the engine's thread may take it away between two looks
            mine = any(one.started and one.stream is request.stream for one in self._generations)
            if mine and request.phase == "prefill" and sequence is not None:
                self._last = Progress("prefill", sequence.length, len(request.target))
                on_progress(self._last)
                return
        self._finish(on_progress)

    def _finish(self, on_progress: OnProgress) -> None:
        last, self._last = self._last, None
        if last is not None and last.total is not None:
            on_progress(Progress("prefill", last.total, last.total))
