"""An engine that takes a step when a test says so, on the test's thread and by a clock of its own: what it does is repeatable."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from tsgg.engine import Engine
from tsgg.engine.executor import Executor
from tsgg.engine.planner import Planner
from tsgg.errors import Interrupted, TsggError
from tsgg.model import Model
from tsgg.speculative import SpeculationOptions, SpeculativeExecution

T = TypeVar("T")


class Clock:
    """Seconds that pass because somebody looks: a few milliseconds each time, the same in every run."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01 * self._rng.random()
        return self.now


class SteppedEngine(Engine):
    """Over a model that is somebody else's: `close` gives all slots back and leaves it open."""

    def __init__(self, model: Model, options: SpeculationOptions | None = None, cache_bytes: int | None = None) -> None:
        super().__init__(model, options, cache_bytes)
        self._thread.join()
        self.clock = Clock()
        self.planner = _TimedPlanner(model, self.clock)
        self.executor = Executor(model, self.planner)

    def take_in(self) -> None:
        """What the engine's thread does before a step."""
        self._take_in()

    def turn_once(self) -> bool:
        """Takes in what was submitted, makes one step and looks at everything. False: there was nothing to do."""
        self.take_in()
        try:
            busy = self.step()
        except Interrupted:
            busy = True
        self.check_integrity()
        return busy

    def run(self, most: int = 10_000) -> None:
        """Steps until there is nothing to do: all have ended, or wait for their readers or a deadline."""
        for _ in range(most):
            if not self.turn_once():
                return
        raise TsggError(f"the engine is still busy after {most} steps")

    def call(self, function: Callable[[], T]) -> T:
        self._check_open()
        return function()

    def close(self) -> None:
        """Every request ends with an error."""
        if self._closing:
            return
        self._closing = True
        for request in list(self._requests.values()):
            self._fail(request, TsggError("closed"))
        self.model.clear_interrupt()
        for sequence in self.cache.idle:
            self.model.release(sequence)

    def _run(self) -> None:
        """The thread of an engine that is stepped by hand has nothing to do."""


class _TimedPlanner(Planner):
    """Drafters are timed by the test's clock: what a governor decides is repeatable too."""

    def __init__(self, model: Model, clock: Clock) -> None:
        super().__init__(model)
        self._clock = clock

    def execution(self, options: SpeculationOptions) -> SpeculativeExecution:
        found = super().execution(options)
        found.clock = self._clock
        return found
