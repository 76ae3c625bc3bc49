"""One graph that runs from one memory into another and back, by moving the addresses of its tensors.

To the CPU backend a graph is no more than its tensors' addresses. Two graphs would take the time to build, and the memory,
twice; and elsewhere addresses are captured with a graph, so there it is not done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from tsgg.ggml.buffers import Tensor
from tsgg.ggml.library import ffi, lib


class Turn:
    """A graph that was built to read the first of each pair of regions and to write the second."""

    def __init__(self, graph: Any, pairs: Iterable[tuple[int, int, int]]) -> None:
        """`pairs`: addresses of the two regions, and their bytes. The graph is allocated."""
        regions = sorted(
            (start, start + size, other - start)
            for one, two, size in pairs
            for start, other in ((one, two), (two, one))
        )
        starts = [start for start, _, _ in regions]
        self._side = 0
        self._moves: list[tuple[Tensor, tuple[Any, Any]]] = []  # tensor, its address by the side that is read
        for i in range(lib.ggml_graph_n_nodes(graph)):
            node = lib.ggml_graph_node(graph, i)
            where = address(node)
            region = bisect_right(starts, where) - 1
            if region >= 0 and where < regions[region][1]:
                turned = ffi.cast("void *", where + regions[region][2])
                self._moves.append((node, (node.data, turned)))

    def read(self, side: int) -> None:
        """Makes the next replay read the regions of that side, 0 or 1, and write the others."""
        if side != self._side:
            self._side = side
            for tensor, addresses in self._moves:
                tensor.data = addresses[side]


def address(tensor: Tensor) -> int:
    """Where a tensor's data begins."""
    start: int = int(ffi.cast("uintptr_t", tensor.data))
    return start
