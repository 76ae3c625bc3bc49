"""Products with matrices in tiles: beside float64 over the same rounded activations, and the same bits however they are cut."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from tests.tiny_models import TinyLlama, write_tiny
from tests.trunk_steps import step
from tsgg import tiles, weights
from tsgg.errors import UsageError
from tsgg.ggml import buffers
from tsgg.ggml.buffers import F32, TensorSet
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Backend, pick_device
from tsgg.ggml.graph import Graph
from tsgg.ggml.library import cpu_features, lib
from tsgg.gguf import TensorInfo
from tsgg.model import Model

Array = NDArray[np.float32]
BLOCK = 32
Q4_1 = lib.GGML_TYPE_Q4_1


def info(columns: int, rows: int, kind: int = Q4_1) -> TensorInfo:
    size = columns // BLOCK * 20 * rows
    return TensorInfo(name="w", type=kind, shape=(columns, rows), offset=0, nbytes=size, file=0)


needs_tiles = pytest.mark.skipif("AVX2" not in cpu_features(), reason="there are tiles for AVX2 only")


def matrix(columns: int, rows: int, seed: int = 1) -> bytes:
    """Q4_1 as files have it, with scales and minima of both signs."""
    rng = np.random.default_rng(seed)
    blocks = np.zeros((rows, columns // BLOCK, 20), np.uint8)
    blocks[..., :4] = rng.uniform(-0.1, 0.1, (rows, columns // BLOCK, 2)).astype(np.float16).view(np.uint8)
    blocks[..., 4:] = rng.integers(0, 256, (rows, columns // BLOCK, 16), np.uint8)
    return blocks.tobytes()


def product(raw: bytes, columns: int, x: Array, threads: int = 2) -> Array:
    """x [n, columns] times the matrix, by the route that a model takes: [n, rows]."""
    rows = len(raw) // (columns // BLOCK * 20)
    device = pick_device("cpu")
    held, g = TensorSet(1), GraphBuilder(16)
    weight = held.new(Q4_1, (columns, rows))
    held.allocate(device.buffer_type, weights=True)
    buffers.write(weight, tiles.regroup(info(columns, rows), memoryview(raw)))
    result = g.output(g.mul_tiles(weight, g.input("x", F32, columns, len(x))))
    with closing(Graph(g, Backend(device, n_threads=threads))) as graph:
        graph.inputs["x"].reshape(x.shape)[:] = x
        graph.replay()
        found = buffers.read(result).reshape(len(x), rows).copy()
    held.close()
    return found


def reference(raw: bytes, columns: int, x: Array) -> Any:
    """The same in float64, with the activations rounded to 8 bits per block of 32."""
    w = dequantize(np.frombuffer(raw, np.uint8).reshape(-1, columns // BLOCK * 20), GGMLQuantizationType.Q4_1)
    blocks = x.reshape(len(x), -1, BLOCK)
    d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
    rounded = np.rint(blocks * inverse) * d.astype(np.float64)
    return rounded.reshape(x.shape) @ w.astype(np.float64).T


@needs_tiles
@pytest.mark.parametrize(("columns", "rows"), [(32, 8), (64, 24), (576, 200), (4096, 16), (65536, 8)])
@pytest.mark.parametrize("count", [1, 3, 70])
def test_a_product_agrees_with_float64(columns: int, rows: int, count: int) -> None:
    raw, x = matrix(columns, rows), np.random.default_rng(2).standard_normal((count, columns), np.float32)
    exact = reference(raw, columns, x)
    assert np.abs(product(raw, columns, x) - exact).max() < 2e-6 * np.sqrt(columns) * np.abs(exact).max()


@needs_tiles
def test_a_row_has_the_same_bits_whatever_is_computed_beside_it() -> None:
    columns = 576
    raw, x = matrix(columns, 88), np.random.default_rng(3).standard_normal((133, columns), np.float32)
    alone = np.concatenate([product(raw, columns, row[None], threads=1) for row in x])
    for count in (*range(2, 10), 64, 65, 133):
        for threads in (1, 2, 3):
            assert product(raw, columns, x[:count], threads).tobytes() == alone[:count].tobytes(), (count, threads)


@needs_tiles
def test_the_largest_sums_do_not_overflow() -> None:
    """All weights 15 and all activations alike: every partial sum is as large as it can be."""
    columns = 128
    blocks = np.full((8, columns // BLOCK, 20), 0xFF, np.uint8)
    blocks[..., :4] = np.array([1.0, 0.5], np.float16).view(np.uint8)
    for sign in (1, -1):
        x = np.full((5, columns), sign * 3.0, np.float32)
        assert np.allclose(product(blocks.tobytes(), columns, x), sign * 3.0 * 15.5 * columns, rtol=1e-6)


@needs_tiles
def test_zeros_give_zeros_and_tiny_numbers_are_not_lost() -> None:
    columns = 64
    raw, x = matrix(columns, 8), np.random.default_rng(4).standard_normal((2, columns), np.float32)
    x[0] = 0
    assert not product(raw, columns, x)[0].any()
    assert np.allclose(product(raw, columns, x * np.float32(2**-60)), product(raw, columns, x) * 2.0**-60, rtol=1e-5)


@needs_tiles
def test_only_what_can_be_regrouped_is() -> None:
    assert tiles.fits(info(64, 16))
    assert not tiles.fits(info(64, 12))
    assert not tiles.fits(info(1 << 17, 8))
    assert not tiles.fits(info(64, 16, lib.GGML_TYPE_Q8_0))
    assert not tiles.fits(replace(info(64, 16), shape=(64, 16, 2)))


@needs_tiles
def test_a_model_in_tiles_gives_the_logits_of_one_that_is_as_the_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyLlama(weights="q4_1"))

    def logits() -> tuple[Any, set[bool]]:
        with Model(path, n_ctx=64, n_threads=2) as model:
            layouts = {model.weights.tiled(model.weights["blk.0.attn_output.weight"])}
            return step(model, model.new_sequence(), list(range(3, 33))), layouts

    in_tiles, how = logits()
    assert how == {True}
    monkeypatch.setattr(weights, "settings", replace(weights.settings, repack=False))
    as_in_the_file, how = logits()
    assert how == {False}
    # ggml rounds the activations' scales to 16 bits; the weights of this model are noise, which makes much of it.
    assert np.sqrt(np.mean((in_tiles - as_in_the_file) ** 2)) < 0.05 * np.sqrt(np.mean(as_in_the_file**2))


def test_a_product_with_tiles_refuses_what_is_no_matrix() -> None:
    g = GraphBuilder(16)
    weight, x = g.input("w", F32, 32, 8), g.input("x", F32, 32, 2, 2)
    with closing(g), pytest.raises(UsageError, match="plain matrix"):
        g.mul_tiles(weight, x)
