"""A llama in float64 numpy, written from the formulas: the independent reference for the tiny files.

Rope rotates neighbouring pairs (2i, 2i+1) of the first `dims` channels; experts are picked by a softmax over all of them and
their weights normalised. Any matrix may have a bias beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.gguf_writer import Tensor
from tests.tiny_models import TinyLlama

Array = NDArray[np.float64]
Weights = dict[str, Array]
EPS = 1e-5


@dataclass(frozen=True)
class Rope:
    """Angles of the rotary embedding, plain or stretched."""

    dims: int
    base: float = 10000.0
    factor: float = 1.0  # positions are divided by it
    yarn: float | None = None  # original context, in tokens: YaRN's blend of stretched and plain angles
    attention: float = 1.0  # further factor on the rotated channels under YaRN
    divisors: Array = field(default_factory=lambda: np.ones(1))  # per pair, of the frequency

    def rotate(self, x: Array) -> Array:
        """x [tokens, heads, channels]"""
        pair = np.arange(self.dims // 2)
        frequency = self.base ** (-2 * pair / self.dims) / self.divisors
        blend, size = np.zeros(len(pair)), 1.0
        if self.yarn is not None:
            slow, fast = (
                self.dims * math.log(self.yarn / (turns * 2 * math.pi)) / (2 * math.log(self.base)) for turns in (1, 32)
            )
            low, high = max(0, math.floor(fast)), min(self.dims - 1, math.ceil(slow))
            blend = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
            size = self.attention * (1 + 0.1 * math.log(self.factor))
        frequency = frequency / self.factor * (1 - blend) + frequency * blend
        angles = np.arange(len(x))[:, None, None] * frequency
        out: Array = x.copy()
        even, odd = x[..., 0 : self.dims : 2], x[..., 1 : self.dims : 2]
        out[..., 0 : self.dims : 2] = size * (even * np.cos(angles) - odd * np.sin(angles))
        out[..., 1 : self.dims : 2] = size * (even * np.sin(angles) + odd * np.cos(angles))
        return out


def values(tensors: Iterable[Tensor]) -> Weights:
    """F32 tensors of a file as arrays in numpy order."""
    found = {}
    for name, ne, kind, raw in tensors:
        assert kind == 0, "the reference reads F32 files"
        found[name] = np.frombuffer(raw, "<f4").reshape(tuple(ne)[::-1]).astype(np.float64)
    return found


def residuals(
    w: Weights, shape: TinyLlama, tokens: list[int], windows: tuple[int, ...] = (), rope: Rope | None = None
) -> list[Array]:
    """The residual stream [tokens, embedding] before every layer, and after the last. `windows`: per layer, 0 = none."""
    rope = rope or Rope(shape.head_dim)
    x = w["token_embd.weight"][tokens]
    found = [x]
    for layer in range(shape.layers):
        p = f"blk.{layer}."
        h = _norm(x, w[f"{p}attn_norm.weight"])
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = (_linear(w, f"{p}attn_{n}", h).reshape(len(x), m, -1) for n, m in zip("qkv", heads, strict=True))
        attended = _attention(rope.rotate(q), rope.rotate(k), v, windows[layer] if windows else 0)
        x = x + _linear(w, f"{p}attn_output", attended)
        h = _norm(x, w[f"{p}ffn_norm.weight"])
        x = x + (_mixture(w, p, h, shape.used) if shape.experts else _swiglu(w, p, h))
        found.append(x)
    return found


def head(w: Weights, residual: Array) -> tuple[Array, Array]:
    """(rows after the final norm, logits) of the residual that leaves the last layer."""
    hidden = _norm(residual, w["output_norm.weight"])
    return hidden, _linear(w, "output" if "output.weight" in w else "token_embd", hidden)


def _linear(w: Weights, name: str, x: Array) -> Array:
    return np.asarray(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0))


def _norm(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight)


def _attention(q: Array, k: Array, v: Array, window: int) -> Array:
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    distance = np.arange(len(q))[:, None] - np.arange(len(k))
    scores[:, (distance < 0) | ((distance >= window) if window else False)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1))


def _swiglu(w: Weights, p: str, x: Array) -> Array:
    gate = _linear(w, f"{p}ffn_gate", x)
    return _linear(w, f"{p}ffn_down", gate / (1 + np.exp(-gate)) * _linear(w, f"{p}ffn_up", x))


def _mixture(w: Weights, p: str, x: Array, used: int) -> Array:
    router = np.exp(_linear(w, f"{p}ffn_gate_inp", x))
    out = np.zeros_like(x)
    for row in range(len(x)):
        picks = np.argsort(-router[row])[:used]
        for pick in picks:
            expert = {f"{p}ffn_{n}.weight": w[f"{p}ffn_{n}_exps.weight"][pick] for n in ("gate", "up", "down")}
            out[row] += router[row, pick] / router[row, picks].sum() * _swiglu(expert, p, x[row])
    return out
