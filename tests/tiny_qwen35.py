"""Tiny `qwen35` and `qwen35moe` files with seeded random weights, and the same network in float64 numpy.

The reference is written from the formulas, one row at a time: its state is what the arena's
must be after the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.gguf_writer import Tensor, f32, write_gguf
from tests.tiny_models import encode, vocabulary

Array = NDArray[np.float64]
EPS = 1e-6
BASE = 1e4
TAPS = 4


@dataclass(frozen=True)
class TinyQwen35:
    """Shape of a tiny hybrid. `recurrent` names the kind of every layer; None leaves it to the interval of 4."""

    layers: int = 4
    recurrent: tuple[bool, ...] | None = None
    embedding: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_dims: int = 16
    sections: tuple[int, ...] = (3, 3, 2, 0)
    key_heads: int = 2
    value_heads: int = 4
    state: int = 32
    width: int = 96
    experts: int = 0
    used: int = 2
    nextn: int = 0
    weights: str = "f32"  # type of the matrices
    tied: bool = False
    seed: int = 0

    @property
    def arch(self) -> str:
        return "qwen35moe" if self.experts else "qwen35"

    @property
    def kinds(self) -> tuple[bool, ...]:
        return self.recurrent or tuple((i + 1) % 4 != 0 for i in range(self.layers))

    @property
    def inner(self) -> int:
        return self.value_heads * self.state

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.state + self.inner


def write_qwen35(path: Path, shape: TinyQwen35 | None = None) -> Path:
    shape = shape or TinyQwen35()
    return write_gguf(path, metadata(shape), list(tensors(shape)))


def metadata(shape: TinyQwen35) -> dict[str, object]:
    a = shape.arch
    values: dict[str, object] = {
        "general.architecture": a,
        f"{a}.context_length": 4096,
        f"{a}.embedding_length": shape.embedding,
        f"{a}.block_count": shape.layers + shape.nextn,
        f"{a}.attention.head_count": shape.heads,
        f"{a}.attention.head_count_kv": shape.kv_heads,
        f"{a}.attention.key_length": shape.head_dim,
        f"{a}.attention.value_length": shape.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": EPS,
        f"{a}.rope.freq_base": BASE,
        f"{a}.rope.dimension_count": shape.rope_dims,
        f"{a}.rope.dimension_sections": list(shape.sections),
        f"{a}.ssm.conv_kernel": TAPS,
        f"{a}.ssm.state_size": shape.state,
        f"{a}.ssm.group_count": shape.key_heads,
        f"{a}.ssm.time_step_rank": shape.value_heads,
        f"{a}.ssm.inner_size": shape.inner,
        f"{a}.full_attention_interval": 4,
    }
    if shape.recurrent is not None:
        values[f"{a}.attention.recurrent_layers"] = [*shape.recurrent, *[False] * shape.nextn]
    if shape.nextn:
        values[f"{a}.nextn_predict_layers"] = shape.nextn
    if shape.experts:
        values[f"{a}.expert_count"] = shape.experts
        values[f"{a}.expert_used_count"] = shape.used
        values[f"{a}.expert_feed_forward_length"] = shape.width
        values[f"{a}.expert_shared_feed_forward_length"] = shape.width
    else:
        values[f"{a}.feed_forward_length"] = shape.width
    words = vocabulary()
    return values | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * len(words),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": len(words) - 1,
    }


def tensors(shape: TinyQwen35) -> Iterator[Tensor]:
    """All tensors, in file order."""
    rng = np.random.default_rng(shape.seed)
    e, vocab = shape.embedding, len(vocabulary())

    def matrix(name: str, columns: int, *rows: int, kind: str = shape.weights, gain: float = 1.0) -> Tensor:
        values = rng.standard_normal((*rows, columns)).astype(np.float32) * np.float32(gain * columns**-0.5)
        return encode(name, values, kind)

    def vector(name: str, size: int, spread: float = 0.1) -> Tensor:
        return f32(name, 1 + spread * rng.standard_normal(size))

    def feed(p: str) -> Iterator[Tensor]:
        n = shape.width
        if not shape.experts:
            yield matrix(f"{p}ffn_gate.weight", e, n)
            yield matrix(f"{p}ffn_up.weight", e, n)
            yield matrix(f"{p}ffn_down.weight", n, e)
            return
        yield matrix(f"{p}ffn_gate_inp.weight", e, shape.experts, kind="f32", gain=2.0)
        yield matrix(f"{p}ffn_gate_exps.weight", e, shape.experts, n)
        yield matrix(f"{p}ffn_up_exps.weight", e, shape.experts, n)
        yield matrix(f"{p}ffn_down_exps.weight", n, shape.experts, e)
        yield f32(f"{p}ffn_gate_inp_shexp.weight", rng.standard_normal(e) * e**-0.5)
        yield matrix(f"{p}ffn_gate_shexp.weight", e, n)
        yield matrix(f"{p}ffn_up_shexp.weight", e, n)
        yield matrix(f"{p}ffn_down_shexp.weight", n, e)

    def attention(p: str) -> Iterator[Tensor]:
        kv = shape.kv_heads * shape.head_dim
        yield matrix(f"{p}attn_q.weight", e, 2 * shape.heads * shape.head_dim, gain=2.0)
        yield matrix(f"{p}attn_k.weight", e, kv, gain=2.0)
        yield matrix(f"{p}attn_v.weight", e, kv)
        yield matrix(f"{p}attn_output.weight", shape.heads * shape.head_dim, e)
        yield vector(f"{p}attn_q_norm.weight", shape.head_dim)
        yield vector(f"{p}attn_k_norm.weight", shape.head_dim)

    def delta(p: str) -> Iterator[Tensor]:
        heads = shape.value_heads
        yield matrix(f"{p}attn_qkv.weight", e, shape.channels)
        yield matrix(f"{p}attn_gate.weight", e, shape.inner)
        yield f32(f"{p}ssm_conv1d.weight", 0.5 * rng.standard_normal((shape.channels, TAPS)))
        yield f32(f"{p}ssm_dt.bias", 0.5 * rng.standard_normal(heads))
        yield f32(f"{p}ssm_a", -np.exp(0.5 * rng.standard_normal(heads)))
        yield matrix(f"{p}ssm_beta.weight", e, heads)
        yield matrix(f"{p}ssm_alpha.weight", e, heads)
        yield vector(f"{p}ssm_norm.weight", shape.state)
        yield matrix(f"{p}ssm_out.weight", shape.inner, e)

    yield matrix("token_embd.weight", e, vocab, kind="f32", gain=8.0)
    yield vector("output_norm.weight", e)
    if not shape.tied:
        yield matrix("output.weight", e, vocab, gain=4.0)
    for layer in range(shape.layers + shape.nextn):
        p = f"blk.{layer}."
        yield vector(f"{p}attn_norm.weight", e)
        yield vector(f"{p}post_attention_norm.weight", e)
        yield from delta(p) if layer < shape.layers and shape.kinds[layer] else attention(p)
        yield from feed(p)
    for layer in range(shape.layers, shape.layers + shape.nextn):
        p = f"blk.{layer}.nextn."
        yield matrix(f"{p}eh_proj.weight", 2 * e, e)
        yield vector(f"{p}enorm.weight", e)
        yield vector(f"{p}hnorm.weight", e)
        yield vector(f"{p}shared_head_norm.weight", e)


# -- the same network in numpy -----------------------------------------------------------------------------------------


class Reference:
    """One sequence of an F32 file. `step` takes one token; states and caches are plain attributes."""

    def __init__(self, shape: TinyQwen35) -> None:
        self.shape = shape
        self.w = {
            name: np.frombuffer(raw, "<f4").reshape(ne[::-1]).astype(np.float64) for name, ne, _, raw in tensors(shape)
        }
        self.conv = {i: np.zeros((TAPS - 1, shape.channels)) for i in range(shape.layers)}  # oldest row first
        self.state = {
            i: np.zeros((shape.value_heads, shape.state, shape.state)) for i in range(shape.layers)
        }  # [h, v, k]
        self.keys: dict[int, list[Array]] = {i: [] for i in range(shape.layers + shape.nextn)}
        self.values: dict[int, list[Array]] = {i: [] for i in range(shape.layers + shape.nextn)}
        self.length = 0

    def step(self, token: int) -> tuple[Array, Array]:
        """Logits [vocab] and the hidden row [embedding] after one more token."""
        x = self.w["token_embd.weight"][token]
        for layer, recurrent in enumerate(self.shape.kinds):
            x = self._block(layer, x, recurrent, self.length)
        self.length += 1
        hidden = _norm(x, self.w["output_norm.weight"])
        return self.w.get("output.weight", self.w["token_embd.weight"]) @ hidden, hidden

    def draft_step(self, token: int, hidden: Array, position: int) -> tuple[Array, Array]:
        """The draft block on one row; its rows are the calls in order."""
        layer = self.shape.layers
        p = f"blk.{layer}.nextn."
        both = [_norm(self.w["token_embd.weight"][token], self.w[f"{p}enorm.weight"])]
        both.append(_norm(hidden, self.w[f"{p}hnorm.weight"]))
        x = self._block(layer, self.w[f"{p}eh_proj.weight"] @ np.concatenate(both), False, position)
        out = _norm(x, self.w[f"{p}shared_head_norm.weight"])
        return self.w.get("output.weight", self.w["token_embd.weight"]) @ out, out

    def _block(self, layer: int, x: Array, recurrent: bool, position: int) -> Array:
        p = f"blk.{layer}."
        u = _norm(x, self.w[f"{p}attn_norm.weight"])
        x = x + (self._delta(layer, u) if recurrent else self._attention(layer, u, position))
        u = _norm(x, self.w[f"{p}post_attention_norm.weight"])
        if not self.shape.experts:
            return x + self._swiglu(u, *(self.w[f"{p}ffn_{name}.weight"] for name in ("gate", "up", "down")))
        scores = self.w[f"{p}ffn_gate_inp.weight"] @ u
        weights = np.exp(scores - scores.max())
        picks = np.argsort(-weights)[: self.shape.used]
        for pick in picks:
            matrices = (self.w[f"{p}ffn_{name}_exps.weight"][pick] for name in ("gate", "up", "down"))
            x = x + weights[pick] / weights[picks].sum() * self._swiglu(u, *matrices)
        gate = _sigmoid(self.w[f"{p}ffn_gate_inp_shexp.weight"] @ u)
        return x + gate * self._swiglu(u, *(self.w[f"{p}ffn_{name}_shexp.weight"] for name in ("gate", "up", "down")))

    def _attention(self, layer: int, u: Array, position: int) -> Array:
        s, p = self.shape, f"blk.{layer}."
        both = (self.w[f"{p}attn_q.weight"] @ u).reshape(s.heads, 2, s.head_dim)
        q = self._rotate(_norm(both[:, 0], self.w[f"{p}attn_q_norm.weight"]), position)
        k = (self.w[f"{p}attn_k.weight"] @ u).reshape(s.kv_heads, s.head_dim)
        self.keys[layer].append(self._rotate(_norm(k, self.w[f"{p}attn_k_norm.weight"]), position))
        self.values[layer].append((self.w[f"{p}attn_v.weight"] @ u).reshape(s.kv_heads, s.head_dim))
        keys, values = np.stack(self.keys[layer]), np.stack(self.values[layer])
        out = np.empty((s.heads, s.head_dim))
        for head in range(s.heads):
            group = head // (s.heads // s.kv_heads)
            scores = keys[:, group] @ q[head] / np.sqrt(s.head_dim)
            weights = np.exp(scores - scores.max())
            out[head] = weights / weights.sum() @ values[:, group]
        return self.w[f"{p}attn_output.weight"] @ (out * _sigmoid(both[:, 1])).reshape(-1)

    def _rotate(self, x: Array, position: int) -> Array:
        half = self.shape.rope_dims // 2
        angle = position * BASE ** (-2 * np.arange(half) / self.shape.rope_dims)
        out: Array = x.copy()
        first, second = x[:, :half], x[:, half : 2 * half]
        out[:, :half] = first * np.cos(angle) - second * np.sin(angle)
        out[:, half : 2 * half] = first * np.sin(angle) + second * np.cos(angle)
        return out

    def _delta(self, layer: int, u: Array) -> Array:
        s, p = self.shape, f"blk.{layer}."
        rows = np.vstack([self.conv[layer], self.w[f"{p}attn_qkv.weight"] @ u])
        mixed = _silu((rows.T * self.w[f"{p}ssm_conv1d.weight"]).sum(1))
        self.conv[layer] = rows[1:]
        split = s.key_heads * s.state
        q, k = (mixed[i * split : (i + 1) * split].reshape(s.key_heads, s.state) for i in (0, 1))
        q, k = (x / np.sqrt((x**2).sum(1, keepdims=True) + EPS) for x in (q, k))
        v = mixed[2 * split :].reshape(s.value_heads, s.state)
        beta = _sigmoid(self.w[f"{p}ssm_beta.weight"] @ u)
        decay = np.log1p(np.exp(self.w[f"{p}ssm_alpha.weight"] @ u + self.w[f"{p}ssm_dt.bias"])) * self.w[f"{p}ssm_a"]
        out = np.empty((s.value_heads, s.state))
        for head in range(s.value_heads):
            shared = head % s.key_heads
            matrix = self.state[layer][head] * np.exp(decay[head])
            matrix = matrix + np.outer((v[head] - matrix @ k[shared]) * beta[head], k[shared])
            self.state[layer][head] = matrix
            out[head] = matrix @ q[shared] / np.sqrt(s.state)
        z = self.w[f"{p}attn_gate.weight"] @ u
        return self.w[f"{p}ssm_out.weight"] @ (_norm(out, self.w[f"{p}ssm_norm.weight"]).reshape(-1) * _silu(z))

    def _swiglu(self, u: Array, gate: Array, up: Array, down: Array) -> Array:
        result: Array = down @ (_silu(gate @ u) * (up @ u))
        return result


def _norm(x: Array, weight: Array) -> Array:
    result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight
    return result


def _sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)
