"""All memory of a model's sequences: one arena per kind of layer, behind one object that the forward talks to."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from tsgg.errors import UsageError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Device
from tsgg.memory.kv import KVArena, KVInputs, KVStep, cell_bytes, round_cells
from tsgg.models.base import Attention

LARGEST_RUN = 512  # rows that may lie uncommitted in memory: a prefill chunk (a verify has at most 65)


class Memory:
    """Arenas for `slots` sequences of `context` tokens. Allocated once, freed by `close`."""

    def __init__(
        self, layers: Sequences[Attention], context: int, slots: int, device: Device, type_k: str, type_v: str
    ) -> None:
        """`layers` is the architecture's geometry, a layer each. Raises `UsageError`, `OutOfMemoryError`."""
        self.arenas: dict[str, KVArena] = {}
        try:
            for name, (members, cells) in _group(layers, context).items():
                self.arenas[name] = KVArena(members, cells, slots, device, type_k, type_v)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas.values())

    def buckets(self, length: int) -> tuple[int, ...]:
        """Cells that a graph reads of every arena when the longest sequence reaches `length`."""
        return tuple(arena.bucket(length) for arena in self.arenas.values())

    def reachable(self, length: int, highest: int) -> bool:
        """Whether every arena still holds what a sequence needs to go on from `length`; see `KVArena.reachable`."""
        return all(arena.reachable(length, highest) for arena in self.arenas.values())

    def check_run(self, length: int, highest: int, rows: int) -> None:
        """Raises `UsageError` where `rows` behind `length` tokens overwrite window cells that the first of them still reads.

        Up to LARGEST_RUN rows never do, and after them every rollback is possible.
        """
        if not self.reachable(length, max(highest, length + rows)):
            raise UsageError(
                f"{rows} rows in one forward overwrite what this model's sliding window still reads: "
                f"forward at most {LARGEST_RUN} at a time"
            )

    def step(self, g: GraphBuilder, first: int, sequences: int, rows: int, buckets: tuple[int, ...]) -> MemoryStep:
        steps = {
            name: KVStep(arena, g, name, first, sequences, rows, cells)
            for (name, arena), cells in zip(self.arenas.items(), buckets, strict=True)
        }
        return MemoryStep(steps)

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()


class MemoryStep:
    """Memory's part of one forward under construction: each layer finds its arena."""

    def __init__(self, steps: dict[str, KVStep]) -> None:
        self._steps = steps
        self._of_layer = {layer: step for step in steps.values() for layer in step.arena.layers}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Schedules the writes of k {d, kv heads, rows} and v into the layer's cells."""
        self._of_layer[layer].store(layer, k, v)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q {d, heads, rows} over the layer's cells: {value_dim * heads, rows}."""
        return self._of_layer[layer].attend(layer, q, scale)

    def inputs(self, arrays: dict[str, NDArray[Any]]) -> list[KVInputs]:
        """What rewrites the arenas' inputs before a replay. An arena that no layer of the graph used has none."""
        return [KVInputs(step, arrays) for name, step in self._steps.items() if f"{name}.cells" in arrays]


def memory_bytes(layers: Sequences[Attention], context: int, slots: int, type_k: str, type_v: str) -> int:
    """Bytes of all arenas, before they are allocated."""
    return sum(
        slots * round_cells(cells) * cell_bytes(layer, type_k, type_v)
        for members, cells in _group(layers, context).values()
        for layer in members.values()
    )


def full_memory_bytes(layers: Sequences[Attention], context: int, slots: int, type_k: str, type_v: str) -> int:
    """What `memory_bytes` would be if layers with a window kept every position too: what the rings save."""
    return memory_bytes([replace(layer, window=0) for layer in layers], context, slots, type_k, type_v)


def _group(layers: Sequences[Attention], context: int) -> dict[str, tuple[dict[int, Attention], int]]:
    """Layers by arena, with the cells of a slot: all positions, or a window and the largest uncommitted run."""
    groups: dict[str, tuple[dict[int, Attention], int]] = {}
    for number, layer in enumerate(layers):
        name = f"window{layer.window}" if layer.window else "kv"
        cells = min(context, layer.window + LARGEST_RUN) if layer.window else context
        groups.setdefault(name, ({}, cells))[0][number] = layer
    return groups
