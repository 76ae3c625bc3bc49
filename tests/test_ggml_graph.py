"""Graphs that are built once and replayed, and the C helpers that rewrite a step's inputs, against numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tsgg.errors import UnsupportedError
from tsgg.ggml import buffers
from tsgg.ggml.buffers import BF16, F16, F32, I32, I64, TensorSet
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Backend, pick_device
from tsgg.ggml.graph import Graph
from tsgg.ggml.library import ffi, lib


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend(pick_device("cpu"), n_threads=1)
    yield backend
    backend.close()


# -- replay ------------------------------------------------------------------------------------------------------------


def test_a_replay_computes_with_the_inputs_written_last(backend: Backend) -> None:
    g = GraphBuilder(32)
    x, y = g.input("x", F32, 8, 2), g.input("y", F32, 8, 2)
    result = g.output(g.add(g.scale(g.scale(x, 2.0), 2.0), y))
    graph = Graph(g, backend)
    rng = np.random.default_rng(0)
    for _ in range(3):
        a, b = rng.standard_normal((2, 1, 1, 2, 8), np.float32)
        graph.inputs["x"][:], graph.inputs["y"][:] = a, b
        graph.replay()
        np.testing.assert_allclose(buffers.read(result), 4 * a + b, rtol=1e-6)
    graph.close()
    graph.close()


def test_an_input_survives_a_replay_that_does_not_rewrite_it(backend: Backend) -> None:
    g = GraphBuilder(32)
    result = g.output(g.scale(g.scale(g.input("x", F32, 8), 2.0), 2.0))
    graph = Graph(g, backend)
    graph.inputs["x"][:] = 1.0
    for _ in range(3):
        graph.replay()
        assert np.all(buffers.read(result) == 4.0)
    graph.close()


def test_an_input_asked_for_twice_is_one_tensor(backend: Backend) -> None:
    g = GraphBuilder(32)
    first = g.input("x", F32, 4)
    assert g.input("x", F32, 4) == first
    g.close()


def test_an_input_that_no_op_reads_can_be_filled_all_the_same(backend: Backend) -> None:
    g = GraphBuilder(32)
    g.input("idle", I64, 5)
    g.output(g.scale(g.input("x", F32, 4), 1.0))
    graph = Graph(g, backend)
    graph.inputs["idle"][:] = 3
    graph.inputs["x"][:] = 3
    graph.replay()
    graph.close()


def test_writes_into_a_static_tensor_outlive_the_graph(backend: Backend) -> None:
    tensors = TensorSet(1)
    table = tensors.new(F16, (4, 6), "table")
    tensors.allocate(backend.buffer_type)
    g = GraphBuilder(32)
    g.expand(g.set_rows(table, g.input("rows", F32, 4, 2), g.input("ids", I64, 2)))
    graph = Graph(g, backend)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    graph.inputs["rows"][0, 0], graph.inputs["ids"][0, 0, 0] = rows, (5, 2)
    graph.replay()
    graph.close()
    expected = np.zeros((6, 4), np.float16)
    expected[[5, 2]] = rows
    assert np.array_equal(buffers.read(table, np.float16)[0, 0], expected)
    tensors.close()


def test_an_op_that_the_device_does_not_run_is_refused_by_name(backend: Backend) -> None:
    g = GraphBuilder(32)
    g.output(g.mul_mat(g.input("a", F32, 64, 8), g.input("b", F16, 64, 2)))
    with pytest.raises(UnsupportedError, match="device CPU cannot run MUL_MAT"):
        Graph(g, backend)


def test_a_graph_reports_its_bytes(backend: Backend) -> None:
    g = GraphBuilder(32)
    g.output(g.scale(g.input("x", F32, 1 << 16), 2.0))
    graph = Graph(g, backend)
    assert graph.nbytes > 2 * (1 << 16) * 4
    graph.close()


def test_new_buffers_are_cleared_and_their_tensors_can_be_viewed() -> None:
    tensors = TensorSet(2)
    one, two = tensors.new(F32, (3, 2)), tensors.new(BF16, (1 << 16,))
    size = tensors.allocate(pick_device("cpu").buffer_type)
    assert size >= 6 * 4 + 2 * (1 << 16)
    view = buffers.view(one)
    assert view is not None and view.shape == (1, 1, 2, 3) and not view.any()
    assert not buffers.read(two, np.uint16).any()
    buffers.write(one, np.arange(6, dtype=np.float32))
    assert view[0, 0, 1, 2] == 5
    tensors.close()


# -- helpers -----------------------------------------------------------------------------------------------------------


def brute_force(cells: int, capacity: int, rows: int, first: int, window: int) -> NDArray[np.bool_]:
    """[rows, cells]: what each row sees. Cell c holds the latest position up to the step's last row that falls on it."""
    seen = np.zeros((rows, cells), bool)
    for cell in range(cells):
        held = [position for position in range(first + rows) if position % capacity == cell]
        for row in range(rows):
            if held:
                distance = first + row - held[-1]
                seen[row, cell] = distance >= 0 and (window == 0 or distance < window)
    return seen


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, list[int], int]:
    """(cells, capacity, rows, first position per sequence, window) of a step that the memory can be asked for."""
    rows = draw(st.integers(1, 12))
    window = draw(st.sampled_from([0, 1, 3, 16]))
    slack = draw(st.integers(0, 9))
    capacity = draw(st.integers(rows, 60)) if window == 0 else window + rows + slack
    highest = capacity - rows if window == 0 else 4 * capacity  # only a ring wraps
    first = draw(st.lists(st.integers(0, highest), min_size=1, max_size=3))
    needed = min(capacity, max(first) + rows)
    return draw(st.integers(needed, capacity)), capacity, rows, first, window


@given(steps())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_masks_show_exactly_the_positions_of_the_window(step: tuple[int, int, int, list[int], int]) -> None:
    cells, capacity, rows, first, window = step
    expected = np.stack([brute_force(cells, capacity, rows, position, window) for position in first])
    starts = ffi.new("int32_t[]", first)
    wide = np.full((len(first), rows, cells), np.nan, np.float32)
    pointer = ffi.cast("float *", ffi.from_buffer(wide))
    lib.tsgg_fill_mask_f32(pointer, cells, capacity, rows, len(first), starts, window)
    assert np.array_equal(wide, np.where(expected, np.float32(0), np.float32(-np.inf)))
    half = np.full((len(first), rows, cells), np.nan, np.float16)
    pointer = ffi.cast("uint16_t *", ffi.from_buffer(half))
    lib.tsgg_fill_mask_f16(pointer, cells, capacity, rows, len(first), starts, window)
    assert np.array_equal(half, wide.astype(np.float16))
    assert expected[:, np.arange(rows), :].any(2).all(), "a row that sees nothing would be NaN"


@given(steps(), st.integers(1, 5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_positions_cells_and_elements_follow_from_the_first_position(
    step: tuple[int, int, int, list[int], int], width: int
) -> None:
    _, capacity, rows, first, _ = step
    starts, count = ffi.new("int32_t[]", first), len(first)
    expected = np.add.outer(first, np.arange(rows))
    positions = np.empty((count, rows), np.int32)
    lib.tsgg_fill_positions(ffi.cast("int32_t *", ffi.from_buffer(positions)), rows, count, starts)
    assert np.array_equal(positions, expected)
    cells = np.empty((count, rows), np.int64)
    lib.tsgg_fill_cells(ffi.cast("int64_t *", ffi.from_buffer(cells)), capacity, rows, count, starts)
    assert np.array_equal(cells, expected % capacity)
    elements = np.empty((count, rows, width), np.int64)
    lib.tsgg_fill_elements(ffi.cast("int64_t *", ffi.from_buffer(elements)), width, capacity, rows, count, starts)
    assert np.array_equal(elements, (expected % capacity)[..., None] + np.arange(width) * capacity)


def test_a_types_rows_are_converted_like_numpy_converts_them(backend: Backend) -> None:
    g = GraphBuilder(32)
    table = g.input("table", F16, 4, 3)
    result = g.output(g.get_rows(table, g.input("ids", I32, 2)))
    graph = Graph(g, backend)
    values = np.arange(12, dtype=np.float16).reshape(3, 4)
    graph.inputs["table"][0, 0] = values.view(np.uint16)  # F16 inputs are written as bits
    graph.inputs["ids"][0, 0, 0] = (2, 0)
    graph.replay()
    assert np.array_equal(buffers.read(result)[0, 0], values[[2, 0]].astype(np.float32))
    graph.close()
