"""Loading a model: the memory plan, what is refused at the door, placements that give the same answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import gguf_writer as w
from tests import windowed
from tests.tiny_models import TinyLlama, metadata, tensors, write_tiny
from tests.trunk_steps import Array, decode, step
from tsgg.errors import ModelFileError, OutOfMemoryError, TsggError, UnsupportedError, UsageError
from tsgg.ggml.devices import pick_device
from tsgg.model import Model
from tsgg.models import ARCHITECTURES
from tsgg.settings import settings

TOKENS = [7, 100, 3, 250, 41, 41, 8]


def logits(path: Path, tokens: list[int] = TOKENS) -> Array:
    with Model(path, n_threads=1) as model:
        return step(model, model.new_sequence(), tokens)


def changed(path: Path, change: Callable[[dict[str, object], dict[str, w.Tensor]], None]) -> Path:
    """A tiny file whose metadata and tensors (by name) were changed in place."""
    shape = TinyLlama()
    keys, weights = metadata(shape), {tensor[0]: tensor for tensor in tensors(shape)}
    change(keys, weights)
    return w.write_gguf(path, keys, list(weights.values()))


# -- the memory plan ---------------------------------------------------------------------------------------------------


def test_a_context_that_does_not_fit_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    allocations: list[object] = []
    monkeypatch.setattr("tsgg.ggml.buffers.TensorSet.allocate", lambda *args, **keywords: allocations.append(args))
    with pytest.raises(
        OutOfMemoryError, match=r"weights .*cache .*needs .* of .* free.*smaller n_ctx \(now 16777216\)"
    ):
        Model(path, n_ctx=1 << 24, n_seq=256)
    assert not allocations


def test_the_default_context_is_the_trained_one_up_to_8192_and_shrinks_until_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_tiny(tmp_path / "small.gguf", TinyLlama(context=700))
    large = write_tiny(tmp_path / "large.gguf", TinyLlama(context=1 << 20))
    with Model(small) as model:
        assert model.n_ctx == 700
    with Model(large) as model:
        assert model.n_ctx == 8192
        needed = model.plan.needed
    with Model(large, n_ctx=9000) as model:
        assert model.n_ctx == 9000  # an explicit number may pass both
    with Model(small, n_ctx=1500) as model:
        assert model.n_ctx == 1500
    monkeypatch.setattr("tsgg.ggml.devices.platform.available_memory", lambda: needed - 1)
    with Model(large) as model:
        assert model.n_ctx == 4096 and model.plan.needed < needed
    with pytest.raises(OutOfMemoryError, match="now 8192"):
        Model(large, n_ctx=8192)
    monkeypatch.setattr("tsgg.ggml.devices.platform.available_memory", lambda: 100_000)
    with pytest.raises(OutOfMemoryError, match="now 256"):
        Model(large)


def test_the_plan_counts_what_is_allocated(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyLlama(weights="q4_0", layers=3, arch=windowed.TinyWindow.name))
    for options in ({}, {"n_seq": 3}, {"cache_type_k": "q8_0", "cache_type_v": "f32"}):
        with Model(path, n_ctx=2000, **options) as model:
            assert model.plan.cache == model.memory.nbytes
            total = sum(info.nbytes for info in model.file.tensors.values())
            assert model.plan.mapped + model.plan.copied == total and model.plan.copied > 0
            step(model, model.new_sequence(), list(range(200)))
            assert model.graph_bytes() < 4 * model.plan.scratch


# -- refused at the door -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_ctx": 0}, "n_ctx is 0, expected a whole number"),
        ({"n_ctx": -5}, "n_ctx is -5"),
        ({"n_ctx": (1 << 24) + 1}, "n_ctx is 16777217"),
        ({"n_seq": 0}, "n_seq is 0, expected a whole number"),
        ({"n_seq": 257}, "n_seq is 257"),
        ({"cache_type_k": "f64"}, "cache_type_k is 'f64', expected one of f32, f16, bf16, q8_0"),
        ({"cache_type_v": "F16"}, "cache_type_v is 'F16'"),
        ({"device": "CUDA7"}, "no device 'CUDA7': this build has .*CPU"),
        ({"n_threads": 0}, "n_threads is 0, expected 1 to 512"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Model(write_tiny(tmp_path / "m.gguf"), **options)


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'gpt9' is not implemented; known are .*llama"):
        Model(write_tiny(tmp_path / "m.gguf", TinyLlama(arch="gpt9")))


def test_a_vocabulary_only_file_is_refused_as_a_model(tmp_path: Path) -> None:
    path = w.write_gguf(tmp_path / "m.gguf", metadata(TinyLlama()))
    with pytest.raises(ModelFileError, match=r"no two-dimensional token_embd.weight"):
        Model(path)


@pytest.mark.parametrize("name", sorted(tensor[0] for tensor in tensors(TinyLlama(layers=1))))
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = changed(tmp_path / "m.gguf", lambda keys, weights: weights.pop(name) and None)
    if name == "output.weight":  # then the embeddings are the head too
        assert np.isfinite(logits(path)).all()
        return
    with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
        Model(path)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("blk.1.attn_q.weight", (96, 64), "has shape 64 x 96, expected 64 x 128"),
        ("blk.0.ffn_down.weight", (64, 64), "has shape 64 x 64, expected 96 x 64"),
        ("output_norm.weight", (65,), "has shape 65, expected 64"),
        ("output.weight", (264, 2, 64), "has shape 64 x 2 x 264, expected 64 x 264"),
        ("output.weight", (10, 64), "output.weight has shape 64 x 10, expected 64 x 264"),
        ("output.bias", (7,), "output.bias has shape 7, expected 264"),
        ("token_embd.weight", (264, 32), "token_embd.weight has shape 32 x 264, expected 64 x"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...], words: str
) -> None:
    path = changed(tmp_path / "m.gguf", lambda keys, weights: weights.update({name: w.f32(name, np.ones(shape))}))
    with pytest.raises(ModelFileError, match=words):
        Model(path)


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "output_norm.weight"])
def test_a_norm_that_is_not_f32_is_refused(tmp_path: Path, name: str) -> None:
    half = name, (64,), 1, np.ones(64, np.float16).tobytes()
    path = changed(tmp_path / "m.gguf", lambda keys, weights: weights.update({name: half}))
    with pytest.raises(UnsupportedError, match="is f16, norms and biases must be F32"):
        Model(path)


def test_a_matrix_of_integers_is_refused(tmp_path: Path) -> None:
    integers = "output.weight", (64, 264), 26, bytes(4 * 64 * 264)
    path = changed(tmp_path / "m.gguf", lambda keys, weights: weights.update({"output.weight": integers}))
    with pytest.raises(UnsupportedError, match=r"output\.weight is i32, which cannot be computed with"):
        Model(path)


def test_a_quantized_cache_needs_heads_of_whole_blocks(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyLlama(head_dim=16))
    with pytest.raises(UsageError, match="cache_type_k needs heads of a multiple of 32 channels, this model has 16"):
        Model(path, cache_type_k="q8_0")


# -- placements --------------------------------------------------------------------------------------------------------


def test_an_unaligned_tensor_is_copied_and_gives_the_same_answers(tmp_path: Path) -> None:
    shape = TinyLlama(weights="f16")
    aligned = write_tiny(tmp_path / "aligned.gguf", shape)
    packed = list(tensors(shape))
    packed.insert(0, w.f32("unused", [1.0, 2.0, 3.0]))  # moves what follows by 12 bytes
    path = w.write_gguf(tmp_path / "packed.gguf", {**metadata(shape), "general.alignment": 4}, packed)
    with Model(path) as model:
        assert model.plan.copied > 0
        assert any(info.offset % 32 for info in model.file.tensors.values())
    assert np.array_equal(logits(aligned), logits(path))


def test_weights_that_are_read_instead_of_mapped_give_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyLlama(experts=4))
    answers = []
    for mmap in (True, False, None):
        monkeypatch.setattr("tsgg.weights.settings", replace(settings, mmap=mmap))
        with Model(path) as model:
            assert model.plan.copied == 0 if mmap else mmap is None or model.plan.mapped == 0
        answers.append(logits(path))
    assert np.array_equal(answers[0], answers[1]) and np.array_equal(answers[0], answers[2])


@pytest.mark.parametrize("huge", [True, False])
def test_a_small_model_is_copied_into_huge_pages_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    """But for the table of a head that is not tied to it: a step reads single rows of that."""
    path = write_tiny(tmp_path / "m.gguf", TinyLlama())
    monkeypatch.setattr("tsgg.weights.huge_pages", lambda: huge)
    with Model(path) as model:
        tensors = model.file.tensors
        table = tensors["token_embd.weight"].nbytes if "output.weight" in tensors else 0
        total = sum(info.nbytes for info in tensors.values())
        assert model.plan.copied == (total - table if huge else 0)
    monkeypatch.setattr("tsgg.weights.COPY_UP_TO", total - 1)
    with Model(path) as model:
        assert model.plan.copied == 0


@pytest.mark.parametrize("kind", ["q4_0", "iq4_nl", "mxfp4"])
@pytest.mark.parametrize("experts", [0, 4])
def test_repacked_weights_agree_with_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, experts: int
) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyLlama(weights=kind, experts=experts))
    with Model(path) as model:
        found = {name: model.weights.get(name) for name in model.file.tensors}
        repacked = [name for name, tensor in found.items() if tensor is not None and model.weights.repacked(tensor)]
    fast = logits(path)
    monkeypatch.setattr("tsgg.weights.settings", replace(settings, repack=False))
    plain = logits(path)
    if pick_device("cpu").extra_buffer_type("CPU_REPACK") is not None:
        assert "blk.0.attn_output.weight" in repacked and "token_embd.weight" not in repacked
    assert np.abs(fast - plain).max() < 1e-2 * plain.std()  # the same blocks in another order of summation


def test_the_parts_of_a_split_model_are_one_model(tmp_path: Path) -> None:
    shape = TinyLlama(weights="q8_0")
    whole, keys, weights = write_tiny(tmp_path / "whole.gguf", shape), metadata(shape), list(tensors(shape))
    split = {"split.count": np.uint16(3), "split.tensors.count": np.int32(len(weights))}
    for number, part in enumerate((weights[:5], weights[5:12], weights[12:])):
        own = {**(keys if number == 0 else {}), **split, "split.no": np.uint16(number)}
        path = w.write_gguf(tmp_path / f"part-{number + 1:05d}-of-00003.gguf", own, part)
    assert np.array_equal(logits(whole), logits(path))


# -- life --------------------------------------------------------------------------------------------------------------


def test_close_twice_and_use_after_close(tmp_path: Path) -> None:
    model = Model(write_tiny(tmp_path / "m.gguf"))
    sequence = model.new_sequence()
    step(model, sequence, TOKENS)
    model.close()
    model.close()
    with pytest.raises(TsggError, match="closed"):
        step(model, sequence, TOKENS)


def test_slots_are_handed_out_lowest_first_and_given_back(tmp_path: Path) -> None:
    with Model(write_tiny(tmp_path / "m.gguf"), n_seq=2) as model:
        first, second = model.new_sequence(), model.new_sequence()
        with pytest.raises(TsggError, match="all 2 sequences of this model are in use"):
            model.new_sequence()
        model.release(first)
        model.release(first)
        third = model.new_sequence()
        assert (second.slot, third.slot) == (1, 0) and third.tokens == []
        with pytest.raises(TsggError, match="was released"):
            step(model, first, TOKENS)


def test_two_models_live_side_by_side(tmp_path: Path) -> None:
    paths = [write_tiny(tmp_path / f"{seed}.gguf", TinyLlama(seed=seed)) for seed in (1, 2)]
    alone = [logits(path) for path in paths]
    with Model(paths[0], n_threads=1) as one, Model(paths[1], n_threads=1) as two:
        sequences = [one.new_sequence(), two.new_sequence()]
        together = [
            [decode(model, sequence, [token])[0] for model, sequence in zip((one, two), sequences, strict=True)]
            for token in TOKENS
        ]
    assert np.array_equal(np.swapaxes(together, 0, 1), alone)


def test_an_architecture_from_outside_the_package_loads_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = TinyLlama(layers=3)
    path = write_tiny(tmp_path / "m.gguf", replace(shape, arch=windowed.TinyWindow.name))
    near, far = [5] * windowed.WINDOW, [6] * windowed.WINDOW
    with Model(path, n_threads=1) as model:
        assert model.arch.name == "tinywindow" and type(model.arch) is ARCHITECTURES["tinywindow"]
        sequence = model.new_sequence()
        windowed_rows = step(model, sequence, far + near)
    plain_rows = logits(write_tiny(tmp_path / "plain.gguf", shape), far + near)
    same = windowed.WINDOW  # until the window is full the two models are one
    assert np.array_equal(windowed_rows[:same], plain_rows[:same])
    assert not np.allclose(windowed_rows[same:], plain_rows[same:], atol=1e-2)
    monkeypatch.delitem(ARCHITECTURES, "tinywindow")
    with pytest.raises(UnsupportedError, match="tinywindow"):
        Model(path)
