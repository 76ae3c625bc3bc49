"""What slots hold, taken out to host memory, put back, or copied from slot to slot: what a prefix cache is made of.

    Cells   positions start..end - 1 of the layers that keep every position. Of these any prefix can be put back.
    State   what cannot be cut: the rings of layers with a window, and recurrent states, as they stood behind `length` tokens.

A sequence is put back from the cells of its tokens and, where the model has windows or recurrent layers, one state. Bytes are
copied as they lie, so a sequence that is put back goes on as the one that was taken out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import UsageError
from tsgg.ggml.buffers import Tensor, nbytes
from tsgg.ggml.library import ffi, lib

if TYPE_CHECKING:
    from tsgg.memory.memory import Memory

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Cells:
    """K and V of `count` consecutive positions, a lane for each cache: `lanes[i]` has them along dimension `axes[i]`."""

    count: int
    lanes: tuple[NDArray[Any], ...]
    axes: tuple[int, ...]

    def part(self, start: int, end: int) -> Cells:
        """Positions start..end - 1 of these, as a copy: neither half keeps the memory of the other."""
        lanes = (_span(lane, axis, start, end).copy() for lane, axis in zip(self.lanes, self.axes, strict=True))
        return Cells(end - start, tuple(lanes), self.axes)

    @property
    def nbytes(self) -> int:
        return sum(lane.nbytes for lane in self.lanes)


@dataclass(frozen=True, slots=True)
class State:
    """Rings and recurrent states of a sequence of `length` tokens."""

    length: int
    highest: int  # positions below it were written to the rings, see `KVArena.reachable`
    rings: tuple[NDArray[Any], ...]  # as they lie in the slot, as far as they were written
    recurrent: tuple[Bytes, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.rings, *self.recurrent))


class RowCopies:
    """Copies between the slots of one memory and the host. Sequences are told by whoever calls: see `Sequence.adopt`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        arenas = memory.arenas.values()
        self._lanes = [lane for arena in arenas if not arena.window for lane in _lanes(arena)]
        self._rings = [(arena.cells, lane) for arena in arenas if arena.window for lane in _lanes(arena)]
        self.row_bytes = sum(lane.row_bytes for lane in self._lanes)
        self.needs_state = bool(self._rings) or memory.recurrent is not None

    def read(self, slot: int, start: int, end: int) -> Cells:
        """Positions start..end - 1 of the slot."""
        lanes = tuple(lane.read(slot, start, end) for lane in self._lanes)
        return Cells(end - start, lanes, tuple(lane.axis for lane in self._lanes))

    def write(self, slot: int, start: int, cells: Cells) -> None:
        """Puts cells at positions `start` and following. Raises `UsageError` for those of another memory."""
        self._check(cells.lanes, self._lanes)
        for lane, part in zip(self._lanes, cells.lanes, strict=True):
            lane.write(slot, start, part)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copies positions start..end - 1 from slot to slot."""
        for lane in self._lanes:
            lane.write(target, start, lane.read(source, start, end, copy=False))

    def states(self, slot: int, length: int) -> list[int]:
        """Lengths at which `read_state` can take the state of a slot whose sequence has `length` tokens, ascending."""
        recurrent = self._memory.recurrent
        kept = [] if recurrent is None else recurrent.checkpoints.lengths(slot)
        return [*(at for at in kept if at < length), length]

    def read_state(self, slot: int, length: int, highest: int, held: int) -> State:
        """The state behind `length` tokens, one of `states`, of a sequence that holds `held` tokens."""
        rings = tuple(lane.read(slot, 0, min(cells, highest)) for cells, lane in self._rings)
        recurrent = self._memory.recurrent
        if recurrent is None:
            return State(length, highest, rings, ())
        return State(length, highest, rings, recurrent.read(slot, None if length == held else length))

    def write_state(self, slot: int, state: State) -> None:
        """Makes it the slot's. Raises `UsageError` for a state of another memory."""
        self._check(state.rings, [lane for _, lane in self._rings])
        for (_, lane), part in zip(self._rings, state.rings, strict=True):
            lane.write(slot, 0, part)
        if self._memory.recurrent is not None:
            self._memory.recurrent.write(slot, state.recurrent)

    def reaches(self, state: State, length: int) -> bool:
        """Whether a sequence of `length` tokens can go on from the state: rings reach back a little, recurrent states do not."""
        if self._memory.recurrent is not None and length != state.length:
            return False
        return length <= state.length and self._memory.reachable(length, state.highest)

    # -- cells and states from elsewhere -------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """Shapes of all that is copied: equal for two memories of one model where cells and states of one fit the other."""
        rings = (f"{lane.layout} of {cells}" for cells, lane in self._rings)
        parts = [*(lane.layout for lane in self._lanes), *rings, *(f"state of {size}" for size in self._state_sizes)]
        return ", ".join(f"{count} x {part}" for part, count in Counter(parts).items())

    def state_bytes(self, highest: int) -> int:
        """Of a state whose rings were written up to `highest`."""
        rings = sum(min(cells, highest) * lane.row_bytes for cells, lane in self._rings)
        return rings + sum(self._state_sizes)

    def new_cells(self, count: int) -> Cells:
        """Memory for `count` positions, to be filled: not initialized."""
        return Cells(count, tuple(lane.new(count) for lane in self._lanes), tuple(lane.axis for lane in self._lanes))

    def new_state(self, length: int, highest: int) -> State:
        """Memory for a state, to be filled."""
        rings = tuple(lane.new(min(cells, highest)) for cells, lane in self._rings)
        return State(length, highest, rings, tuple(np.empty(size, np.uint8) for size in self._state_sizes))

    @property
    def _state_sizes(self) -> tuple[int, ...]:
        recurrent = self._memory.recurrent
        return () if recurrent is None else recurrent.checkpoints.sizes

    def _check(self, parts: tuple[NDArray[Any], ...], lanes: list[_Lane]) -> None:
        if len(parts) != len(lanes) or not all(map(_Lane.fits, lanes, parts)):
            raise UsageError("these rows are of another model, or of other cache types")


class _Lane:
    """One cache tensor as an array with the slots first and the positions along one dimension."""

    def __init__(self, tensor: Tensor, transposed: bool) -> None:
        """Row-major {d, cells, heads, slots}, or transposed {cells, d, heads, slots}."""
        d, cells, heads, slots = (int(n) for n in tensor.ne)
        if transposed:
            d, cells = cells, d
        row = nbytes(tensor) // (cells * heads * slots)
        self._kind: np.dtype[Any] = np.dtype(f"u{row // d}" if transposed else "u1")
        self._shape = (slots, heads, d, cells) if transposed else (slots, heads, cells, row)
        self.axis = 2 if transposed else 1  # without the slots
        self.row_bytes = heads * row
        self._tensor, self._row = tensor, row
        host = lib.ggml_backend_buffer_is_host(tensor.buffer)
        memory = ffi.buffer(tensor.data, nbytes(tensor)) if host else None
        self._view = None if memory is None else np.frombuffer(memory, self._kind).reshape(self._shape)

    def read(self, slot: int, start: int, end: int, copy: bool = True) -> NDArray[Any]:
        if self._view is not None:
            part = _span(self._view[slot], self.axis, start, end)
            return part.copy() if copy else part
        out = np.empty((self._shape[1], end - start, self._row), self._kind)
        for pointer, offset, size in self._runs(slot, start, out):
            lib.ggml_backend_tensor_get(self._tensor, pointer, offset, size)
        return out

    def write(self, slot: int, start: int, part: NDArray[Any]) -> None:
        if self._view is not None:
            _span(self._view[slot], self.axis, start, start + part.shape[self.axis])[...] = part
            return
        for pointer, offset, size in self._runs(slot, start, np.ascontiguousarray(part)):
            lib.ggml_backend_tensor_set(self._tensor, pointer, offset, size)

    def fits(self, part: NDArray[Any]) -> bool:
        ours, theirs = list(self._shape[1:]), list(part.shape)
        if part.dtype != self._kind or len(theirs) != len(ours):
            return False
        cells = theirs.pop(self.axis)
        return cells <= ours.pop(self.axis) and theirs == ours

    def new(self, cells: int) -> NDArray[Any]:
        shape = list(self._shape[1:])
        shape[self.axis] = cells
        return np.empty(shape, self._kind)

    @property
    def layout(self) -> str:
        shape = [str(size) for size in self._shape[1:]]
        shape[self.axis] = "cells"
        return f"{self._kind.name}[{', '.join(shape)}]"

    def _runs(self, slot: int, start: int, part: NDArray[Any]) -> Iterator[tuple[Any, int, int]]:
        """A head's rows are one run: (host address, offset in the tensor, bytes). Only the CPU has a transposed cache."""
        _, heads, cells, row = self._shape
        for head in range(heads):
            yield ffi.from_buffer(part[head]), ((slot * heads + head) * cells + start) * row, part[head].nbytes


def _lanes(arena: Any) -> Iterator[_Lane]:
    for layer in arena.layers:
        yield _Lane(arena.k[layer], False)
        yield _Lane(arena.v[layer], arena.transposed)


def _span(array: NDArray[Any], axis: int, start: int, end: int) -> NDArray[Any]:
    index: list[slice] = [slice(None)] * array.ndim
    index[axis] = slice(start, end)
    part: NDArray[Any] = array[tuple(index)]
    return part
