"""Where the time of forwards goes: inputs, compute, outputs, and the LM head's share of compute. Made on request.

`Model.profile()` hangs one into the forward, which then runs through it; without one, forwards are as they were.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from tsgg.forward import Forward, Key, StepGraph, StepProgram, StepRows
from tsgg.ggml.buffers import F32
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.graph import Graph

HEAD_EVERY = 8  # forwards of a kind per timed run of the head alone: its own cost stays under an eighth of a head


@dataclass(slots=True)
class Phases:
    """Sums over the forwards of one kind, in seconds. The first forward of a graph is left out: it touches new memory."""

    kind: str  # "decode", "verify" or "prefill"
    sequences: int
    rows: int  # of each sequence
    forwards: int = 0
    inputs: float = 0.0  # tokens, positions, masks, and rows gathered on the host
    compute: float = 0.0
    outputs: float = 0.0  # reading logits and hidden rows, and the soft cap
    head: float = 0.0  # of `heads` runs of the head alone, on as many rows as its forward gave it
    heads: int = 0

    @property
    def head_share(self) -> float | None:
        """Part of compute that the LM head takes, 0 to 1; None where it was not timed."""
        if not self.heads or not self.forwards or self.compute <= 0:
            return None
        return min(1.0, self.head / self.heads / (self.compute / self.forwards))


class Profile:
    """Times the forwards of one model, from when it is made on. Freed with the model."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._phases: dict[tuple[str, int, int], Phases] = {}
        self._seen: WeakSet[StepProgram] = (
            WeakSet()
        )  # whose first forward, which touches its memory for the first time, is over
        self._heads: dict[int, _Head] = {}
        self._latest: Key | None = None

    def run(self, program: StepProgram, tokens: list[list[int]], first: list[int]) -> StepRows:
        """`StepProgram.run`, timed; the rows that it hands out time their reads."""
        if self._latest is not None:
            self._time_head(self._latest)  # nobody reads the rows of the latest forward any more
        self._latest = program.key
        started = time.perf_counter()
        program.fill(tokens, first)
        filled = time.perf_counter()
        program.graph.replay(interruptible=True)
        done = time.perf_counter()
        key = program.key
        phases = self._of(key)
        counted = program in self._seen
        self._seen.add(program)
        if counted:
            phases.forwards += 1
            phases.inputs += filled - started
            phases.compute += done - filled
        return _TimedRows(self._forward, program, phases if counted else None)

    def phases(self) -> list[Phases]:
        """What was timed, the kind with most time first."""
        timed = [phases for phases in self._phases.values() if phases.forwards]
        return sorted(timed, key=lambda phases: -phases.compute)

    def report(self) -> str:
        """A table of `phases`, milliseconds per forward."""
        lines = [f"{'forward':<16}{'count':>7}{'inputs':>9}{'compute':>10}{'outputs':>9}{'head':>7}"]
        for phases in self.phases():
            rows = f"{phases.sequences} x {phases.rows}"
            inputs, compute, outputs = (
                1e3 * seconds / phases.forwards for seconds in (phases.inputs, phases.compute, phases.outputs)
            )
            share = phases.head_share
            head = "-" if share is None else f"{100 * share:.0f} %"
            line = f"{phases.kind + ' ' + rows:<16}{phases.forwards:>7}{inputs:>9.3f}{compute:>10.3f}{outputs:>9.3f}{head:>7}"
            lines.append(line)
        return "\n".join([*lines, "milliseconds per forward; head: the LM head's part of compute"])

    def close(self) -> None:
        """Frees its graphs; a second call does nothing."""
        for head in self._heads.values():
            head.graph.close()
        self._heads.clear()

    def _time_head(self, key: Key) -> None:
        """Now and then, the head alone on as many rows as the forward gave it."""
        phases = self._of(key)
        if key.want.logits == "none" or phases.forwards % HEAD_EVERY != 1:
            return
        rows = key.sequences * (key.rows if key.want.logits == "all" else 1)
        head = self._heads.get(rows)
        if head is None:
            head = self._heads[rows] = _Head(self._forward, key, rows)
        started = time.perf_counter()
        head.graph.replay()
        phases.head += time.perf_counter() - started
        phases.heads += 1

    def _of(self, key: Key) -> Phases:
        kind = "verify" if key.want.logits == "all" else "prefill"
        if key.rows == 1:
            kind = "decode"
        name = (kind, key.sequences, key.rows)
        return self._phases.setdefault(name, Phases(*name))


class _TimedRows(StepRows):
    def __init__(self, forward: Forward, program: StepProgram, phases: Phases | None) -> None:
        super().__init__(forward, program)
        self._phases = phases

    def logits(self, sequence: int, row: int) -> NDArray[np.float32]:
        started = time.perf_counter()
        found = super().logits(sequence, row)
        self._add(started)
        return found

    def hidden(self, sequence: int) -> NDArray[np.float32]:
        started = time.perf_counter()
        found = super().hidden(sequence)
        self._add(started)
        return found

    def tap(self, layer: int, sequence: int) -> NDArray[np.float32]:
        started = time.perf_counter()
        found = super().tap(layer, sequence)
        self._add(started)
        return found

    def _add(self, started: float) -> None:
        if self._phases is not None:
            self._phases.outputs += time.perf_counter() - started


class _Head:
    """The LM head as a graph of its own, on rows that stay the same."""

    def __init__(self, forward: Forward, key: Key, rows: int) -> None:
        g = GraphBuilder(capacity=64 + forward.arch.layer_nodes * (forward.arch.layers + 1))
        hidden = g.input("hidden", F32, forward.arch.embedding, rows)
        step = StepGraph(key, g, forward.arch, forward.weights, forward.memory)
        g.output(forward.arch.logits(g, forward.weights, step, hidden))
        self.graph = Graph(g, forward.backends[0], forward.backends[1:])
        self.graph.inputs["hidden"][:] = np.random.default_rng(0).standard_normal(self.graph.inputs["hidden"].shape)
        self.graph.replay()
