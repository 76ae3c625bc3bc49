"""A persistent graph: allocated once with an allocator of its own, replayed with rewritten inputs."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import OutOfMemoryError, UnsupportedError
from tsgg.ggml import buffers
from tsgg.ggml.buffers import F16, F32, I32, I64, Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Backend
from tsgg.ggml.library import check_process, ffi, lib, text
from tsgg.ggml.threads import Pace

_DTYPES = {F32: np.float32, F16: np.uint16, I32: np.int32, I64: np.int64}  # F16 inputs are masks, written as raw bits


class Graph:
    """Owns the builder's context and the compute buffer. Not thread-safe.

    `inputs[name]` is an array of numpy shape to fill before `replay`: the tensor's own memory where that is on the host,
    else a staging copy that `replay` uploads. With one backend every op must run on it (`gallocr`); with several, ggml's
    scheduler places the ops, one scheduler per graph (a scheduler replays only the graph that it holds, trap 2).
    """

    def __init__(self, builder: GraphBuilder, backend: Backend, helpers: tuple[Backend, ...] = ()) -> None:
        """Allocates the graph. Raises `UnsupportedError` for an op that no backend runs, `OutOfMemoryError`."""
        self.builder, self.backend = builder, backend
        self._pace = Pace()
        unsupported = [node for node in self.nodes() if not backend.device.supports(node)]
        self._scheduler: Any = None
        if not unsupported:
            self._allocate()
        elif helpers:
            self._schedule([backend, *helpers])
        else:
            node = unsupported[0]
            raise UnsupportedError(f"device {backend.device.name} cannot run {text(lib.ggml_op_desc(node))}")
        self.inputs: dict[str, NDArray[Any]] = {}
        self._staged: list[tuple[Tensor, NDArray[Any]]] = []
        for name, tensor in builder.inputs.items():
            array = buffers.view(tensor, _DTYPES[tensor.type]) if tensor.data != ffi.NULL else None
            if array is None:
                array = np.zeros(buffers.shape(tensor)[::-1], _DTYPES[tensor.type])
                if tensor.data != ffi.NULL:
                    self._staged.append((tensor, array))
            self.inputs[name] = array

    @property
    def nbytes(self) -> int:
        """Bytes of the compute buffer and of the metadata."""
        if self._scheduler is not None:
            size = lib.ggml_backend_sched_get_buffer_size(self._scheduler, self.backend.handle)
        else:
            size = lib.ggml_gallocr_get_buffer_size(self._allocator, 0)
        return int(size) + int(lib.ggml_used_mem(self.builder.ctx))

    def nodes(self) -> list[Tensor]:
        graph = self.builder.graph
        return [lib.ggml_graph_node(graph, i) for i in range(lib.ggml_graph_n_nodes(graph))]

    def replay(self, interruptible: bool = False) -> None:
        """Uploads staged inputs, computes, waits.

        An interruptible one raises `Interrupted` when the backend's `interrupt` is requested: its outputs, and whatever it
        writes, are then worth nothing.
        """
        if interruptible:
            with self.backend.interrupt.armed():
                self._compute()
        else:
            self._compute()

    def _compute(self) -> None:
        for tensor, array in self._staged:
            buffers.write(tensor, array)
        if self._scheduler is not None:
            check_process()
            self.backend.check_status(lib.ggml_backend_sched_graph_compute(self._scheduler, self.builder.graph))
        else:
            self.backend.compute(self.builder.graph, self._pace)

    def close(self) -> None:
        self.inputs.clear()
        self._free()
        self.builder.close()

    def _allocate(self) -> None:
        self._allocator = lib.ggml_gallocr_new(self.backend.buffer_type)
        self._free = weakref.finalize(self, lib.ggml_gallocr_free, self._allocator)
        if not lib.ggml_gallocr_alloc_graph(self._allocator, self.builder.graph):
            self.close_quietly()
            raise OutOfMemoryError(f"device {self.backend.device.name}: no memory for a graph's intermediate results")

    def _schedule(self, backends: list[Backend]) -> None:
        handles = ffi.new("ggml_backend_t[]", [backend.handle for backend in backends])
        size = 2 * lib.ggml_graph_size(self.builder.graph)
        self._scheduler = lib.ggml_backend_sched_new(handles, ffi.NULL, len(backends), size, False, True)
        self._free = weakref.finalize(self, lib.ggml_backend_sched_free, self._scheduler)
        if not lib.ggml_backend_sched_alloc_graph(self._scheduler, self.builder.graph):
            self.close_quietly()
            raise OutOfMemoryError(f"device {self.backend.device.name}: no memory for a graph's intermediate results")

    def close_quietly(self) -> None:
        self._free()
        self.builder.close()
