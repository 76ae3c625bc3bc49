"""Invariant 2(a): on the CPU a row of a verify equals the one-row decode of the same position, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import windowed
from tests.tiny_models import TinyLlama, vocabulary, write_tiny
from tests.trunk_steps import GOLDEN, VERIFY, Array, batch, decode, golden_trunks, same_bits, step
from tsgg.model import Model
from tsgg.speculative.protocol import Want

ROWS = (*range(1, 18), 33)
DEPTHS = (3, 250, 505)  # the two last windows cross a border of the KV buckets, at 256 and 512 cells
CACHES = [
    ("f16", "f16"),
    ("f32", "f32"),
    ("bf16", "bf16"),
    ("q8_0", "q8_0"),
    ("f16", "q8_0"),
    ("q8_0", "f16"),
    ("f32", "bf16"),
]
KQUANT = TinyLlama(embedding=256, width=256, head_dim=64)
SHAPES = {
    "f32": TinyLlama(),
    "f32 odd groups": TinyLlama(heads=6, kv_heads=2, layers=3),
    "one head per KV head": TinyLlama(heads=3, kv_heads=3),
    "f16 tied": TinyLlama(weights="f16", table="f16", tied=True),
    "bf16": TinyLlama(weights="bf16"),
    "q8_0": TinyLlama(weights="q8_0", table="q8_0"),
    "q4_0 repacked": TinyLlama(weights="q4_0"),
    "q4_1": TinyLlama(weights="q4_1"),
    "q5_0": TinyLlama(weights="q5_0"),
    "iq4_nl repacked": TinyLlama(weights="iq4_nl"),
    "iq4_nl tied": TinyLlama(weights="iq4_nl", table="iq4_nl", tied=True),
    "q4_K": replace(KQUANT, weights="q4_K"),
    "q6_K": replace(KQUANT, weights="q6_K", table="q6_K", tied=True),
    "windows": TinyLlama(layers=3, arch=windowed.TinyWindow.name),
    "experts f32": TinyLlama(experts=6, used=3),
    "experts f16": TinyLlama(experts=4, weights="f16"),
    "experts q4_0 repacked": TinyLlama(experts=4, weights="q4_0"),
    "experts mxfp4": TinyLlama(experts=4, weights="mxfp4"),
}


def prefix(vocab: int, length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, length).tolist()
    return tokens


def check_rows(model: Model, depth: int, counts: tuple[int, ...] = ROWS) -> None:
    """Verifies of every row count in `counts`, from `depth` on, against the same tokens one at a time."""
    tokens = prefix(model.vocab_size, depth + max(counts))
    sequence = model.new_sequence()
    step(model, sequence, tokens[:depth])
    alone = decode(model, sequence, tokens[depth:])
    assert np.isfinite(alone).all()
    for count in counts:
        if sequence.truncate(depth) != depth:  # a recurrent state cannot go back
            step(model, sequence, tokens[:depth])
        rows = step(model, sequence, tokens[depth : depth + count])
        wrong = [i for i in range(count) if not same_bits(rows[i], alone[i])]
        assert not wrong, f"depth {depth}, {count} rows: rows {wrong} differ by {np.abs(rows - alone[:count]).max()}"
    model.release(sequence)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_a_verify_row_equals_the_one_row_decode_whatever_the_weights(tmp_path: Path, shape: TinyLlama) -> None:
    with Model(write_tiny(tmp_path / "m.gguf", shape), n_ctx=600, n_threads=1) as model:
        for depth in DEPTHS:
            check_rows(model, depth)


@pytest.mark.parametrize("types", CACHES, ids="/".join)
def test_a_verify_row_equals_the_one_row_decode_whatever_the_cache(tmp_path: Path, types: tuple[str, str]) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    with Model(path, n_ctx=600, cache_type_k=types[0], cache_type_v=types[1]) as model:
        for depth in DEPTHS:
            check_rows(model, depth)


@pytest.mark.parametrize("name", golden_trunks())
def test_a_verify_row_equals_the_one_row_decode_on_every_architecture(name: str) -> None:
    with Model(GOLDEN / "trunks" / f"{name}.gguf", n_ctx=400, n_threads=1) as model:
        for depth in DEPTHS[:2]:
            check_rows(model, depth)


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0")], ids="/".join)
def test_a_verify_row_equals_the_one_row_decode_on_a_real_model(smollm2_path: Path, types: tuple[str, str]) -> None:
    with Model(smollm2_path, n_ctx=600, cache_type_k=types[0], cache_type_v=types[1]) as model:
        check_rows(model, 250, counts=(2, 3, 4, 8, 9, 17))


def test_a_verify_that_hands_out_hidden_rows_and_taps_computes_the_same_logits(tmp_path: Path) -> None:
    with Model(write_tiny(tmp_path / "m.gguf", TinyLlama(layers=3)), n_ctx=300) as model:
        tokens = prefix(model.vocab_size, 100)
        sequence = model.new_sequence()
        step(model, sequence, tokens[:90])
        alone = decode(model, sequence, tokens[90:])
        for want in (Want("all", "all"), Want("all", "none", (1,)), Want("all", "all", (0, 2, 3))):
            sequence.truncate(90)
            assert same_bits(step(model, sequence, tokens[90:], want=want), alone), want


def test_a_chunk_of_several_blocks_of_rows_equals_the_one_row_decodes(tmp_path: Path) -> None:
    with Model(write_tiny(tmp_path / "m.gguf"), n_ctx=300) as model:
        tokens = prefix(model.vocab_size, 200)
        sequence = model.new_sequence()
        rows = step(model, sequence, tokens)
        sequence.truncate(0)
        assert same_bits(rows, decode(model, sequence, tokens))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 9])
def test_company_does_not_change_a_row(tmp_path: Path, count: int) -> None:
    lengths = (40, 255, 3)
    with Model(write_tiny(tmp_path / "m.gguf"), n_ctx=300, n_seq=3) as model:
        sequences = [model.new_sequence() for _ in lengths]
        texts = [prefix(model.vocab_size, length + count, seed) for seed, length in enumerate(lengths)]
        alone: list[Array] = []
        for sequence, text, length in zip(sequences, texts, lengths, strict=True):
            step(model, sequence, text[:length])
            alone.append(decode(model, sequence, text[length:]))
            sequence.truncate(length)
        for first in (0, 1):  # three sequences together, then the last two
            tails = [text[-count:] for text in texts[first:]]
            together = batch(model, sequences[first:], tails, kept=0, want=VERIFY)
            for i, rows in enumerate(together, first):
                assert same_bits(rows, alone[i]), f"sequence {i} of {len(sequences) - first}"


def test_the_number_of_threads_does_not_change_a_row(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyLlama(experts=4))
    tokens = prefix(len(vocabulary()), 60)
    rows = []
    for threads in (1, 2):
        with Model(path, n_ctx=300, n_threads=threads) as model:
            rows.append(step(model, model.new_sequence(), tokens))
    assert same_bits(*rows)
