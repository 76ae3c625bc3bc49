"""Gemma 4 against golden answers, a float64 forward (tests/numpy_gemma4.py), and itself: speculation changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gguf_writer import write_gguf
from tests.numpy_gemma4 import Array, Gemma4, read_tensors, stored
from tests.test_gemma3 import SAMPLED, generate
from tests.trunk_steps import decode, step
from tsgg import weights as weights_module
from tsgg.errors import ModelFileError
from tsgg.ggml.devices import Device
from tsgg.gguf import read_gguf
from tsgg.model import Model
from tsgg.speculative.protocol import Batch, Want

TRUNKS = ("gemma4-dense", "gemma4-e", "gemma4-moe")
RING = 768  # cells of a window layer's slot
# Logits have a standard deviation of 0.4. A GELU whose input lies between two halves falls either way, and attention without
# a scale carries that to all later rows: the golden answers themselves are up to 2.6e-3 off float64.
TYPICAL, WORST = 2e-3, 8e-3
Weights = dict[str, Array]


def assert_close(ours: Array, expected: Any) -> None:
    errors = np.abs(ours - expected).max(axis=1)
    assert float(np.median(errors)) < TYPICAL
    assert float(errors.max()) < WORST


def load(path: Path, n_ctx: int | None = None) -> Model:
    """One thread, F32 caches."""
    return Model(path, device="cpu", n_ctx=n_ctx, n_threads=1, cache_type_k="f32", cache_type_v="f32")


# -- files, against float64 --------------------------------------------------------------------------------------------


def fused(weights: Weights) -> Weights:
    """Queries, keys and values from one product; every layer has all three, though the last five use queries only."""
    for i in range(10):
        b, heads = f"blk.{i}.", (2, 64 if i in (4, 9) else 32)
        rng = np.random.default_rng(i)
        for name in ("attn_k", "attn_v"):
            unused = np.asarray(rng.standard_normal((heads[0] * heads[1], 64)), np.float32)
            weights.setdefault(f"{b}{name}.weight", unused)
        weights[f"{b}attn_qkv.weight"] = np.concatenate([weights.pop(f"{b}attn_{n}.weight") for n in "qkv"])
    return weights


def without_unused(weights: Weights) -> Weights:
    names = [f"blk.{i}.{name}.weight" for i in range(5, 10) for name in ("attn_k", "attn_v", "attn_k_norm")]
    return {name: values for name, values in weights.items() if name not in names}


def split_experts(weights: Weights) -> Weights:
    for i in range(6):
        gate_up = weights.pop(f"blk.{i}.ffn_gate_up_exps.weight")
        for name, half in zip(("gate", "up"), np.split(gate_up, 2, axis=1), strict=True):
            weights[f"blk.{i}.ffn_{name}_exps.weight"] = half
    return weights


def another_head(weights: Weights) -> Weights:
    return weights | {"output.weight": weights["token_embd.weight"][::-1] * np.float32(0.5)}


def no_scales(weights: Weights) -> Weights:
    return {name: values for name, values in weights.items() if "layer_output_scale" not in name}


def as_is(weights: Weights) -> Weights:
    return weights


# name -> trunk, keys that change, tensors as stored, and those that the reference sees (the same where it is None)
VARIANTS: dict[str, tuple[str, dict[str, object], Callable[[Weights], Weights], Callable[[Weights], Weights] | None]] = {
    "dense": ("gemma4-dense", {}, as_is, None),
    "per-layer embeddings, shared caches": ("gemma4-e", {}, as_is, None),
    "mixture": ("gemma4-moe", {}, as_is, None),
    "without the tensors that sharing layers do not use": ("gemma4-e", {}, without_unused, None),
    "one fused projection": ("gemma4-e", {}, fused, as_is),
    "gate and up of the experts apart": ("gemma4-moe", {}, split_experts, as_is),
    "a head of its own, no soft cap": ("gemma4-dense", {"final_logit_softcapping": 0.0}, another_head, None),
    "a low soft cap, no layer scales": ("gemma4-dense", {"final_logit_softcapping": 1.5}, no_scales, None),
    "other bases, a wider window": ("gemma4-dense", {"attention.sliding_window": 9, "rope.freq_base": 1e3}, as_is, None),
}  # fmt: skip


def write(folder: Path, golden_dir: Path, trunk: str, changes: dict[str, object], weights: Weights) -> Path:
    metadata = dict(read_gguf(golden_dir / "trunks" / f"{trunk}.gguf").metadata)
    metadata |= {f"gemma4.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(folder / "m.gguf", metadata, stored(weights))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_file_agrees_with_float64(name: str, golden_dir: Path, tmp_path: Path) -> None:
    trunk, changes, change, as_read = VARIANTS[name]
    source = golden_dir / "trunks" / f"{trunk}.gguf"
    path = write(tmp_path, golden_dir, trunk, changes, change(read_tensors(source)))
    reference = Gemma4(read_gguf(path).metadata, (as_read or change)(read_tensors(source)))
    tokens = np.random.default_rng(6).integers(20, 300, 40).tolist()
    with load(path) as model:
        assert_close(step(model, model.new_sequence(), tokens), reference.logits(tokens))


@pytest.mark.parametrize("trunk", TRUNKS[:2])  # among so many rows the router of the third picks another expert in some
def test_rows_far_past_the_window_and_the_ring_agree_with_float64(golden_dir: Path, trunk: str) -> None:
    path = golden_dir / "trunks" / f"{trunk}.gguf"
    tokens = np.random.default_rng(9).integers(20, 300, RING + 60).tolist()
    expected = Gemma4(read_gguf(path).metadata, read_tensors(path)).logits(tokens)
    with load(path, n_ctx=1024) as model:
        assert model.memory.arenas["window4"].cells == RING
        sequence = model.new_sequence()
        step(model, sequence, tokens[:512], want=Want("none"))
        assert_close(step(model, sequence, tokens[512:790]), expected[512:790])
        assert_close(decode(model, sequence, tokens[790:]), expected[790:])


def test_a_missing_soft_cap_is_thirty(golden_dir: Path, tmp_path: Path) -> None:
    weights = read_tensors(golden_dir / "trunks" / "gemma4-dense.gguf")
    path = write(tmp_path, golden_dir, "gemma4-dense", {"final_logit_softcapping": None}, weights)
    with load(path) as model:
        assert model.arch.softcap == 30.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window_pattern", 6, "sliding_window_pattern"),
        ("attention.sliding_window_pattern", [True] * 9 + [False], "leaves 5 layers with a cache"),
        ("attention.shared_kv_layers", 10, "shared_kv_layers is 10"),
        ("attention.shared_kv_layers", 9, "leaves 1 layers with a cache"),
        ("attention.head_count_kv", 3, "3 KV heads for 4 heads"),
        ("attention.key_length_swa", None, "key_length_swa"),
        ("rope.dimension_count_swa", None, "dimension_count_swa is 64, expected an even number up to 32"),
        ("embedding_length_per_layer_input", 8, "per_layer_token_embd.weight has shape"),
    ],
)
def test_a_key_that_does_not_fit_is_named(
    key: str, value: object, message: str, golden_dir: Path, tmp_path: Path
) -> None:
    weights = read_tensors(golden_dir / "trunks" / "gemma4-e.gguf")
    path = write(tmp_path, golden_dir, "gemma4-e", {key: value}, weights)
    with pytest.raises(ModelFileError, match=message):
        load(path)


# -- shared caches, tables on the host ---------------------------------------------------------------------------------


def test_a_layer_that_shares_a_cache_has_none_of_its_own(golden_dir: Path) -> None:
    with load(golden_dir / "trunks" / "gemma4-e.gguf") as model:
        assert model.memory.sources == dict(enumerate([0, 1, 2, 3, 4, 3, 3, 3, 3, 4]))
        assert sorted(layer for arena in model.memory.arenas.values() for layer in arena.k) == [0, 1, 2, 3, 4]


def test_a_chunk_of_which_nothing_is_read_ends_with_the_last_cache(golden_dir: Path) -> None:
    with load(golden_dir / "trunks" / "gemma4-e.gguf") as model:
        sequence = model.new_sequence()
        for want in (Want("none"), Want("last"), Want("none", taps=(7,))):
            step(model, sequence, [30, 31, 32], want=want)
        silent, read, tapped = (len(program.graph.nodes()) for program in model._forward._programs.values())
        assert silent < 0.55 * read < tapped < read


def test_tables_that_the_device_cannot_gather_from_are_read_from_the_file(
    golden_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(40, 60))
    path = golden_dir / "trunks" / "gemma4-e.gguf"
    with load(path) as model:
        expected = step(model, model.new_sequence(), tokens)
    monkeypatch.setattr(Device, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(weights_module, "_gathers", lambda info, device: False)
    with load(path) as model:
        tables = [model.weights[f"{name}.weight"] for name in ("token_embd", "per_layer_token_embd")]
        assert all(model.weights.host_table(table) for table in tables)
        sequence = model.new_sequence()
        assert_close(step(model, sequence, tokens), expected)
        sequence.truncate(3)
        assert_close(decode(model, sequence, tokens[3:8]), expected[3:8])


def test_a_row_that_is_read_twice_is_capped_once(golden_dir: Path, tmp_path: Path) -> None:
    weights = read_tensors(golden_dir / "trunks" / "gemma4-dense.gguf")
    path = write(tmp_path, golden_dir, "gemma4-dense", {"final_logit_softcapping": 0.5}, weights)
    reference = Gemma4(read_gguf(path).metadata, weights)
    tokens = [30, 31, 32]
    with load(path) as model:
        sequence = model.new_sequence()
        for want in (Want("all"), Want("last")):
            rows = model.forward(Batch((sequence,), np.array([tokens], np.int32), want))
            first, again = (rows.logits(0, -1).copy() for _ in range(2))
            assert first.tobytes() == again.tobytes() and np.abs(first).max() < 0.5
            assert_close(first[None], reference.logits(tokens)[-1:])


# -- speculation changes nothing ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=TRUNKS)
def trunk(golden_dir: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(golden_dir / "trunks" / f"{request.param}.gguf", device="cpu", n_ctx=1700, n_threads=1) as model:
        yield model


@pytest.mark.parametrize("how", SAMPLED)
def test_ngram_speculation_gives_the_plain_stream_past_the_window(trunk: Model, how: str) -> None:
    prompt = np.random.default_rng(8).integers(20, 300, 660).tolist()
    bias = dict.fromkeys((31, 32, 33, 34), 3.0)  # one of four tokens: there is something to draft
    results = []
    for mode in ("off", "ngram"):  # both from the first token on: a row of a prompt's chunk is not a decoded row
        sequence = trunk.new_sequence()
        results.append(generate(trunk, sequence, prompt, mode, how, max_tokens=150, logit_bias=bias))
        trunk.release(sequence)
    plain, drafted = results
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.speculation.accepted < drafted.speculation.drafted
