"""Recurrent states: what a convolution and a delta rule carry from row to row, which no bookkeeping can take back.

    live      conv {channels, taps - 1, slots}      the last rows before the convolution, one layer each
              state {key_dim, value_dim, heads, slots}
    scratch   what one forward leaves: the states after its rows, newest first, and the rows that it convolved

A forward reads the live state and writes scratch, so rows that nobody commits change nothing. `commit(kept)` copies the state
after row kept - 1 over the live one: a small persistent graph per slot, two copies a layer, whose row numbers are data. So there
is one family of states for all row counts, the state never leaves the device, and no row is forwarded twice.

Where a forward hands out the logits of all its rows (a verify, at most 65 rows), the state after every row is kept, and any
number of rows can be committed. Any other (a prefill chunk) keeps the state after its last row only, and is committed whole.
Scratch belongs to the last forward: its rows are committed before the next one, or never.

On a device whose delta rule hands out the last state alone a verify keeps that one too. Where a part of its rows is committed
the live state is still the one before them, and the kept rows are forwarded again, into it (`Memory.commit` counts them).

With a single sequence on the CPU a plain step copies nothing: its commit only notes that the state now lies in scratch, and the
next one-row graph runs the other way round, from scratch into the live state. Any other forward settles first, by the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import OutOfMemoryError, TsggError, UnsupportedError
from tsgg.ggml import buffers
from tsgg.ggml.buffers import F32, I32, Tensor, TensorSet
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Backend, Device
from tsgg.ggml.graph import Graph
from tsgg.ggml.library import ffi, lib
from tsgg.memory import snapshots
from tsgg.memory.checkpoints import Checkpoints, pool_entries
from tsgg.memory.turn import Turn, address
from tsgg.models.base import Recurrent
from tsgg.speculative.options import MAX_DRAFT

log = logging.getLogger("tsgg.memory")

# What a forward's rows are there for. "verify": any number of them may be committed. "chunk": all or none. "again": they are
# committed already, and the state after them is still to be made.
Purpose = Literal["verify", "chunk", "again"]

LARGEST_VERIFY = 1 + MAX_DRAFT  # rows
FLOAT = 4  # bytes: states are F32 whatever the KV type is


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of one forward lie: `count` each for `sequences` in slots `first`, `first` + 1, ..."""

    first: int
    sequences: int
    count: int
    every: bool  # the state after every row is kept, not the last one's alone
    purpose: Purpose = "verify"

    @property
    def states(self) -> int:
        """State sets in scratch."""
        return self.sequences * (self.count if self.every else 1)

    def convolved(self, taps: int) -> int:
        """Convolved rows in scratch."""
        return self.sequences * (taps - 1 + (self.count if self.every else 0))


class RecurrentArena:
    """Live states of some layers for `slots` sequences, and the scratch that grows to what forwards need."""

    def __init__(self, layers: Mapping[int, Recurrent], slots: int, device: Device) -> None:
        """`layers`: geometry by layer number, the same for all. Raises `UnsupportedError`, `OutOfMemoryError`."""
        shapes = set(layers.values())
        self.shape = shapes.pop()
        if shapes:
            raise UnsupportedError("recurrent layers of different geometry in one model are not implemented")
        self.snapshots = snapshots.check(self.shape, device)
        self.layers, self.slots, self.device = tuple(layers), slots, device
        self.backend: Backend | None = None  # where commits run; set by the forward that owns it
        self.rows: Layout | None = None  # of the last forward: what scratch holds
        self._allocate()
        live = {
            f"{kind}.{i}": tensors[i]
            for kind, tensors in (("conv", self._conv), ("state", self._state))
            for i in tensors
        }
        self.checkpoints = Checkpoints(live, slots, device)
        self.alternates = slots == 1 and device.is_cpu  # elsewhere a graph's addresses are captured with it
        self.side = 0  # where the committed state lies: 0 live, 1 scratch, as the last one-row step left it
        self.writes: int | None = None  # the side that the last forward wrote, if it was an alternating one
        self._empty = [True] * slots  # slots whose live state is zero
        self._scratch: _Scratch | None = None
        self._commits: dict[int, _Commit] = {}

    def _allocate(self) -> None:
        """Live states. A lone slot's stand as a one-row graph leaves them: behind the row's output, behind the oldest row."""
        shape, lone = self.shape, self.slots == 1
        state = (shape.key_dim, shape.value_dim, shape.heads, self.slots)
        conv = (shape.channels, shape.taps - 1, self.slots)
        before = lone * shape.value_dim * shape.heads
        self.tensors, self._named = TensorSet(2 * len(self.layers)), TensorSet(2 * len(self.layers))
        rooms = {}
        for i in self.layers:
            size = before + shape.key_dim * shape.value_dim * shape.heads * self.slots
            rooms[i] = (
                self.tensors.new(F32, (size,), f"state.{i}"),
                self.tensors.new(F32, (shape.channels, lone + (shape.taps - 1) * self.slots), f"conv.{i}"),
            )
        self.live_nbytes = self.tensors.allocate(self.device.buffer_type)
        self._state, self._conv = {}, {}
        self._homes: dict[int, tuple[int, int]] = {}  # where a one-row step of a lone slot leaves output, and run
        for i, pair in rooms.items():
            addresses = tuple(address(room) for room in pair)
            self._homes[i] = addresses[0], addresses[1]
            self._state[i], self._conv[i] = self._named.new(F32, state), self._named.new(F32, conv)
            buffers.place(self._state[i], pair[0].buffer, addresses[0] + before * FLOAT)
            buffers.place(self._conv[i], pair[1].buffer, addresses[1] + lone * shape.channels * FLOAT)

    @property
    def state(self) -> Mapping[int, Tensor]:
        """Live delta states by layer: {key_dim, value_dim, heads, slots}."""
        self.settle()
        return self._state

    @property
    def conv(self) -> Mapping[int, Tensor]:
        """Live rows before the convolution, by layer: {channels, taps - 1, slots}."""
        self.settle()
        return self._conv

    def settle(self) -> None:
        """Copies the committed state out of scratch, if it lies there."""
        if self.side:
            self._commit_graph(0).run(0, 1)
            self.side = 0

    @property
    def scratch_nbytes(self) -> int:
        return self._scratch.nbytes if self._scratch is not None else 0

    @property
    def nbytes(self) -> int:
        return self.live_nbytes + self.scratch_nbytes + self.checkpoints.nbytes

    @property
    def scratch(self) -> _Scratch:
        if self._scratch is None:
            raise TsggError("no scratch for recurrent states: `make_room` comes before a graph is built")
        return self._scratch

    def layout(self, first: int, sequences: int, count: int, purpose: Purpose) -> Layout:
        """What a forward of that shape leaves on this device."""
        every = self.snapshots and purpose == "verify" and count <= LARGEST_VERIFY
        return Layout(first, sequences, count, every or (count == 1 and purpose != "again"), purpose)

    def has_room(self, rows: Layout) -> bool:
        """Whether scratch holds what such a forward leaves."""
        scratch = self._scratch
        return scratch is not None and rows.states <= scratch.states and rows.convolved(self.shape.taps) <= scratch.rows

    def make_room(self, rows: Layout) -> None:
        """Grows scratch. Graphs built before hold addresses in the old one: they must not run again.

        Raises `OutOfMemoryError`, with no scratch left.
        """
        self.settle()
        states, convolved = rows.states, rows.convolved(self.shape.taps)
        if self._scratch is not None:
            states, convolved = max(states, self._scratch.states), max(convolved, self._scratch.rows)
        self._drop_scratch()
        try:
            self._scratch = _Scratch(self.layers, self.shape, states, convolved, self.device)
        except OutOfMemoryError as error:
            size = states * len(self.layers) * state_bytes(self.shape) / 2**20
            raise OutOfMemoryError(
                f"no memory for the recurrent states after {states} rows, about {size:.0f} MiB ({error}): use a smaller draft "
                "window or fewer sequences"
            ) from None
        log.info("states after %d rows: %.1f MiB of scratch", states, self._scratch.nbytes / 2**20)

    def reset(self, slot: int) -> None:
        """The slot's sequence is empty: zero state."""
        self.checkpoints.forget(slot, 0)
        if self._empty[slot]:
            return
        self.side = 0
        for tensor in (*self._conv.values(), *self._state.values()):
            size = buffers.nbytes(tensor) // self.slots
            lib.ggml_backend_tensor_memset(tensor, 0, slot * size, size)
        self._empty[slot] = True

    def go_back(self, slot: int, length: int) -> None:
        """The slot's sequence is cut to `length` tokens, one of `checkpoints.lengths`.

        The state after those is the live one again.
        """
        self.checkpoints.forget(slot, length)
        self.checkpoints.restore(slot, length)
        self.side = 0  # of a lone slot; what lies in scratch is void

    def read(self, slot: int, checkpoint: int | None = None) -> tuple[NDArray[np.uint8], ...]:
        """The slot's state on the host: the live one, or that after `checkpoint` tokens, one of `checkpoints.lengths`."""
        self.settle()
        return self.checkpoints.read(slot, checkpoint)

    def write(self, slot: int, state: tuple[NDArray[np.uint8], ...]) -> None:
        """Makes it the slot's live state. Raises `UsageError`, with nothing changed, for one of another geometry."""
        self.checkpoints.write(slot, state)
        self.side = 0  # of a lone slot; what lies in scratch is void
        self._empty[slot] = False

    def commit(self, slot: int, kept: int, length: int) -> bool:
        """Makes the state after the first `kept` (one or more) rows of the slot's last forward the live one.

        False where the device did not keep it: then nothing changed, and a forward of those rows `again` does it.
        `length` is the tokens of the sequence with them: behind a prefill chunk it can be cut back to them later on.

        Raises `TsggError` where scratch does not hold that state, with nothing changed.
        """
        rows = self.rows
        if rows is None or not rows.first <= slot < rows.first + rows.sequences:
            raise TsggError(
                "another forward has run since this sequence's: the states after its rows are gone. "
                "Commit a forward's rows before the next forward"
            )
        if kept != rows.count and not rows.every:
            if rows.purpose == "verify" and rows.count <= LARGEST_VERIFY:
                self._empty[slot] = False
                return False
            raise TsggError(
                f"commit({kept}) of {rows.count} rows: the recurrent state was kept after the last row only. Ask for the "
                f"logits of all rows (at most {LARGEST_VERIFY}) where some of them may be rejected"
            )
        self._empty[slot] = False
        if self.writes is not None:
            self.side = self.writes
            return True
        commit = self._commit_graph(slot)
        index, taps = slot - rows.first, self.shape.taps
        if rows.every:  # newest first, the sequences of a row side by side; convolved rows by sequence, in order
            state = (rows.count - kept) * rows.sequences + index
            commit.run(state, index * (taps - 1 + rows.count) + kept)
        else:
            commit.run(index, index * (taps - 1))
            if rows.purpose == "chunk" or rows.count > LARGEST_VERIFY:
                self.checkpoints.save(slot, length)
        return True

    def close(self) -> None:
        self._drop_scratch()
        self.checkpoints.close()
        self._named.close()
        self.tensors.close()

    def homes(self) -> list[tuple[int, int, int]]:
        """(address in the live state, address in scratch, bytes) of what an alternating step reads on one side and writes on
        the other."""
        shape, scratch = self.shape, self.scratch
        result = scratch.output + shape.key_dim * shape.value_dim * shape.heads * FLOAT
        run = shape.channels * shape.taps * FLOAT
        pairs = []
        for i, (output, rows) in self._homes.items():
            pairs.append((output, address(scratch.results[i]) + scratch.offset - scratch.output, result))
            pairs.append((rows, address(scratch.convolved[i]), run))
        return pairs

    def _commit_graph(self, slot: int) -> _Commit:
        if slot not in self._commits:
            self._commits[slot] = _Commit(self, slot)
        return self._commits[slot]

    def _drop_scratch(self) -> None:
        self.rows, self.writes, self.side = None, None, 0
        for commit in self._commits.values():
            commit.graph.close()
        self._commits.clear()
        if self._scratch is not None:
            self._scratch.tensors.close()
            self._scratch = None


class _Scratch:
    """Memory for `states` state sets and `rows` convolved rows of every layer.

    results {states * (value_dim * heads + one state)}: where `gated_delta_net` leaves its result, placed so that its states
    begin at `offset` whatever the number of rows; so one commit graph finds them all.
    """

    def __init__(self, layers: tuple[int, ...], shape: Recurrent, states: int, rows: int, device: Device) -> None:
        self.states, self.rows = states, rows
        self.output = shape.value_dim * shape.heads * FLOAT  # bytes of a row's output
        self.offset = states * self.output
        state = shape.key_dim * shape.value_dim * shape.heads
        self.tensors = TensorSet(2 * len(layers))
        size = states * (shape.value_dim * shape.heads + state)
        self.results = {i: self.tensors.new(F32, (size,), f"states.{i}") for i in layers}
        self.convolved = {i: self.tensors.new(F32, (shape.channels, rows), f"convolved.{i}") for i in layers}
        self.nbytes = self.tensors.allocate(device.buffer_type, clear=False)


class _Commit:
    """The persistent graph that copies one state of scratch over a slot's live one, on leaves only.

    A view of another graph's node would drag that whole graph in and run it again.
    """

    def __init__(self, arena: RecurrentArena, slot: int) -> None:
        assert arena.backend is not None
        shape, scratch = arena.shape, arena.scratch
        g = GraphBuilder(capacity=4 * len(arena.layers) + 16)
        heads, rows = g.input("heads", I32, shape.heads), g.input("rows", I32, shape.taps - 1)
        matrix = shape.key_dim * shape.value_dim
        for i in arena.layers:
            stored = (matrix, shape.heads * scratch.states)
            states = g.view(scratch.results[i], stored, (matrix * FLOAT,), scratch.offset)
            for source, ids, live in ((states, heads, arena._state[i]), (scratch.convolved[i], rows, arena._conv[i])):
                copy = g.get_rows(source, ids)
                buffers.place(copy, live.buffer, address(live) + slot * (buffers.nbytes(live) // arena.slots))
                g.expand(copy)
        self.graph = Graph(g, arena.backend)
        self._ids = [
            (_pointer(self.graph.inputs[name]), n) for name, n in (("heads", shape.heads), ("rows", shape.taps - 1))
        ]
        self._heads = shape.heads
        self._start = ffi.new("int32_t[1]")

    def run(self, state: int, row: int) -> None:
        """Copies state number `state` of scratch, and the convolved rows from `row` on."""
        for (pointer, count), start in zip(self._ids, (state * self._heads, row), strict=True):
            self._start[0] = start
            lib.tsgg_fill_positions(pointer, count, 1, self._start)
        self.graph.replay()


class RecurrentStep:
    """The arena's part of one forward under construction."""

    def __init__(self, arena: RecurrentArena, g: GraphBuilder, rows: Layout) -> None:
        self.arena, self.g, self.rows = arena, g, rows
        self._run: Tensor | None = None  # rows to convolve, where scratch does not keep them: the layers take turns

    def convolve(self, layer: int, x: Tensor, kernel: Tensor) -> Tensor:
        """See `tsgg.models.base.Step`. Leaves in scratch the rows before the first and all rows, or the last ones."""
        g, rows, before = self.g, self.rows, self.arena.shape.taps - 1
        channels, count, b = int(x.ne[0]), rows.count, rows.sequences
        row = channels * FLOAT
        run = self._rows_to_convolve(layer, channels, before + count)
        strides = (row, (before + count) * row)
        live = self.arena._conv[layer]
        live = g.view(live, (channels, before, b), (row, before * row), rows.first * before * row)
        # x first: it needs all that earlier layers did, so that they have read the rows they shared before these are written
        g.expand(g.cpy(g.reshape(x, channels, count, b), g.view(run, (channels, count, b), strides, before * row)))
        g.expand(g.cpy(live, g.view(run, (channels, before, b), strides)))
        if not rows.every:
            kept = g.view(self.arena.scratch.convolved[layer], (channels, before, b), (row, before * row))
            g.expand(g.cpy(g.view(run, (channels, before, b), strides, count * row), self._into(live, kept)))
        return g.reshape(g.ssm_conv(g.cont(g.transpose(run)), kernel), channels, count * b)

    def delta_net(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """See `tsgg.models.base.Step`. Leaves in scratch the state after every row, or after the last."""
        g, shape, scratch, rows = self.g, self.arena.shape, self.arena.scratch, self.rows
        count, b = rows.count, rows.sequences
        size = shape.key_dim * shape.value_dim * shape.heads
        live = self.arena._state[layer]
        strides = tuple(int(stride) for stride in live.nb[1:4])
        state = (shape.key_dim, shape.value_dim, shape.heads, b)
        live = state = g.view(live, state, strides, rows.first * size * FLOAT)
        per_row = (1, shape.heads, count, b)
        result = g.gated_delta_net(
            self._by_sequence(q), self._by_sequence(k), self._by_sequence(v),
            g.reshape(decay, *per_row), g.reshape(beta, *per_row), state, count if rows.every else 1,
        )  # fmt: skip
        kept = scratch.results[layer]
        if rows.every:
            start = scratch.offset - count * b * scratch.output
            buffers.place(result, kept.buffer, address(kept) + start)
            g.expand(result)
        else:
            last = g.view(result, (size * b,), (), count * b * scratch.output)
            kept = g.view(kept, (size * b,), (), scratch.offset)
            g.expand(g.cpy(last, self._into(live, kept)))
        return g.view(result, (shape.value_dim * shape.heads, count * b), (scratch.output,))

    def _into(self, live: Tensor, scratch: Tensor) -> Tensor:
        """Where the last state goes: rows forwarded again are committed already, and scratch may hold their neighbours'."""
        return live if self.rows.purpose == "again" else scratch

    def _by_sequence(self, x: Tensor) -> Tensor:
        """{n, heads, rows} as {n, heads, rows of a sequence, sequences}."""
        row, count = int(x.nb[2]), self.rows.count
        shape = (int(x.ne[0]), int(x.ne[1]), count, self.rows.sequences)
        return self.g.view(x, shape, (int(x.nb[1]), row, count * row))

    def _rows_to_convolve(self, layer: int, channels: int, count: int) -> Tensor:
        """{channels, count, sequences}: in scratch where a commit may want any of them."""
        b = self.rows.sequences
        if self.rows.every:
            kept = self.arena.scratch.convolved[layer]
            run = self.g.leaf(F32, channels, count, b)
            buffers.place(run, kept.buffer, address(kept))
            return run
        if self._run is None:
            self._run = self.g.leaf(F32, channels, count, b)
        return self._run


class RecurrentInputs:
    """Says, before a replay, whose rows scratch is about to hold; turns an alternating graph the right way round."""

    def __init__(self, step: RecurrentStep) -> None:
        self._arena, self._rows = step.arena, step.rows
        turns = step.arena.alternates and step.rows.every and step.rows.count == 1
        self._turn = Turn(step.g.graph, step.arena.homes()) if turns else None

    def fill(self, first: Any) -> None:
        arena = self._arena
        if self._rows.purpose == "again":  # right behind the forward that scratch holds
            return
        if self._turn is None:
            arena.settle()
            arena.writes = None
        else:
            self._turn.read(arena.side)
            arena.writes = 1 - arena.side
        arena.rows = self._rows


def state_bytes(layer: Recurrent) -> int:
    """Bytes of one sequence's state in one layer."""
    conv = layer.channels * (layer.taps - 1)
    return (conv + layer.key_dim * layer.value_dim * layer.heads) * FLOAT


def live_bytes(layer: Recurrent, slots: int) -> int:
    """Bytes of one layer's live states; a lone slot's have room before them."""
    before = (layer.value_dim * layer.heads + layer.channels) * FLOAT if slots == 1 else 0
    return before + slots * state_bytes(layer)


def checkpoint_bytes(layers: Iterable[Recurrent]) -> int:
    """Bytes of the pool of checkpoints of these layers."""
    one = sum(state_bytes(layer) for layer in layers)
    return pool_entries(one) * one if one else 0


def scratch_bytes(layer: Recurrent, sequences: int, rows: int) -> int:
    """Bytes of one layer's scratch for a verify of `rows` rows of each of `sequences`."""
    kept = Layout(0, sequences, rows, every=True)
    state = layer.heads * layer.value_dim * (layer.key_dim + 1)
    return (kept.states * state + kept.convolved(layer.taps) * layer.channels) * FLOAT


def _pointer(array: NDArray[Any]) -> Any:
    return ffi.cast("int32_t *", ffi.from_buffer(array))
