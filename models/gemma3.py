"""`gemma3`: sliding-window layers between full ones, a norm before and after both halves of a layer, GELU.

The file's norms carry their + 1 already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from tsgg.errors import ModelFileError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.gguf import Metadata, TensorInfo
from tsgg.models import blocks
from tsgg.models.base import MAX_CONTEXT, Architecture, Attention, Rope, Step, TensorSpec, Weights

PERIOD = 6  # layers from one full layer to the next, where the file does not say
LAYERS_27B = 62  # the one size whose queries are scaled by embedding / heads instead of the head's width


class Gemma3(Architecture):
    """Text models of 270M to 27B; a file without a window has full layers only, all with the global rope."""

    name: ClassVar[str] = "gemma3"

    def __init__(self, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__(metadata, tensors)
        keys, n = self.keys, self.layers
        self.heads = keys.integer("attention.head_count", high=1 << 14)
        self.kv_heads = keys.integer("attention.head_count_kv", self.heads, high=self.heads)
        if self.heads % self.kv_heads or self.embedding < self.heads:
            raise ModelFileError(
                f"{self.name}: {self.heads} heads over an embedding of {self.embedding} with {self.kv_heads} KV heads: "
                "expected KV heads that divide the heads, and no more heads than channels. Convert the model again."
            )
        even = self.embedding // self.heads
        self.head_dim = keys.integer("attention.key_length", even, high=1 << 14)
        self.value_dim = keys.integer("attention.value_length", even, high=1 << 14)
        self.scale = (even if n == LAYERS_27B else self.head_dim) ** -0.5
        self.widths = keys.per_layer("feed_forward_length", n)
        self.softcap = keys.number("final_logit_softcapping", 0.0)
        self.fused_qkv = "blk.0.attn_qkv.weight" in tensors
        self.projections = {
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "v": self.kv_heads * self.value_dim,
        }
        window = keys.integer("attention.sliding_window", 0, low=0, high=MAX_CONTEXT)
        local = blocks.windowed_layers(keys, n, PERIOD) if window else (False,) * n
        self.windows = tuple(window if is_local else 0 for is_local in local)
        rope = keys.rope(self.head_dim, neox=True)  # position scaling is the full layers' alone
        local_rope = Rope(rope.dims, True, keys.number("rope.freq_base_swa", 10000.0, low=1e-3))
        self.ropes = tuple(local_rope if is_local else rope for is_local in local)

    def attention(self) -> list[Attention]:
        full = Attention(self.heads, self.kv_heads, self.head_dim, self.value_dim)
        return [replace(full, window=window) for window in self.windows]

    # -- declarations ----------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[TensorSpec]:
        e, d = self.embedding, self.head_dim
        yield TensorSpec("token_embd.weight", (e, 0), "table")
        yield TensorSpec("output_norm.weight", (e,), "vector")
        yield TensorSpec("output.weight", (e, self.vocab), optional=True)
        for layer in range(self.layers):
            p = f"blk.{layer}."
            yield from blocks.qkv_specs(p, e, self.projections, fused=self.fused_qkv)
            yield TensorSpec(f"{p}attn_output.weight", (self.heads * self.value_dim, e))
            for name in ("attn_q_norm", "attn_k_norm"):
                yield TensorSpec(f"{p}{name}.weight", (d,), "vector")
            for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                yield TensorSpec(f"{p}{name}.weight", (e,), "vector")
            yield from blocks.swiglu_specs(p, e, self.widths[layer])

    # -- graph -----------------------------------------------------------------------------------------------------

    def forward(self, g: GraphBuilder, w: Weights, step: Step) -> Tensor | None:
        x = g.scale(step.embed(w["token_embd.weight"]), self.embedding**0.5)
        for layer in range(self.layers):
            step.tap(layer, x)
            p = f"blk.{layer}."
            attended = self._attend(g, w, step, layer, blocks.norm(g, x, w[f"{p}attn_norm.weight"], self.eps))
            if attended is None:
                return None
            attended, x = step.wanted(layer, attended, x)
            attended = step.linear(w[f"{p}attn_output.weight"], attended)
            x = g.add(blocks.norm(g, attended, w[f"{p}post_attention_norm.weight"], self.eps), x)
            fed = blocks.geglu(g, w, step, p, blocks.norm(g, x, w[f"{p}ffn_norm.weight"], self.eps))
            x = g.add(blocks.norm(g, fed, w[f"{p}post_ffw_norm.weight"], self.eps), x)
        step.tap(self.layers, x)
        return blocks.norm(g, x, w["output_norm.weight"], self.eps)

    def _attend(self, g: GraphBuilder, w: Weights, step: Step, layer: int, h: Tensor) -> Tensor | None:
        p, rope = f"blk.{layer}.", self.ropes[layer]
        q, k, v = blocks.qkv(g, w, step, p, h, self.projections)
        q = g.reshape(q, self.head_dim, self.heads, step.rows)
        k = g.reshape(k, self.head_dim, self.kv_heads, step.rows)
        v = g.reshape(v, self.value_dim, self.kv_heads, step.rows)
        q = g.rope(blocks.norm(g, q, w[f"{p}attn_q_norm.weight"], self.eps), step.positions, rope)
        k = g.rope(blocks.norm(g, k, w[f"{p}attn_k_norm.weight"], self.eps), step.positions, rope)
        return step.attend(layer, q, k, v, self.scale)
