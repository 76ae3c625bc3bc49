"""Every type of weights that files use: a small file of each agrees with float64 on its dequantised twin, row by row.

ggml rounds what a product multiplies a quantised weight by, to 8 bits in blocks (or to the weight's own 16-bit type). So our
logits may be as far from float64 as that rounding alone takes float64 from itself, and must be near to float64 that rounds too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tests import numpy_llama
from tests.numpy_llama import head, residuals
from tests.test_exact_rows import check_rows, prefix
from tests.tiny_models import TYPES, TinyLlama, metadata, tensors, write_tiny
from tests.trunk_steps import step
from tsgg.model import Model

Array64 = NDArray[np.float64]
Rounding = Callable[[Array64], Array64]

SHAPE = TinyLlama(embedding=256, width=256, head_dim=64)  # rows of 256, as K-quants need them
TOKENS = 24
# What ours may differ from float64 by: in units of what rounding activations does to float64, in the mean square.
TYPICAL = 1.15
# From float64 that rounds as well: nothing in most types (1e-5), but a value that lies between two steps may fall either way,
# and all values behind it move. Not to round at all is off by one unit, other steps by more. Q4_1 and Q5_1 multiply a block's
# minimum by a sum of activations in half precision, which this float64 does not do.
SAME_STEPS = dict.fromkeys(("q4_1", "q5_1"), 0.9)
SAME_STEPS_TYPICALLY = 0.4


def q8_0(x: Array64) -> Array64:
    """Blocks of 32 with a scale in half precision: for Q4_0 to Q8_0, IQ4_NL and MXFP4."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    steps = np.rint(blocks / np.where(scale > 0, scale, 1))
    return np.asarray((steps * scale.astype(np.float16)).reshape(x.shape), np.float64)


def q8_k(x: Array64) -> Array64:
    """Blocks of 256 whose largest value is -127 steps: for K-quants and IQ4_XS."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    scale = np.where(largest != 0, largest, 1) / np.float32(-127)
    return np.asarray((np.minimum(np.rint(blocks / scale), 127) * scale).reshape(x.shape), np.float64)


def half(x: Array64) -> Array64:
    return x.astype(np.float16).astype(np.float64)


def brain(x: Array64) -> Array64:
    """BF16, to the nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    return rounded.view(np.float32).astype(np.float64)


ROUNDINGS: dict[str, Rounding] = (
    dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4"), q8_0)
    | dict.fromkeys(("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_xs"), q8_k)
    | {"f16": half, "bf16": brain}
)


def dequantised(shape: TinyLlama) -> dict[str, Array64]:
    """All tensors of the file in float64, decoded by the gguf package."""
    found = {}
    for name, ne, kind, raw in tensors(shape):
        rows = np.frombuffer(raw, np.uint8).reshape(*tuple(ne)[:0:-1], -1)
        found[name] = dequantize(rows, GGMLQuantizationType(kind)).reshape(tuple(ne)[::-1]).astype(np.float64)
    return found


def reference(shape: TinyLlama, tokens: list[int]) -> Array64:
    w = dequantised(shape)
    return head(w, residuals(w, shape, tokens)[-1])[1]


def rms(x: Array64) -> float:
    return float(np.sqrt(np.mean(x * x)))


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_logits_of_every_type_agree_with_float64_within_the_rounding_of_activations(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, weights=kind, table=kind)
    tokens = prefix(261, TOKENS)
    exact = reference(shape, tokens)

    plain = numpy_llama._linear
    monkeypatch.setattr(numpy_llama, "_linear", lambda w, name, x: plain(w, name, ROUNDINGS[kind](x)))
    rounded = reference(shape, tokens)
    unit = rms(rounded - exact)
    assert 0 < unit < 0.05 * rms(exact)  # else the test could not tell anything

    path = write_tiny(tmp_path / "m.gguf", shape)
    with Model(path, device="cpu", n_threads=1, cache_type_k="f32", cache_type_v="f32") as model:
        assert {model.file.tensors[name].type for name in ("token_embd.weight", "blk.0.ffn_down.weight")} == {
            TYPES[kind]
        }
        ours = step(model, model.new_sequence(), tokens)
    assert rms(ours - exact) < TYPICAL * unit
    assert rms(ours - rounded) < SAME_STEPS.get(kind, SAME_STEPS_TYPICALLY) * unit


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_a_verify_row_of_every_type_equals_the_one_row_decode(kind: str, tmp_path: Path) -> None:
    """The embedding table is the LM head too."""
    shape = replace(SHAPE, weights=kind, table=kind, tied=True)
    with Model(write_tiny(tmp_path / "m.gguf", shape), device="cpu", n_ctx=64, n_threads=2) as model:
        check_rows(model, 5, tuple(range(1, 10)))


@pytest.mark.parametrize(("kind", "copied"), [("q4_0", True), ("iq4_nl", True), ("mxfp4", True), ("q8_0", False)])
def test_a_tied_head_is_multiplied_by_in_repacked_form_where_the_type_has_one(
    kind: str, copied: bool, tmp_path: Path
) -> None:
    """Rows are gathered from the table itself, which stays in the file's mapping."""
    path = write_tiny(tmp_path / "m.gguf", replace(SHAPE, weights=kind, table=kind, tied=True))
    with Model(path, device="cpu", n_ctx=64, n_threads=1) as model:
        table, head = model.weights["token_embd.weight"], model.weights.get("output.weight")
        assert not model.weights.repacked(table)
        assert (head is not None) == copied == (head is not None and model.weights.repacked(head))
        size = model.file.tensors["token_embd.weight"].nbytes
        assert model.plan.copied >= size * copied


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_K", "iq4_xs", "mxfp4", "bf16"])
def test_experts_of_every_family_of_types_keep_rows_exact(kind: str, tmp_path: Path) -> None:
    shape = replace(SHAPE, weights=kind, experts=4, layers=1)
    assert metadata(shape)["llama.expert_count"] == 4
    with Model(write_tiny(tmp_path / "m.gguf", shape), device="cpu", n_ctx=64, n_threads=1) as model:
        check_rows(model, 5, tuple(range(1, 10)))
