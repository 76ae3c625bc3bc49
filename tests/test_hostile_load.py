"""A damaged or hostile file ends in a TsggError or in a model that computes: never in an abort, a signal or a hang.

Every mutated file is loaded in a child process, and where it loads, two tokens go through the model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import chain

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


@pytest.mark.parametrize(("name", "count"), [("llama", 1000), ("experts", 1000), ("window", 400), ("qwen3", 300), ("q4_0", 300)])
def test_flipped_bits_in_the_header_never_crash(name: str, count: int) -> None:
    keys, weights = parts(SHAPES[name])
    data = w.gguf_bytes(keys, weights)
    assert not failures(flips(data, count, seed=count, within=header_size(data, weights)))
