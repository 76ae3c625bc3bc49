"""Tiles: matrices regrouped at loading for products of our own, where ggml's take several times as long.

ggml multiplies Q4_1 weights by one row at a time and unpacks them for each. In tiles of eight rows (native/tiles.h) they are
unpacked once for four. Bytes stay the same, only their order is another; every row stays exact.
"""

from __future__ import annotations

from tsgg.ggml.library import cpu_features, ffi, lib
from tsgg.gguf import TensorInfo


def fits(info: TensorInfo) -> bool:
    """Whether products with the matrix are faster from tiles here, and possible."""
    return (
        info.type == lib.GGML_TYPE_Q4_1
        and len(info.shape) == 2
        and info.shape[1] % lib.TSGG_TILE_ROWS == 0
        and info.shape[0] <= lib.TSGG_TILE_COLUMNS
        and "AVX2" in cpu_features()  # of the build that was loaded: TS_CPU may ask for less than the processor has
        and lib.tsgg_tiles_run()
    )


def regroup(info: TensorInfo, matrix: memoryview) -> memoryview:
    """The tiles of a matrix that `fits`, from the bytes that the file has."""
    assert len(matrix) == info.nbytes
    result = memoryview(bytearray(info.nbytes))
    lib.tsgg_tile_q4_1(ffi.from_buffer(matrix), ffi.from_buffer(result), info.shape[0], info.shape[1])
    return result
