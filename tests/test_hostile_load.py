"""A damaged or hostile file ends in a TsggError or in a model that computes: never in an abort, a signal or a hang.

Every mutated file is loaded in a child process, and where it loads, two tokens go through the model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from tests import gguf_writer as w
from tests import windowed  # noqa: F401 - registers an architecture with windows, in the child too
from tests.hostile import HostileFile, Outcome, flips, run_in_child, truncations
from tests.tiny_models import TinyLlama, metadata, tensors
from tsgg.model import Model
from tsgg.speculative.protocol import Batch, Want

TINY = TinyLlama(layers=1, embedding=32, heads=2, kv_heads=1, head_dim=32, width=32)
SHAPES = {
    "llama": TINY,
    "experts": TinyLlama(**{**vars(TINY), "experts": 3, "used": 2}),
    "window": TinyLlama(**{**vars(TINY), "layers": 2, "arch": "tinywindow"}),
    "qwen3": TinyLlama(**{**vars(TINY), "arch": "qwen3"}),
    "q4_0": TinyLlama(**{**vars(TINY), "weights": "q4_0"}),
}


def load(path: str) -> None:
    """What the child does with a file."""
    with Model(path, n_threads=1) as model:
        sequence = model.new_sequence()
        rows = model.forward(Batch((sequence,), np.array([[0, model.vocab_size - 1]], np.int32), Want("all")))
        assert rows.logits(0, 1).shape == (model.vocab_size,)
        sequence.commit(2)


def parts(shape: TinyLlama) -> tuple[dict[str, object], list[w.Tensor]]:
    """Metadata without the tokenizer (a model does not read it) and tensors, with the norms that the architecture adds."""
    keys = {key: value for key, value in metadata(shape).items() if not key.startswith("tokenizer.")}
    weights = list(tensors(shape))
    if shape.arch == "qwen3":
        for layer in range(shape.layers):
            weights += [w.f32(f"blk.{layer}.attn_{x}_norm.weight", np.ones(shape.head_dim)) for x in "qk"]
    return keys, weights


def header_size(data: bytes, weights: list[w.Tensor]) -> int:
    return len(data) - sum(-(-len(raw) // 32) * 32 for *_, raw in weights)


def failures(files: Iterator[HostileFile]) -> list[Outcome]:
    outcomes = run_in_child("tests.test_hostile_load:load", files)
    assert any(outcome.kind == "refused" for outcome in outcomes)
    return [outcome for outcome in outcomes if not outcome.passed]


@pytest.mark.parametrize("name", SHAPES)
def test_the_undamaged_file_loads(name: str) -> None:
    data = w.gguf_bytes(*parts(SHAPES[name]))
    (outcome,) = run_in_child("tests.test_hostile_load:load", [HostileFile("whole", data)])
    assert outcome.kind == "loaded", outcome


def test_a_file_cut_anywhere_is_refused() -> None:
    keys, weights = parts(TINY)
    data = w.gguf_bytes(keys, weights)
    outcomes = run_in_child("tests.test_hostile_load:load", truncations(data, header_size(data, weights)))
    assert {outcome.kind for outcome in outcomes} == {"refused"}, [o for o in outcomes if o.kind != "refused"][:5]


@pytest.mark.parametrize(
    ("name", "count"), [("llama", 1000), ("experts", 1000), ("window", 400), ("qwen3", 300), ("q4_0", 300)]
)
def test_flipped_bits_in_the_header_never_crash(name: str, count: int) -> None:
    keys, weights = parts(SHAPES[name])
    data = w.gguf_bytes(keys, weights)
    assert not failures(flips(data, count, seed=count, within=header_size(data, weights)))


NUMBERS: list[object] = [
    *(
        np.uint32(value)
        for value in (0, 1, 2, 3, 5, 7, 31, 33, 64, 255, 1024, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
    ),
    *(np.int32(value) for value in (-1, -(2**31))),
    *(np.uint64(value) for value in (2**32, 2**63, 2**64 - 1)),
    *(np.float32(value) for value in (0, -0.0, 1e-38, -1, 0.5, 3e38, math.nan, math.inf, -math.inf)),
    np.float64(1e300),
    True,
    "",
    "yarn",
    "\ud800".encode("utf-8", "surrogatepass"),
    [1, 2],
    [-1],
    [0.5],
    ["a"],
    np.array([], "<u4"),
]
OPTIONAL = (
    *("expert_count", "expert_used_count", "nextn_predict_layers", "attention.sliding_window", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scale_linear"),
)


def other_values(name: str) -> Iterator[HostileFile]:
    """Every key of the architecture, and those it might have, with every odd value; and without the key."""
    keys, weights = parts(SHAPES[name])
    arch = SHAPES[name].arch
    for key in [*(key for key in keys if key.startswith(arch)), *(f"{arch}.{key}" for key in OPTIONAL)]:
        for value in NUMBERS:
            yield HostileFile(f"{key} = {value!r}", w.gguf_bytes({**keys, key: value}, weights))
        yield HostileFile(f"no {key}", w.gguf_bytes({k: v for k, v in keys.items() if k != key}, weights))


@pytest.mark.parametrize("name", ["llama", "experts", "window"])
def test_no_value_of_a_key_crashes(name: str) -> None:
    assert not failures(other_values(name))


def yarn() -> Iterator[HostileFile]:
    keys, weights = parts(TINY)
    keys |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    for key in ("factor", "attn_factor", "original_context_length"):
        for value in NUMBERS:
            yield HostileFile(
                f"yarn {key} = {value!r}", w.gguf_bytes({**keys, f"llama.rope.scaling.{key}": value}, weights)
            )


def test_no_value_of_a_scaled_rope_crashes() -> None:
    assert not failures(yarn())


def other_tensors(name: str) -> Iterator[HostileFile]:
    """Every tensor missing, of another shape or type, and with numbers that are none."""
    keys, weights = parts(SHAPES[name])
    for i, (tensor, ne, kind, raw) in enumerate(weights):
        elements = math.prod(ne)
        variants: dict[str, list[w.Tensor]] = {
            "missing": [],
            "flat": [(tensor, (elements,), kind, raw)],
            "one number": [w.f32(tensor, [1.0])],
            "reversed": [(tensor, tuple(ne)[::-1], kind, raw)] if kind == 0 else [],
            "deeper": [(tensor, (*ne, 1), kind, raw)],
            "deepest": [(tensor, (*ne, *[1] * (3 - len(ne)), 2), kind, raw * 2)],
            "one row more": [(tensor, (*ne[:-1], ne[-1] + 1), kind, raw + raw[: len(raw) // ne[-1]])],
            "half": [(tensor, ne, 1, bytes(2 * elements))],
            "double": [(tensor, ne, 28, bytes(8 * elements))],
            "integers": [(tensor, ne, 26, bytes(4 * elements))],
            "twice": [(tensor, ne, kind, raw), (tensor, ne, kind, raw)],
            "quantized": [(tensor, ne, 8, bytes(34 * (elements // 32)))] if elements % 32 == 0 else [],
        }
        if kind == 0:
            for number in (math.nan, math.inf, -math.inf, 3e38, 0.0):
                variants[str(number)] = [(tensor, ne, 0, struct.pack("<f", number) * elements)]
        for label, entries in variants.items():
            yield HostileFile(f"{tensor} {label}", w.gguf_bytes(keys, [*weights[:i], *entries, *weights[i + 1 :]]))


@pytest.mark.parametrize("name", SHAPES)
def test_no_tensor_crashes(name: str) -> None:
    assert not failures(other_tensors(name))


def additions() -> Iterator[HostileFile]:
    """Optional tensors of a wrong size, and tensors that nothing asks for."""
    keys, weights = parts(TINY)
    names = ("output.bias", "rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias",
             "blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias", "blk.9.attn_q.weight")  # fmt: skip
    for name in names:
        for size in (1, 2, 16, 31, 32, 33, 64, 128, 264):
            yield HostileFile(f"{name} of {size}", w.gguf_bytes(keys, [*weights, w.f32(name, np.ones(size))]))
            yield HostileFile(
                f"{name} of 32 x {size}", w.gguf_bytes(keys, [*weights, w.f32(name, np.ones((size, 32)))])
            )


def test_no_additional_tensor_crashes() -> None:
    assert not failures(additions())


def test_no_architecture_name_crashes() -> None:
    keys, weights = parts(TINY)
    names = [
        "",
        " ",
        "LLAMA",
        "llama\0",
        "../llama",
        "a" * 10_000,
        "\u202e",
        b"\xff\xfe",
        7,
        ["llama"],
        "qwen3",
        "gemma3",
    ]
    files = (HostileFile(repr(n), w.gguf_bytes({**keys, "general.architecture": n}, weights)) for n in names)
    assert not failures(files)
