"""Copies of recurrent states at the ends of prefill chunks: what a sequence can be cut back to.

A state cannot be taken back row by row, so without them a prompt that differs from the last one near its end is read from its
beginning. A pool of few entries on the device serves all slots; it is allocated with the first chunk that is worth one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import OutOfMemoryError, UsageError
from tsgg.ggml import buffers
from tsgg.ggml.buffers import F32, Tensor, TensorSet
from tsgg.ggml.devices import Device
from tsgg.ggml.library import ffi, lib
from tsgg.memory.turn import address

log = logging.getLogger("tsgg.memory")

POOL_BYTES = 256 << 20  # of all entries: unbounded, a deep model's long prompts would fill the device
MOST_ENTRIES = 4  # the end of the last prompt, and a spread before it
ROWS_APART = 64  # tokens from one to the next of a slot: copying a state takes longer than to read a few tokens again
FLOAT = 4


def pool_entries(state_bytes: int) -> int:
    """Entries of the pool, one at least, for states of that many bytes over all layers."""
    return max(1, min(MOST_ENTRIES, POOL_BYTES // state_bytes))


@dataclass(frozen=True, slots=True)
class _Entry:
    slot: int
    length: int  # tokens that the state has seen


class Checkpoints:
    """Of the live tensors of a `RecurrentArena`, each with the slots as its slowest dimension."""

    def __init__(self, live: Mapping[str, Tensor], slots: int, device: Device) -> None:
        self._live, self._slots, self._device = live, slots, device
        self._bytes = {name: buffers.nbytes(tensor) // slots for name, tensor in live.items()}  # of one slot
        self._entries: list[_Entry | None] = [None] * pool_entries(sum(self._bytes.values()))
        self._pool: dict[str, Tensor] = {}
        self._tensors: TensorSet | None = None
        self.nbytes = 0

    def lengths(self, slot: int) -> list[int]:
        """What `restore` can bring back, ascending."""
        return sorted(entry.length for entry in self._entries if entry is not None and entry.slot == slot)

    def save(self, slot: int, length: int) -> None:
        """Keeps the slot's live state, that after `length` tokens, where it is far enough from the last one kept."""
        if length - max(self.lengths(slot), default=0) < ROWS_APART or not self._allocated():
            return
        place = self._entries.index(None) if None in self._entries else self._least_missed()
        self._entries[place] = _Entry(slot, length)
        self._copy(slot, place, save=True)

    def restore(self, slot: int, length: int) -> None:
        """Makes the state after `length` tokens the live one again: one of `lengths`."""
        self._copy(slot, self._entries.index(_Entry(slot, length)), save=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each run of a state."""
        return tuple(self._bytes.values())

    def read(self, slot: int, length: int | None) -> tuple[NDArray[np.uint8], ...]:
        """The slot's live state, or that after `length` tokens, one of `lengths`: a run of bytes for each tensor."""
        tensors = self._live if length is None else self._pool
        place = slot if length is None else self._entries.index(_Entry(slot, length))
        state = []
        for name, size in self._bytes.items():
            state.append(np.empty(size, np.uint8))
            lib.ggml_backend_tensor_get(tensors[name], ffi.from_buffer(state[-1]), place * size, size)
        return tuple(state)

    def write(self, slot: int, state: tuple[NDArray[np.uint8], ...]) -> None:
        """Makes a state that `read` gave the slot's live one; what was kept of the slot is gone. Raises `UsageError`."""
        if [part.nbytes for part in state] != list(self._bytes.values()):
            raise UsageError("this recurrent state is of another model")
        self.forget(slot, 0)
        for (name, size), part in zip(self._bytes.items(), state, strict=True):
            lib.ggml_backend_tensor_set(self._live[name], ffi.from_buffer(part), slot * size, size)

    def forget(self, slot: int, beyond: int) -> None:
        """The slot's tokens past `beyond` are gone."""
        self._entries = [
            None if entry is not None and entry.slot == slot and entry.length > beyond else entry
            for entry in self._entries
        ]

    def close(self) -> None:
        if self._tensors is not None:
            self._tensors.close()

    def _allocated(self) -> bool:
        if self._tensors is None and self._entries:
            tensors = TensorSet(len(self._live))
            count = len(self._entries)
            self._pool = {name: tensors.new(F32, (size // FLOAT, count), name) for name, size in self._bytes.items()}
            try:
                self.nbytes = tensors.allocate(self._device.buffer_type, clear=False)
            except OutOfMemoryError as error:
                log.warning(
                    "no memory for checkpoints of recurrent states (%s): prompts are read from the start", error
                )
                tensors.close()
                self._entries = []
                return False
            self._tensors = tensors
        return bool(self._entries)

    def _least_missed(self) -> int:
        """Of the slot with the most entries the one closest to its neighbours; the longest only if it is alone."""
        owners = [entry.slot for entry in self._entries if entry is not None]
        slot = max(owners, key=owners.count)
        lengths = [0, *self.lengths(slot)]
        gaps = {lengths[i]: lengths[i + 1] - lengths[i - 1] for i in range(1, len(lengths) - 1)}
        return self._entries.index(_Entry(slot, min(gaps, key=lambda length: gaps[length], default=lengths[-1])))

    def _copy(self, slot: int, place: int, save: bool) -> None:
        with closing(TensorSet(2 * len(self._live))) as views:
            for name, size in self._bytes.items():
                pair = []
                for tensor, index in ((self._live[name], slot), (self._pool[name], place)):
                    view = views.new(F32, (size // FLOAT,))
                    buffers.place(view, tensor.buffer, address(tensor) + index * size)
                    pair.append(view)
                source, target = pair if save else reversed(pair)
                lib.ggml_backend_tensor_copy(source, target)
