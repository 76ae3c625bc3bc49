"""Progress bars on stderr, where that is a terminal, for what takes long enough to wonder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tsgg.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import TaskID

DELAYS = {"download": 0.0, "load": 1.0, "prefill": 2.0}  # seconds before a bar appears
TEXTS = {"download": "downloading", "load": "loading", "prefill": "reading the prompt"}


class Bars:
    """An `OnProgress`: one bar at a time, which is gone when its work is done. Silent where stderr is no terminal."""

    def __init__(self, stream: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self.wanted: bool = self._stream.isatty()
        self._phase, self._started = "", 0.0
        self._shown: tuple[Display, TaskID] | None = None

    def __call__(self, progress: Progress) -> None:
        if not self.wanted:
            return
        if progress.phase != self._phase:
            self.close()
            self._phase, self._started = progress.phase, self._clock()
        if progress.finished:
            self.close()
        elif self._clock() - self._started >= DELAYS[progress.phase]:
            display, task = self._shown = self._shown or self._show(progress)
            display.update(task, completed=progress.done, total=progress.total)

    def close(self) -> None:
        """Takes the bar away."""
        self._phase = ""
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, progress: Progress) -> tuple[Display, TaskID]:
        from rich import progress as rich
        from rich.console import Console

        size = rich.MofNCompleteColumn() if progress.phase == "prefill" else rich.DownloadColumn()
        display = rich.Progress(
            rich.TextColumn("{task.description}"), rich.BarColumn(), size, rich.TimeRemainingColumn(),
            console=Console(file=self._stream), transient=True,
        )  # fmt: skip
        display.start()
        return display, display.add_task(TEXTS[progress.phase], total=progress.total)
