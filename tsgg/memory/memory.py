"""All memory of a model's sequences: one arena per kind of layer, behind one object that the forward talks to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import replace
from typing import Any, Protocol

from numpy.typing import NDArray

from tsgg.errors import TsggError, UsageError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Backend, Device
from tsgg.memory.kv import KVArena, KVInputs, KVStep, cell_bytes, round_cells
from tsgg.memory.recurrent import (
    Purpose,
    RecurrentArena,
    RecurrentInputs,
    RecurrentStep,
    checkpoint_bytes,
    live_bytes,
    scratch_bytes,
)
from tsgg.models.base import Attention, Recurrent

LARGEST_RUN = 512  # rows that may lie uncommitted in memory: a prefill chunk (a verify has at most 65)
# A chat's next prompt differs from this one in its last tokens, which open the answer (and the reasoning, that is left out
# later): a checkpoint behind them would never be reached.
PROMPT_END = 4  # tokens
WORTH_A_CHUNK = 256  # tokens of a prompt: a chunk more costs about a step

Layers = Sequences[Attention | Recurrent]  # a model's geometry, layer by layer
Again = Callable[[int, list[int], int], None]  # slot, tokens, position of the first


class Memory:
    """Arenas for `slots` sequences of `context` tokens. Allocated once, freed by `close`."""

    def __init__(self, layers: Layers, context: int, slots: int, device: Device, type_k: str, type_v: str) -> None:
        """`layers` is the architecture's geometry, a layer each. Raises `UsageError`, `OutOfMemoryError`."""
        self.arenas: dict[str, KVArena] = {}
        self.closed = False
        self.chunk_rows = LARGEST_RUN  # of a prefill; a model whose products are large sets fewer
        self.recurrent: RecurrentArena | None = None
        self._again: Again | None = None
        recurrent = {i: layer for i, layer in enumerate(layers) if isinstance(layer, Recurrent)}
        self.sources = {i: _source(i, layer) for i, layer in enumerate(layers)}  # layer -> whose cache it reads
        self.writers = [i for i, source in self.sources.items() if i == source]  # layers that keep something
        try:
            if recurrent:
                self.recurrent = RecurrentArena(recurrent, slots, device)
            for name, (members, cells) in _group(layers, context).items():
                self.arenas[name] = KVArena(members, cells, slots, device, type_k, type_v)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes allocated now; those of recurrent layers grow with the rows of a verify."""
        return sum(arena.nbytes for arena in self._parts())

    def buckets(self, length: int, rows: int) -> tuple[int, ...]:
        """Cells that a graph of `rows` rows a sequence reads of every arena when the longest sequence reaches `length`."""
        return tuple(arena.bucket(length, rows) for arena in self.arenas.values())

    def spoiled(self) -> None:
        """The last forward failed while it computed: none of its rows can be committed."""
        if self.recurrent is not None:
            self.recurrent.rows = None

    def reach(self, slot: int, held: int, length: int, highest: int) -> int:
        """The most tokens, up to `length`, that a sequence of `held` tokens can be cut back to."""
        if length >= held:
            return held
        if self.recurrent is None:
            return length if self.reachable(length, highest) else 0
        for kept in reversed(self.recurrent.checkpoints.lengths(slot)):
            if kept <= length and self.reachable(kept, highest):
                return kept
        return 0

    def go_back(self, slot: int, length: int) -> None:
        """The slot's longer sequence is cut to `length` tokens, which `reach` has answered."""
        if self.recurrent is not None and length:
            self.recurrent.go_back(slot, length)

    def commit(self, slot: int, tokens: list[int], length: int) -> int:
        """The slot's sequence of `length` tokens keeps these, the first rows of its last forward.

        Returns how many rows had to be forwarded again for it: 0, but on a device that cannot keep a state per row.
        """
        if self.recurrent is None or self.recurrent.commit(slot, len(tokens), length + len(tokens)):
            return 0
        assert self._again is not None
        self._again(slot, tokens, length)
        return len(tokens)

    def reachable(self, length: int, highest: int) -> bool:
        """Whether every window still holds what a sequence needs to go on from `length`; see `KVArena.reachable`."""
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

    def chunk_end(self, first: int, at: int, end: int, rows: int = LARGEST_RUN) -> int:
        """Where the chunk that begins at `at` ends, when a prompt's tokens first..end - 1 are forwarded in chunks of at most
        `rows` and `chunk_rows`.

        Where states have checkpoints, one is left shortly before the end of a long prompt.
        """
        split = end - PROMPT_END if self.recurrent is not None and end - first >= WORTH_A_CHUNK else end
        return min(split if at < split else end, at + min(rows, self.chunk_rows))

    def reset(self, slot: int) -> None:
        """The slot's sequence is empty."""
        if self.recurrent is not None:
            self.recurrent.reset(slot)

    def use(self, backend: Backend, again: Again) -> None:
        """Names the backend that the forward runs on: what memory copies by itself has to keep its order.

        `again` forwards rows a second time, with the purpose of that name.
        """
        if self.recurrent is not None:
            self.recurrent.backend, self._again = backend, again

    def has_room(self, sequences: int, rows: int, purpose: Purpose) -> bool:
        """Whether a graph of that shape can be built."""
        return self.recurrent is None or self.recurrent.has_room(self.recurrent.layout(0, sequences, rows, purpose))

    def make_room(self, sequences: int, rows: int, purpose: Purpose) -> None:
        """Makes `has_room` true. Graphs built before must not run again. Raises `OutOfMemoryError`."""
        if self.recurrent is not None:
            self.recurrent.make_room(self.recurrent.layout(0, sequences, rows, purpose))

    def step(
        self, g: GraphBuilder, first: int, sequences: int, rows: int, buckets: tuple[int, ...], purpose: Purpose
    ) -> MemoryStep:
        """Memory's part of a graph that is about to be built."""
        steps = {
            name: KVStep(arena, g, name, first, sequences, rows, cells)
            for (name, arena), cells in zip(self.arenas.items(), buckets, strict=True)
        }
        if self.recurrent is None:
            return MemoryStep(steps, self.sources)
        layout = self.recurrent.layout(first, sequences, rows, purpose)
        return MemoryStep(steps, self.sources, RecurrentStep(self.recurrent, g, layout))

    def close(self) -> None:
        self.closed = True
        for arena in self._parts():
            arena.close()

    def _parts(self) -> list[KVArena | RecurrentArena]:
        parts: list[KVArena | RecurrentArena] = [*self.arenas.values()]
        return parts if self.recurrent is None else [*parts, self.recurrent]


class StepInputs(Protocol):
    """What an arena does before a graph is replayed."""

    def fill(self, first: Any) -> None:
        """Rewrites inputs for sequences whose first rows have the positions `first` (int32_t *)."""


class MemoryStep:
    """Memory's part of one forward under construction: each layer finds its arena."""

    def __init__(
        self, steps: dict[str, KVStep], sources: Mapping[int, int], recurrent: RecurrentStep | None = None
    ) -> None:
        """`sources`: the layer whose cache each layer reads, mostly its own."""
        self._steps, self._sources, self._recurrent = steps, sources, recurrent
        self._of_layer = {layer: step for step in steps.values() for layer in step.arena.layers}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Schedules the writes of k {d, kv heads, rows} and v into the layer's cells."""
        self._of_layer[layer].store(layer, k, v)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q {d, heads, rows} over the cells that the layer reads: {value_dim * heads, rows}."""
        source = self._sources[layer]
        return self._of_layer[source].attend(source, q, scale)

    @property
    def recurrent(self) -> RecurrentStep:
        if self._recurrent is None:
            raise TsggError("this architecture builds recurrent layers but declares none")
        return self._recurrent

    def inputs(self, arrays: dict[str, NDArray[Any]]) -> list[StepInputs]:
        """What is done for the arenas before a replay. An arena that no layer of the graph used needs nothing."""
        inputs: list[StepInputs] = [
            KVInputs(step, arrays) for name, step in self._steps.items() if f"{name}.cells" in arrays
        ]
        return inputs if self._recurrent is None else [*inputs, RecurrentInputs(self._recurrent)]


def _source(number: int, layer: Attention | Recurrent) -> int:
    return layer.donor if isinstance(layer, Attention) and layer.donor is not None else number


def memory_bytes(layers: Layers, context: int, slots: int, type_k: str, type_v: str) -> int:
    """Bytes of all arenas, before they are allocated; without the scratch of recurrent layers."""
    states = sum(live_bytes(layer, slots) for layer in layers if isinstance(layer, Recurrent))
    return states + sum(
        slots * round_cells(cells) * cell_bytes(layer, type_k, type_v)
        for members, cells in _group(layers, context).values()
        for layer in members.values()
    )


def verify_bytes(layers: Layers, sequences: int, rows: int) -> int:
    """Bytes of scratch that a verify of `rows` rows of each of `sequences` takes, for recurrent layers."""
    return sum(scratch_bytes(layer, sequences, rows) for layer in layers if isinstance(layer, Recurrent))


def pool_bytes(layers: Layers) -> int:
    """Bytes of the checkpoints of recurrent states."""
    return checkpoint_bytes(layer for layer in layers if isinstance(layer, Recurrent))


def full_memory_bytes(layers: Layers, context: int, slots: int, type_k: str, type_v: str) -> int:
    """What `memory_bytes` would be if layers with a window kept every position too: what the rings save."""
    full = [replace(layer, window=0) if isinstance(layer, Attention) else layer for layer in layers]
    return memory_bytes(full, context, slots, type_k, type_v)


def _group(layers: Layers, context: int) -> dict[str, tuple[dict[int, Attention], int]]:
    """Layers by arena, with the cells of a slot: all positions, or a window and the largest uncommitted run."""
    groups: dict[str, tuple[dict[int, Attention], int]] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, Recurrent) or layer.donor is not None:
            continue
        name = f"window{layer.window}" if layer.window else "kv"
        cells = min(context, layer.window + LARGEST_RUN) if layer.window else context
        groups.setdefault(name, ({}, cells))[0][number] = layer
    return groups
