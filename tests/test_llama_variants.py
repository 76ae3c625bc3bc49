"""What a llama file may have besides the plain layout, against float64 numpy: scaled ropes, biases, fused projections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import gguf_writer as w
from tests.numpy_llama import Rope, Weights, head, residuals, values
from tests.tiny_models import TinyLlama, metadata, tensors
from tests.trunk_steps import Array, step
from tsgg.errors import UnsupportedError
from tsgg.model import Model

SHAPE = TinyLlama(layers=2, head_dim=64)
TOKENS: list[int] = np.random.default_rng(2).integers(0, 264, 60).tolist()


def check(path: Path, keys: dict[str, object], weights: list[w.Tensor], rope: Rope | None = None) -> None:
    """Logits of a file with those keys and tensors against the reference's for the same numbers."""
    reference = values(weights)
    _, expected = head(reference, residuals(reference, SHAPE, TOKENS, rope=rope)[-1])
    found = logits(path, keys, weights)
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())


def logits(path: Path, keys: dict[str, object], weights: list[w.Tensor]) -> Array:
    w.write_gguf(path, metadata(SHAPE) | keys, weights)
    with Model(path, n_threads=1, cache_type_k="f32", cache_type_v="f32") as model:
        return step(model, model.new_sequence(), TOKENS)


ROPES: dict[str, tuple[dict[str, object], Rope]] = {
    "few channels": ({"rope.dimension_count": 32}, Rope(32)),
    "another base": ({"rope.freq_base": 500000.0}, Rope(64, base=500000.0)),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, Rope(64, factor=4.0)),
    "linear by the old key": ({"rope.scale_linear": 2.0}, Rope(64, factor=2.0)),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, Rope(64)),
    "yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 512},
        Rope(64, factor=8.0, yarn=512),
    ),
    "yarn of the trained context, with a factor": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.25},
        Rope(64, factor=2.0, yarn=1024, attention=1.25),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_the_rope_that_the_file_asks_for_is_computed(tmp_path: Path, name: str) -> None:
    keys, rope = ROPES[name]
    check(tmp_path / "m.gguf", {f"llama.{key}": value for key, value in keys.items()}, list(tensors(SHAPE)), rope)


def test_frequency_divisors_of_the_file_are_used(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 32)
    weights = [*tensors(SHAPE), w.f32("rope_freqs.weight", divisors)]
    divisors = np.float32(divisors).astype(np.float64)
    check(tmp_path / "m.gguf", {}, weights, Rope(64, divisors=divisors))


def test_biases_are_added_where_the_file_has_them(tmp_path: Path) -> None:
    weights = list(tensors(SHAPE))
    rng = np.random.default_rng(3)
    for name, ne, *_ in list(weights):
        if "norm" not in name and name != "token_embd.weight":
            weights.append(w.f32(name.replace(".weight", ".bias"), rng.standard_normal(ne[1])))
    check(tmp_path / "m.gguf", {}, weights)


def test_a_fused_projection_gives_what_three_give(tmp_path: Path) -> None:
    plain = list(tensors(SHAPE))
    parts: Weights = values(plain)
    fused = [tensor for tensor in plain if not any(f"attn_{n}." in tensor[0] for n in "qkv")]
    for layer in range(SHAPE.layers):
        rows = np.concatenate([parts[f"blk.{layer}.attn_{n}.weight"] for n in "qkv"])
        fused.append(w.f32(f"blk.{layer}.attn_qkv.weight", rows))
    found = logits(tmp_path / "fused.gguf", {}, fused)
    np.testing.assert_allclose(found, logits(tmp_path / "plain.gguf", {}, plain), atol=1e-4 * found.std())


def test_values_may_be_narrower_than_keys(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    weights = []
    for tensor in tensors(SHAPE):
        name, ne = tensor[:2]
        if name.endswith("attn_v.weight"):
            tensor = w.f32(name, rng.standard_normal((SHAPE.kv_heads * 32, ne[0])) * 0.1)
        elif name.endswith("attn_output.weight"):
            tensor = w.f32(name, rng.standard_normal((ne[1], SHAPE.heads * 32)) * 0.1)
        weights.append(tensor)
    check(tmp_path / "m.gguf", {"llama.attention.value_length": 32}, weights)


def test_feed_forward_widths_may_differ_by_layer(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    weights = []
    for tensor in tensors(SHAPE):
        name, ne = tensor[:2]
        if name.startswith("blk.1.ffn_") and "norm" not in name:
            size = (64, ne[0]) if "down" not in name else (ne[1], 64)
            tensor = w.f32(name, rng.standard_normal(size) * 0.1)
        weights.append(tensor)
    check(tmp_path / "m.gguf", {"llama.feed_forward_length": np.array([96, 64], np.int32)}, weights)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rope_scaling_that_is_not_implemented_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{kind}.*implemented"):
        logits(tmp_path / "m.gguf", {"llama.rope.scaling.type": kind}, list(tensors(SHAPE)))
