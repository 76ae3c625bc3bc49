"""Tiny llama files with seeded random weights and a byte-level tokenizer: what tests run on where no model is at hand.

path = write_tiny(tmp_path / "tiny.gguf", TinyLlama(experts=4, weights="q8_0"))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.gguf_writer import Tensor, f32, write_gguf
from tsgg.ggml.library import ffi, lib
from tsgg.gguf import GGML_TYPES

TYPES = {info.name: number for number, info in GGML_TYPES.items()}
MERGES = ("h e", "l l", "he ll", "Ġ t", "Ġt he")
SPECIAL = ("<s>", "</s>", "<|end|>")


@dataclass(frozen=True)
class TinyLlama:
    """Shape of a tiny model. Dimensions are multiples of 32, or of 256 for the K-quants."""

    layers: int = 2
    embedding: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    width: int = 96
    experts: int = 0
    used: int = 2
    weights: str = "f32"  # type of the matrices
    table: str = "f32"  # type of the token embeddings
    tied: bool = False  # no output.weight: the embeddings are the LM head too
    context: int = 1024
    arch: str = "llama"
    seed: int = 0


def write_tiny(path: Path, shape: TinyLlama | None = None) -> Path:
    """Writes the file and gives its path back."""
    shape = shape or TinyLlama()
    return write_gguf(path, metadata(shape), list(tensors(shape)))


def metadata(shape: TinyLlama) -> dict[str, object]:
    """Hyper-parameters and tokenizer."""
    arch = shape.arch
    values: dict[str, object] = {
        "general.architecture": arch,
        "general.name": "tiny",
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.embedding,
        f"{arch}.block_count": shape.layers,
        f"{arch}.feed_forward_length": shape.width,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": shape.head_dim,
        f"{arch}.rope.freq_base": 10000.0,
    }
    if shape.experts:
        values[f"{arch}.expert_count"] = shape.experts
        values[f"{arch}.expert_used_count"] = shape.used
    words = vocabulary()
    return values | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if word in SPECIAL else 1 for word in words],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": words.index(SPECIAL[0]),
        "tokenizer.ggml.eos_token_id": words.index(SPECIAL[1]),
        "tokenizer.ggml.add_bos_token": False,
    }


def vocabulary() -> list[str]:
    """A word per byte in GPT-2's alphabet, the results of the merges, and the special tokens."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    alphabet = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [*(alphabet[byte] for byte in range(256)), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


def tensors(shape: TinyLlama) -> Iterator[Tensor]:
    """All tensors, in file order. Weights are normal with a variance that keeps activations near one."""
    rng = np.random.default_rng(shape.seed)
    e, d = shape.embedding, shape.head_dim
    vocab = len(vocabulary())

    def matrix(name: str, columns: int, *rows: int, kind: str = shape.weights, gain: float = 1.0) -> Tensor:
        values = rng.standard_normal((*rows, columns)).astype(np.float32) * np.float32(gain * columns**-0.5)
        return encode(name, values, kind)

    def vector(name: str, size: int) -> Tensor:
        return f32(name, 1 + 0.1 * rng.standard_normal(size))

    yield matrix("token_embd.weight", e, vocab, kind=shape.table, gain=8.0)
    yield vector("output_norm.weight", e)
    if not shape.tied:
        yield matrix("output.weight", e, vocab, gain=4.0)
    for layer in range(shape.layers):
        p = f"blk.{layer}."
        yield vector(f"{p}attn_norm.weight", e)
        yield vector(f"{p}ffn_norm.weight", e)
        yield matrix(f"{p}attn_q.weight", e, shape.heads * d, gain=2.0)
        yield matrix(f"{p}attn_k.weight", e, shape.kv_heads * d, gain=2.0)
        yield matrix(f"{p}attn_v.weight", e, shape.kv_heads * d)
        yield matrix(f"{p}attn_output.weight", shape.heads * d, e)
        if shape.experts:
            yield matrix(f"{p}ffn_gate_inp.weight", e, shape.experts, kind="f32", gain=2.0)
            yield matrix(f"{p}ffn_gate_exps.weight", e, shape.experts, shape.width)
            yield matrix(f"{p}ffn_up_exps.weight", e, shape.experts, shape.width)
            yield matrix(f"{p}ffn_down_exps.weight", shape.width, shape.experts, e)
        else:
            yield matrix(f"{p}ffn_gate.weight", e, shape.width)
            yield matrix(f"{p}ffn_up.weight", e, shape.width)
            yield matrix(f"{p}ffn_down.weight", shape.width, e)


def encode(name: str, values: NDArray[np.float32], kind: str) -> Tensor:
    """A tensor of any type that ggml can quantize to without an importance matrix, from an array in numpy order."""
    if kind == "f32":
        return f32(name, values)
    columns, number = values.shape[-1], TYPES[kind]
    values = np.ascontiguousarray(values, np.float32)
    rows = values.size // columns
    out = np.empty(rows * lib.ggml_row_size(number, columns), np.uint8)
    source = ffi.cast("float *", ffi.from_buffer(values))
    lib.ggml_quantize_chunk(number, source, ffi.from_buffer(out), 0, rows, columns, ffi.NULL)
    return name, values.shape[::-1], number, out.tobytes()
