"""Matrices that are multiplied by the same rows are rows of one where they are copied anyway: the same bits, fewer products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import gguf_writer as w
from tests.tiny_models import TinyLlama, encode, metadata, tensors, write_tiny
from tests.trunk_steps import PLAIN, VERIFY, Array, same_bits, step
from tsgg import weights
from tsgg.model import Model

QKV, GATE_UP = "blk.0.attn_qkv.weight", "blk.0.ffn_gate_up.weight"
TOKENS: list[int] = np.random.default_rng(3).integers(0, 264, 30).tolist()


def rows(path: Path) -> Array:
    """Logits of a prefill, a verify and a plain step."""
    with Model(path, n_ctx=64, n_threads=1) as model:
        sequence = model.new_sequence()
        parts = (
            step(model, sequence, TOKENS[start:end], want=want)
            for start, end, want in ((0, 20, PLAIN), (20, 29, VERIFY), (29, 30, PLAIN))
        )
        return np.concatenate(list(parts))


def names(path: Path) -> set[str]:
    """Of the joined matrices and their parts, those that a loaded model has."""
    known = (QKV, GATE_UP, "blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.0.ffn_up.weight")
    with Model(path, n_ctx=64, n_threads=1) as model:
        return {name for name in known if model.weights.get(name) is not None}


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "huge_pages", lambda: True)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_1", "q4_0"])  # q4_0 is repacked
@pytest.mark.parametrize("bias", [False, True])
def test_joined_matrices_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bias: bool
) -> None:
    shape = TinyLlama(weights=kind)
    content = list(tensors(shape))
    if bias:
        sizes = {"attn_q": 128, "attn_k": 64, "attn_v": 64, "ffn_gate": shape.width, "ffn_up": shape.width}
        rng = np.random.default_rng(4)
        content += [w.f32(f"blk.1.{name}.bias", rng.standard_normal(size)) for name, size in sizes.items()]
    path = w.write_gguf(tmp_path / "m.gguf", metadata(shape), content)
    assert names(path) == {QKV, GATE_UP}
    joined = rows(path)
    monkeypatch.setattr(weights, "_join", list)
    assert QKV not in names(path)
    assert same_bits(rows(path), joined)


def test_matrices_of_different_types_stay_alone(tmp_path: Path) -> None:
    shape = TinyLlama(weights="q8_0")
    content = {tensor[0]: tensor for tensor in tensors(shape)}
    odd = np.random.default_rng(5).standard_normal((64, 64))
    content["blk.0.attn_v.weight"] = encode("blk.0.attn_v.weight", odd, "q4_1")
    path = w.write_gguf(tmp_path / "m.gguf", metadata(shape), list(content.values()))
    assert names(path) == {"blk.0.attn_q.weight", "blk.0.attn_v.weight", GATE_UP}


def test_matrices_that_stay_in_the_mapping_stay_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "huge_pages", lambda: False)
    path = write_tiny(tmp_path / "m.gguf", TinyLlama(weights="q8_0"))
    assert names(path) == {"blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.0.ffn_up.weight"}
