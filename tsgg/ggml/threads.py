"""How many threads compute: all of them, or fewer while other processes keep a core busy.

Every node of a graph ends in a barrier, so one thread that shares its core with a busy process holds up all others at each
of a thousand barriers: beside one busy process two threads on two cores decode at a quarter of their speed, one thread at
six tenths (SmolLM2-135M, measured). The number of threads does not change a bit of any result.
"""

from __future__ import annotations

from collections.abc import Callable

SLOW = 2.0  # times the best: what a graph alone on its cores never takes for PATIENCE computes in a row
PATIENCE = 3  # computes: one stall must not change anything
SETTLE = 8  # computes of a graph before its best time counts: the first ones fault pages in
FIRST_HOLD = 32  # computes with fewer threads before all are tried again
LONGEST_HOLD = 1024  # a core that stays busy is asked seldom: each trial costs PATIENCE slow computes
FORGET = 1.0002  # the best time relaxes by this a compute: a machine may become slower for good


class Pace:
    """The best time of one graph on all threads, in seconds."""

    __slots__ = ("best", "computes")

    def __init__(self) -> None:
        self.best = float("inf")
        self.computes = 0


class Crew:
    """Watches the times of one backend's graphs and sets its number of threads."""

    def __init__(self, most: int, apply: Callable[[int], None]) -> None:
        """`apply(n)` makes the backend use n threads; `most` is in use already."""
        self.most = self.threads = most
        self._apply = apply
        self._slow = 0  # slow computes in a row
        self._left = 0  # computes until all threads are tried again
        self._hold = FIRST_HOLD

    def observe(self, pace: Pace, seconds: float) -> None:
        """One compute of the graph that `pace` belongs to took `seconds`."""
        if self.most == 1:
            return
        if self.threads == self.most:
            pace.best = min(pace.best * FORGET, seconds)
            pace.computes += 1
            expected = pace.best
        else:
            self._left -= 1
            if self._left <= 0:
                self._set(self.most)
                self._slow = 0
                return
            expected = pace.best * self.most / self.threads
        if pace.computes < SETTLE or seconds <= SLOW * expected:
            self._slow = 0
            if self.threads == self.most and pace.computes >= SETTLE:
                self._recover()
            return
        self._slow += 1
        if self._slow >= PATIENCE and self.threads > 1:
            self._retreat()

    def _retreat(self) -> None:
        if self.threads == self.most:
            self._left, self._hold = self._hold, min(2 * self._hold, LONGEST_HOLD)
        self._set(self.threads - 1)
        self._slow = 0

    def _recover(self) -> None:
        """A compute on all threads was as fast as it should be."""
        self._hold = max(FIRST_HOLD, self._hold // 2)

    def _set(self, threads: int) -> None:
        self.threads = threads
        self._apply(threads)
