"""`qwen35` and `qwen35moe` trunks: against another engine's answers, against float64 numpy, and row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.golden import check_trunk, load_answers
from tests.gguf_writer import Tensor, write_gguf
from tests.test_exact_rows import check_rows
from tests.tiny_qwen35 import Reference, TinyQwen35, metadata, tensors, write_qwen35
from tests.trunk_steps import GOLDEN, Array, batch, decode, same_bits, step
from tsgg.errors import ModelFileError, TsggError, UnsupportedError
from tsgg.ggml import buffers
from tsgg.model import Model
from tsgg.models.base import Attention, Recurrent
from tsgg.speculative.protocol import Want

TRUNKS = sorted(path.stem for path in (GOLDEN / "trunks").glob("qwen35*.gguf"))
F32_CACHE: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}
SHAPES = {
    "dense": TinyQwen35(),
    "mixture, tied": TinyQwen35(experts=4, tied=True),
    "recurrent to the last": TinyQwen35(layers=3, recurrent=(True, False, True), key_heads=1, value_heads=3),
    "all attention": TinyQwen35(layers=2, recurrent=(False, False)),
    "odd widths": TinyQwen35(heads=6, kv_heads=3, key_heads=3, value_heads=6, state=16, width=72, seed=3),
}


def text(count: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 256, count).tolist()
    return tokens


# -- mathematics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRUNKS)
def test_every_golden_logit_is_met_with_an_f32_cache(name: str) -> None:
    """The prompt at once, row by row, two sequences alike and staggered, a verify and what follows its rollback."""
    path = GOLDEN / "trunks" / f"{name}.gguf"
    check = check_trunk(path, "f32", n_threads=1)
    deviation = float(load_answers(path)["prompt_logits"].std())  # what errors are counted in
    allowed = 1e-4 * max(1.0, deviation / 8)
    assert {"prompt", "draft", "rollback", "two alike", "staggered", "row by row"} <= set(check.errors)
    assert all(worst * deviation < allowed for _, worst in check.errors.values()), str(check)
    assert check.passed and check.agreed > 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_logits_and_states_are_those_of_float64_numpy(tmp_path: Path, shape: TinyQwen35) -> None:
    reference, tokens = Reference(shape), text(80)
    expected = np.array([reference.step(token)[0] for token in tokens])
    with Model(write_qwen35(tmp_path / "m.gguf", shape), n_ctx=300, n_threads=1, **F32_CACHE) as model:
        sequence = model.new_sequence()
        rows = [step(model, sequence, tokens[:40]), step(model, sequence, tokens[40:50], kept=4)[:4]]
        rows += [step(model, sequence, tokens[44:70]), decode(model, sequence, tokens[70:])]
        assert np.abs(np.concatenate(rows) - expected).max() < 2e-5 * max(1.0, float(expected.std()))
        recurrent = model.memory.recurrent
        assert (recurrent is not None) == any(shape.kinds)
        if recurrent is None:
            return
        for layer in recurrent.layers:
            assert np.abs(buffers.read(recurrent.state[layer])[0] - reference.state[layer]).max() < 1e-5
            assert np.abs(buffers.read(recurrent.conv[layer])[0, 0] - reference.conv[layer]).max() < 1e-5


def test_recurrent_layers_are_named_by_the_interval_or_one_by_one(tmp_path: Path) -> None:
    tokens = text(20)
    logits = []
    for shape in (TinyQwen35(layers=5), TinyQwen35(layers=5, recurrent=(True, True, True, False, True))):
        with Model(write_qwen35(tmp_path / "m.gguf", shape), n_ctx=256, n_threads=1) as model:
            kinds = [type(layer) for layer in model.arch.attention()]
            assert kinds == [Recurrent, Recurrent, Recurrent, Attention, Recurrent]
            logits.append(step(model, model.new_sequence(), tokens))
    assert same_bits(*logits)


@pytest.mark.parametrize("experts", [0, 4])
def test_a_draft_block_behind_the_layers_is_no_part_of_the_trunk(tmp_path: Path, experts: int) -> None:
    tokens, logits, sizes = text(20), [], []
    for nextn in (0, 1):
        shape = TinyQwen35(experts=experts, nextn=nextn)
        with Model(write_qwen35(tmp_path / "m.gguf", shape), n_ctx=256, n_threads=1) as model:
            assert model.arch.layers == len(model.arch.attention()) == 4
            logits.append(step(model, model.new_sequence(), tokens))
            sizes.append(model.memory.nbytes)
    assert same_bits(*logits) and sizes[0] == sizes[1]


def fuse(found: list[Tensor], prefix: str, parts: tuple[str, ...], fused: str) -> list[Tensor]:
    """F32 tensors of a block joined along their rows into one."""
    chosen = [next(t for t in found if t[0] == f"{prefix}{part}.weight") for part in parts]
    arrays = [np.frombuffer(raw, "<f4").reshape(ne[::-1]) for _, ne, _, raw in chosen]
    joined = np.concatenate(arrays, axis=-2)
    rest = [t for t in found if all(t is not other for other in chosen)]
    return [*rest, (f"{prefix}{fused}.weight", joined.shape[::-1], 0, joined.tobytes())]


def test_projections_fused_in_the_file_give_the_same_logits(tmp_path: Path) -> None:
    shape, tokens = TinyQwen35(experts=4), text(20)
    found = list(tensors(shape))
    plain = write_gguf(tmp_path / "plain.gguf", metadata(shape), found)
    found = fuse(found, "blk.3.", ("attn_q", "attn_k", "attn_v"), "attn_qkv")
    for layer in range(shape.layers):
        found = fuse(found, f"blk.{layer}.", ("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps")
    logits = []
    for path in (plain, write_gguf(tmp_path / "fused.gguf", metadata(shape), found)):
        with Model(path, n_ctx=256, n_threads=1) as model:
            logits.append(step(model, model.new_sequence(), tokens))
    assert np.abs(logits[0] - logits[1]).max() < 1e-5


def test_expert_widths_follow_from_the_dense_width_where_the_file_has_only_that(tmp_path: Path) -> None:
    shape, tokens = TinyQwen35(experts=4), text(10)
    values = metadata(shape)
    del values["qwen35moe.expert_feed_forward_length"]
    values["qwen35moe.feed_forward_length"] = shape.width * shape.used
    with Model(write_qwen35(tmp_path / "a.gguf", shape), n_ctx=256, n_threads=1) as model:
        expected = step(model, model.new_sequence(), tokens)
    with Model(write_gguf(tmp_path / "b.gguf", values, list(tensors(shape))), n_ctx=256, n_threads=1) as model:
        assert same_bits(step(model, model.new_sequence(), tokens), expected)


# -- rows --------------------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {"embedding": 256, "width": 256, "head_dim": 64, "state": 64}
EXACT = {
    "f32": SHAPES["odd widths"],
    "f16 mixture": TinyQwen35(weights="f16", experts=4, used=3),
    "bf16 recurrent to the last": TinyQwen35(weights="bf16", layers=3, recurrent=(True, False, True)),
    "q8_0 mixture": TinyQwen35(weights="q8_0", experts=4),
    "q4_0 repacked": TinyQwen35(weights="q4_0"),
    "q4_K": TinyQwen35(weights="q4_K", layers=4, **WIDE),
    "q6_K mixture": TinyQwen35(weights="q6_K", experts=4, layers=4, **WIDE),
}


@pytest.mark.parametrize("shape", EXACT.values(), ids=list(EXACT))
def test_a_verify_row_equals_the_one_row_decode(tmp_path: Path, shape: TinyQwen35) -> None:
    with Model(write_qwen35(tmp_path / "m.gguf", shape), n_ctx=300, n_threads=1) as model:
        check_rows(model, 9, counts=(*range(1, 18), 33, 65))
        check_rows(model, 250, counts=(2, 9, 16))


def test_neither_threads_nor_company_change_a_row(tmp_path: Path) -> None:
    path = write_qwen35(tmp_path / "m.gguf", TinyQwen35(experts=4))
    texts = [text(30, seed) for seed in range(3)]
    alone: list[Array] = []
    for threads in (1, 2):
        with Model(path, n_ctx=256, n_seq=3, n_threads=threads) as model:
            sequences = [model.new_sequence() for _ in texts]
            together = batch(model, sequences, texts)
            for sequence, tokens, rows in zip(sequences, texts, together, strict=True):
                sequence.truncate(0)
                alone.append(decode(model, sequence, tokens))
                assert same_bits(rows, alone[-1])
    assert all(same_bits(alone[i], alone[i + 3]) for i in range(3))


def test_rows_that_nobody_wants_are_not_computed_but_remembered(tmp_path: Path) -> None:
    """A prefill chunk without outputs leaves the states of one with all of them, also where the last layer is recurrent."""
    for shape in (TinyQwen35(), SHAPES["recurrent to the last"]):
        with Model(write_qwen35(tmp_path / "m.gguf", shape), n_ctx=256, n_threads=1) as model:
            rows = []
            for want in (Want("all"), Want("none"), Want("last", "all", taps=(0, shape.layers))):
                sequence = model.new_sequence()
                step(model, sequence, text(20), want=want)
                rows.append(step(model, sequence, [7]))
                model.release(sequence)
            assert same_bits(rows[0], rows[1]) and same_bits(rows[0], rows[2])


# -- files that are not right ------------------------------------------------------------------------------------------


def with_keys(**changes: object) -> Callable[[dict[str, object], list[Tensor]], None]:
    def change(values: dict[str, object], found: list[Tensor]) -> None:
        values.update({f"qwen35.{name.replace('__', '.')}": value for name, value in changes.items()})

    return change


def without(name: str) -> Callable[[dict[str, object], list[Tensor]], None]:
    def change(values: dict[str, object], found: list[Tensor]) -> None:
        values.pop(f"qwen35.{name}", None)
        found[:] = [tensor for tensor in found if tensor[0] != name]

    return change


def with_scale(values: dict[str, object], found: list[Tensor]) -> None:
    found.append(("blk.1.attn_qkv.scale", (1,), 0, np.float32(2).tobytes()))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (with_keys(rope__dimension_sections=[3, 3, 2]), ModelFileError, "expected four integers"),
        (with_keys(rope__dimension_sections=[0, 0, 0, 0]), ModelFileError, "expected four integers"),
        (without("rope.dimension_sections"), ModelFileError, "dimension_sections is None"),
        (with_keys(rope__dimension_sections=[8, 0, 0, 0]), UnsupportedError, "leaves pair 1 of 8"),
        (with_keys(ssm__inner_size=64), ModelFileError, "ssm.inner_size 64 with 4 heads of 32"),
        (with_keys(ssm__group_count=3), ModelFileError, "over 3 key heads"),
        (with_keys(ssm__conv_kernel=1), ModelFileError, "ssm.conv_kernel"),
        (with_keys(ssm__conv_kernel=5), ModelFileError, "blk.0.ssm_conv1d.weight has shape 4 x 256, expected 5 x 256"),
        (with_keys(attention__value_length=64), ModelFileError, "KV heads of 64"),
        (with_keys(attention__recurrent_layers=[True, False]), ModelFileError, "has 2 entries"),
        (with_keys(attention__recurrent_layers=[True] * 5), ModelFileError, "false for draft blocks"),
        (with_keys(full_attention_interval=2), ModelFileError, "blk.1.attn_qkv.weight has shape"),
        (without("ssm.state_size"), ModelFileError, "qwen35.ssm.state_size"),
        (without("blk.2.ssm_a"), ModelFileError, "tensor blk.2.ssm_a is missing"),
        (with_scale, UnsupportedError, "blk.1.attn_qkv.scale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_not_right_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, object], list[Tensor]], None], kind: type[TsggError], words: str
) -> None:
    shape = TinyQwen35()
    values, found = metadata(shape), list(tensors(shape))
    change(values, found)
    with pytest.raises(kind) as caught:
        Model(write_gguf(tmp_path / "m.gguf", values, found), n_ctx=256)
    assert words in str(caught.value)


def test_a_scalar_of_rope_sections_stands_for_all_four(tmp_path: Path) -> None:
    shape = TinyQwen35()
    with Model(
        write_gguf(tmp_path / "m.gguf", metadata(shape) | {"qwen35.rope.dimension_sections": 4}, list(tensors(shape))),
        n_ctx=256,
    ) as model:
        assert np.isfinite(step(model, model.new_sequence(), [1, 2])).all()
