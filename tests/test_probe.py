"""The row-exactness probe: it claims what holds, sees what does not, and leaves the model as it found it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import windowed
from tests.tiny_models import TinyLlama, write_tiny
from tests.trunk_steps import PLAIN, decode, same_bits, step
from tsgg.ggml.library import cpu_features
from tsgg.model import Model
from tsgg.probe import ROWS, probe_rows
from tsgg.settings import settings
from tsgg.speculative.protocol import Batch

needs_sgemm = pytest.mark.skipif("LLAMAFILE" not in cpu_features(), reason="this build of ggml has no sgemm kernels")


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_exactness_is_claimed_for_every_type_and_cache_of_the_file(tmp_path: Path, cache: str) -> None:
    shape = TinyLlama(layers=3, experts=4, weights="q4_0", table="q8_0", arch=windowed.TinyWindow.name)
    with Model(write_tiny(tmp_path / "m.gguf", shape), cache_type_k=cache, cache_type_v=cache) as model:
        found = probe_rows(model)
        path = "soft" if cache == "f16" else "flash"
    assert found.claimed and found.rows == dict.fromkeys(ROWS, True)
    assert set(found.weights) == {"q4_0 repacked", "q4_0 repacked experts", "f32"}
    assert set(found.attention) == {f"window20 {cache}/{cache} {path}", f"kv {cache}/{cache} {path}"}
    parts = [*found.weights.values(), *found.attention.values(), found.forward]
    assert all(part.difference == 0 and part.size > 0.05 for part in parts)
    assert "\n" not in str(found) and "f32" in str(found)


def test_a_tied_head_is_probed_too(tmp_path: Path) -> None:
    shape = TinyLlama(weights="f16", table="bf16", tied=True)
    with Model(write_tiny(tmp_path / "m.gguf", shape)) as model:
        assert set(probe_rows(model).weights) == {"f16", "bf16"}


@needs_sgemm
@pytest.mark.parametrize("weights", ["f32", "f16", "bf16"])
def test_float_weights_whose_lone_rows_take_another_kernel_are_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr("tsgg.forward.settings", replace(settings, pair_rows=False))
    with Model(write_tiny(tmp_path / "m.gguf", TinyLlama(weights=weights))) as model:
        found = probe_rows(model)
    assert not found.claimed and not found.rows[2]
    assert found.weights[weights].wrong == ROWS and 0 < found.weights[weights].difference < 1e-4
    assert all(part.exact for part in found.attention.values())
    assert "NOT" in str(found) and "\n" not in str(found)


def test_flash_attention_on_a_half_cache_is_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsgg.memory.kv.settings", replace(settings, attention="flash"))
    with Model(write_tiny(tmp_path / "m.gguf"), n_threads=2) as model:
        found = probe_rows(model)
    (name,) = found.attention
    assert name == "kv f16/f16 flash" and not found.attention[name].exact and not found.claimed
    assert found.weights["f32"].exact


def test_the_probe_leaves_sequences_slots_and_rows_as_they_are(tmp_path: Path) -> None:
    with Model(write_tiny(tmp_path / "m.gguf")) as model:  # its only slot is taken
        sequence = model.new_sequence()
        tokens = list(range(40))
        step(model, sequence, tokens)
        rows = model.forward(Batch((sequence,), np.array([[1, 2]], np.int32), PLAIN))
        before = rows.logits(0, 1).copy()
        probe_rows(model)
        assert same_bits(rows.logits(0, 1), before)
        sequence.commit(2)
        after = decode(model, sequence, [3])
        assert sequence.tokens == [*tokens, 1, 2, 3]
        sequence.truncate(0)
        step(model, sequence, [*tokens, 1, 2])
        assert same_bits(decode(model, sequence, [3]), after)


def test_a_context_too_short_for_the_deep_rows_is_probed_as_far_as_it_goes(tmp_path: Path) -> None:
    with Model(write_tiny(tmp_path / "m.gguf"), n_ctx=4) as model:
        assert probe_rows(model).claimed


def test_a_real_model_is_exact(smollm2_path: Path) -> None:
    with Model(smollm2_path, n_ctx=1024) as model:
        found = probe_rows(model)
    assert found.claimed, str(found)
    assert set(found.weights) in ({"q4_1 tiled", "q8_0"}, {"q4_1", "q8_0"})  # by what the processor has
