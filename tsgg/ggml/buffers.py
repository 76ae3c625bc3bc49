"""Tensors that outlive graphs: weights, caches, states. Their memory is freed when the owner says so.

`Tensor` is a `struct ggml_tensor *` as cffi gives it; shapes are in ggml's order (`ne`, fastest first).
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tsgg.errors import OutOfMemoryError
from tsgg.ggml.library import ffi, lib, text

Tensor = Any

# Not shared with a child that is forked; Windows has no such flags, and no fork.
_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}

F32, F16, BF16 = lib.GGML_TYPE_F32, lib.GGML_TYPE_F16, lib.GGML_TYPE_BF16
I32, I64, Q8_0 = lib.GGML_TYPE_I32, lib.GGML_TYPE_I64, lib.GGML_TYPE_Q8_0

CACHE_TYPES = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0}


class TensorSet:
    """A context full of tensors and the buffers behind them. Not thread-safe; a second `close` does nothing."""

    def __init__(self, capacity: int) -> None:
        """Makes room for the descriptions of `capacity` tensors (views count)."""
        params = {"mem_size": max(1, capacity) * lib.ggml_tensor_overhead(), "mem_buffer": ffi.NULL, "no_alloc": True}
        self.context = lib.ggml_init(ffi.new("struct ggml_init_params *", params)[0])
        if self.context == ffi.NULL:
            raise OutOfMemoryError(f"no memory for the descriptions of {capacity} tensors")
        self.buffers: list[Any] = []
        self._unplaced: list[Tensor] = []  # made here, and without memory so far
        self._keep: list[object] = []  # host memory that buffers point into
        self._free = weakref.finalize(self, _free_set, self.context, self.buffers, self._keep)

    def new(self, type: int, shape: Sequence[int], name: str = "") -> Tensor:
        """A tensor without memory. `shape` has one to four entries, fastest first."""
        tensor = lib.ggml_new_tensor(self.context, type, len(shape), list(shape))
        if name:
            lib.ggml_set_name(tensor, name.encode()[: lib.GGML_MAX_NAME - 1])
        self._unplaced.append(tensor)
        return tensor

    def allocate(self, buffer_type: Any, *, weights: bool = False, clear: bool = True) -> int:
        """Gives every tensor that has no memory yet its part of new buffers of that type; returns their bytes.

        Cleared by default: masked cells of a cache are still read, and NaN garbage would spread. On the CPU that costs nothing:
        a page is resident once something was written to it. Raises `OutOfMemoryError`.
        """
        if clear and not weights and buffer_type == lib.ggml_backend_cpu_buffer_type():
            return self._zero_pages(buffer_type)
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self.context, buffer_type)
        if buffer == ffi.NULL:
            raise OutOfMemoryError(
                f"{text(lib.ggml_backend_buft_name(buffer_type))}: the device refused the allocation"
            )
        self.buffers.append(buffer)
        if weights:
            lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
            if text(lib.ggml_backend_buft_name(buffer_type)).startswith("CPU"):  # every step reads all of it
                lib.tsgg_huge_pages(lib.ggml_backend_buffer_get_base(buffer), lib.ggml_backend_buffer_get_size(buffer))
        if clear:
            lib.ggml_backend_buffer_clear(buffer, 0)
        return int(lib.ggml_backend_buffer_get_size(buffer))

    def _zero_pages(self, buffer_type: Any) -> int:
        """Memory straight from the system, which hands out zeros."""
        alignment = max(64, lib.ggml_backend_buft_get_alignment(buffer_type))
        offsets, size = [], 0
        tensors = [tensor for tensor in self._unplaced if tensor.data == ffi.NULL]
        for tensor in tensors:
            offsets.append(size)
            size += -(-lib.ggml_backend_buft_get_alloc_size(buffer_type, tensor) // alignment) * alignment
        self._unplaced.clear()
        if not size:
            return 0
        try:
            memory = mmap.mmap(-1, size, **_PRIVATE)
        except (OSError, OverflowError, ValueError) as error:
            raise OutOfMemoryError(f"CPU: the system refused {size / 2**20:.0f} MiB ({error})") from None
        view = ffi.from_buffer(memory, require_writable=True)
        buffer = lib.ggml_backend_cpu_buffer_from_ptr(view, size)
        self.buffers.append(buffer)
        self._keep.extend((view, memory))
        base = int(ffi.cast("uintptr_t", view))
        for tensor, offset in zip(tensors, offsets, strict=True):
            place(tensor, buffer, base + offset)
        return size

    def map_host(self, memory: memoryview, owner: object) -> tuple[Any, int]:
        """A CPU buffer over existing host memory, kept alive with `owner`; returns (buffer, base address)."""
        view = ffi.from_buffer(memory)
        buffer = lib.ggml_backend_cpu_buffer_from_ptr(view, len(memory))
        lib.ggml_backend_buffer_set_usage(buffer, lib.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        self.buffers.append(buffer)
        self._keep.extend((view, owner))
        return buffer, int(ffi.cast("uintptr_t", view))

    def close(self) -> None:
        self._free()


def place(tensor: Tensor, buffer: Any, address: int) -> None:
    """Puts a tensor without memory at an address inside a buffer."""
    lib.ggml_backend_tensor_alloc(buffer, tensor, ffi.cast("void *", address))


def write(tensor: Tensor, data: Any, offset: int = 0) -> None:
    """Copies host bytes (a C-contiguous array or buffer) into a tensor, blocking."""
    view = ffi.from_buffer(data)
    lib.ggml_backend_tensor_set(tensor, view, offset, len(view))


def read(tensor: Tensor, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """A copy of a tensor's bytes as an array of numpy shape (slowest first)."""
    out = np.empty(shape(tensor)[::-1], dtype)
    lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(out), 0, out.nbytes)
    return out


def view(tensor: Tensor, dtype: DTypeLike = np.float32) -> NDArray[Any] | None:
    """The tensor's own memory as an array of numpy shape, or None when it is not on the host or not contiguous."""
    if not lib.ggml_backend_buffer_is_host(tensor.buffer) or not lib.ggml_is_contiguous(tensor):
        return None
    memory = ffi.buffer(tensor.data, lib.ggml_nbytes(tensor))
    return np.frombuffer(memory, dtype).reshape(shape(tensor)[::-1])


def shape(tensor: Tensor) -> tuple[int, int, int, int]:
    """`ne`: four entries, fastest first."""
    return tuple(tensor.ne)


def nbytes(tensor: Tensor) -> int:
    return int(lib.ggml_nbytes(tensor))


def _free_set(context: Any, buffers: list[Any], keep: list[object]) -> None:
    for buffer in buffers:
        lib.ggml_backend_buffer_free(buffer)
    buffers.clear()
    keep.clear()
    lib.ggml_free(context)
