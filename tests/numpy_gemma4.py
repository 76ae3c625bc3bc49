"""Gemma 4 in float64, and the tensors of tiny F32 files to feed it with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gguf_writer import Tensor, f32
from tsgg.gguf import Metadata, read_gguf

Array = NDArray[np.float32]
Array64 = NDArray[np.float64]


def read_tensors(path: Path) -> dict[str, Array]:
    """All tensors of an F32 file, in numpy order."""
    return {
        name: np.fromfile(path, np.float32, info.nbytes // 4, offset=info.offset).reshape(info.shape[::-1])
        for name, info in read_gguf(path).tensors.items()
    }


def stored(weights: Mapping[str, Array]) -> list[Tensor]:
    return [f32(name, values) for name, values in weights.items()]


def gelu(x: Array64) -> Array64:
    """The tanh approximation, from half to half as ggml's table has it."""
    half = x.astype(np.float16).astype(np.float64)
    exact = 0.5 * half * (1 + np.tanh(np.sqrt(2 / np.pi) * half * (1 + 0.044715 * half * half)))
    return np.asarray(exact.astype(np.float16), np.float64)


class _Blocks:
    """What trunk and assistant share."""

    def __init__(self, metadata: Metadata, weights: Mapping[str, Array]) -> None:
        self.w = {name: values.astype(np.float64) for name, values in weights.items()}
        self.metadata, self.arch = metadata, metadata.architecture
        self.layers = int(self._key("block_count"))
        self.local = [bool(flag) for flag in self._key("attention.sliding_window_pattern")]

    def _query(self, i: int, h: Array64, first: int = 0) -> Array64:
        """[tokens, heads, channels], rotated; the first row stands at position `first`."""
        d = int(self._key("attention.key_length_swa" if self.local[i] else "attention.key_length"))
        q = (h @ self.w[f"blk.{i}.attn_q.weight"].T).reshape(len(h), -1, d)
        return self._rope(self._rms(q, f"blk.{i}.attn_q_norm.weight"), self.local[i], first)

    def _mix(self, q: Array64, k: Array64, v: Array64, hidden: NDArray[np.bool_]) -> Array64:
        """Unscaled attention without the (query, key) pairs that are `hidden`: [tokens, heads * channels]."""
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        q, k, v = (x.transpose(1, 0, 2) for x in (q, k, v))  # [heads, tokens, channels]
        scores = q @ k.transpose(0, 2, 1)
        scores[:, hidden] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.asarray((scores @ v).transpose(1, 0, 2).reshape(q.shape[1], -1), np.float64)

    def _geglu(self, i: int, x: Array64) -> Array64:
        h = self._rms(x, f"blk.{i}.ffn_norm.weight")
        gate, up = (h @ self.w[f"blk.{i}.ffn_{name}.weight"].T for name in ("gate", "up"))
        fed: Array64 = (gelu(gate) * up) @ self.w[f"blk.{i}.ffn_down.weight"].T
        return fed

    def _rms(self, x: Array64, name: str | None = None) -> Array64:
        result: Array64 = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
        return result if name is None else result * self.w[name]

    def _rope(self, x: Array64, local: bool, first: int = 0) -> Array64:
        d = x.shape[-1]
        base = float(self._key("rope.freq_base_swa" if local else "rope.freq_base"))
        angle = (first + np.arange(len(x)))[:, None, None] * base ** (-np.arange(0, d, 2) / d)
        if not local:
            angle = angle / self.w["rope_freqs.weight"]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)

    def _key(self, key: str) -> NDArray[Any]:
        return np.asarray(self.metadata[f"{self.arch}.{key}"])


class Gemma4(_Blocks):
    """Logits of a whole text, all rows at once; `caches` are those of the latest text."""

    def __init__(self, metadata: Metadata, weights: Mapping[str, Array]) -> None:
        super().__init__(metadata, weights)
        self.caches: dict[int, tuple[Array64, Array64]] = {}
        self.own = self.layers - int(self._key("attention.shared_kv_layers"))

    def hidden(self, tokens: list[int]) -> Array64:
        """[tokens, embedding] after the final norm."""
        w, t, e = self.w, len(tokens), int(self._key("embedding_length"))
        x = w["token_embd.weight"][tokens] * e**0.5
        p = int(self._key("embedding_length_per_layer_input"))
        if p:
            projected = (x @ w["per_layer_model_proj.weight"].T / e**0.5).reshape(t, self.layers, p)
            looked_up = w["per_layer_token_embd.weight"][tokens].reshape(t, self.layers, p) * p**0.5
            extra = (looked_up + self._rms(projected, "per_layer_proj_norm.weight")) / 2**0.5
        for i in range(self.layers):
            b = f"blk.{i}."
            attended = self._attend(i, self._rms(x, f"{b}attn_norm.weight"))
            x = x + self._rms(attended @ w[f"{b}attn_output.weight"].T, f"{b}post_attention_norm.weight")
            fed = self._feed(i, x)
            x = x + self._rms(fed, f"{b}post_ffw_norm.weight")
            if p:
                gate = gelu(x @ w[f"{b}inp_gate.weight"].T) * extra[:, i]
                x = x + self._rms(gate @ w[f"{b}proj.weight"].T, f"{b}post_norm.weight")
            x = x * w.get(f"{b}layer_output_scale.weight", 1.0)
        return self._rms(x, "output_norm.weight")

    def logits(self, tokens: list[int]) -> Array64:
        """[tokens, vocab] behind the soft cap."""
        rows: Array64 = self.hidden(tokens) @ self.w.get("output.weight", self.w["token_embd.weight"]).T
        cap = float(self._key("final_logit_softcapping"))
        return cap * np.tanh(rows / cap) if cap else rows

    def cache(self, i: int) -> tuple[Array64, Array64]:
        """Keys and values that layer i reads."""
        return self.caches[i if i < self.own else self.own - (2 if self.local[i] else 1)]

    def _attend(self, i: int, h: Array64) -> Array64:
        w, b, t, local = self.w, f"blk.{i}.", len(h), self.local[i]
        q = self._query(i, h)
        if i < self.own:
            raw = (h @ w[f"{b}attn_k.weight"].T).reshape(t, -1, q.shape[-1])
            values = (h @ w[f"{b}attn_v.weight"].T).reshape(raw.shape) if f"{b}attn_v.weight" in w else raw
            self.caches[i] = self._rope(self._rms(raw, f"{b}attn_k_norm.weight"), local), self._rms(values)
        distance = np.arange(t)[:, None] - np.arange(t)[None, :]
        hidden = (distance < 0) | (local & (distance >= int(self._key("attention.sliding_window"))))
        return self._mix(q, *self.cache(i), hidden)

    def _feed(self, i: int, x: Array64) -> Array64:
        w, b, fed = self.w, f"blk.{i}.", self._geglu(i, x)
        if f"{b}ffn_gate_inp.weight" not in w:
            return fed
        router = self._rms(x) / x.shape[1] ** 0.5 * w[f"{b}ffn_gate_inp.scale"]
        scores = np.exp(router @ w[f"{b}ffn_gate_inp.weight"].T)
        u, mixed = self._rms(x, f"{b}pre_ffw_norm_2.weight"), np.zeros_like(x)
        for row in range(len(x)):
            picks = np.argsort(-scores[row])[: int(self._key("expert_used_count"))]
            for pick in picks:
                gate, up = np.split(w[f"{b}ffn_gate_up_exps.weight"][pick] @ u[row], 2)
                share = scores[row, pick] / scores[row, picks].sum() * w[f"{b}ffn_down_exps.scale"][pick]
                mixed[row] += share * (w[f"{b}ffn_down_exps.weight"][pick] @ (gelu(gate) * up))
        mixed = self._rms(mixed, f"{b}post_ffw_norm_2.weight")
        return self._rms(fed, f"{b}post_ffw_norm_1.weight") + mixed


class Assistant(_Blocks):
    """reference/gemma.md section 3.3: one draft step behind a text that `target` has just read."""

    def step(self, target: Gemma4, token: int, hidden: Array64) -> tuple[Array64, Array64]:
        """Logits [vocab] and the next hidden row."""
        w, p = self.w, len(next(iter(target.caches.values()))[0])
        x = np.concatenate([target.w["token_embd.weight"][token] * len(hidden) ** 0.5, hidden])[None]
        x = x @ w["nextn.pre_projection.weight"].T
        for i, local in enumerate(self.local):
            b = f"blk.{i}."
            q = self._query(i, self._rms(x, f"{b}attn_norm.weight"), p)
            beyond = (p - np.arange(p) >= int(self._key("attention.sliding_window"))) & local
            attended = self._mix(q, *target.cache(target.layers - (2 if local else 1)), beyond[None])
            x = x + self._rms(attended @ w[f"{b}attn_output.weight"].T, f"{b}post_attention_norm.weight")
            x = x + self._rms(self._geglu(i, x), f"{b}post_ffw_norm.weight")
            x = x * w[f"{b}layer_output_scale.weight"]
        x = self._rms(x, "output_norm.weight")
        return (x @ w["token_embd.weight"].T)[0], (x @ w["nextn.post_projection.weight"].T)[0]
