"""`llama`: Llama 1 to 3, SmolLM, Mistral, and Mixtral-style mixtures. Also the base of the plain decoders beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from tsgg.errors import ModelFileError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.gguf import Metadata, TensorInfo
from tsgg.models import blocks
from tsgg.models.base import Architecture, Attention, Step, TensorSpec, Weights


class Llama(Architecture):
    """Pre-norm decoder: attention and SwiGLU (or experts), full attention, one rope for all layers.

    Class attributes are what sets its relatives apart: `neox` rope pairs, `qk_norm` (RMS norm of every query and key
    head before rope), `qkv_bias` ("no", "optional", "required").
    """

    name: ClassVar[str] = "llama"
    neox: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[str] = "optional"

    def __init__(self, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__(metadata, tensors)
        keys, n = self.keys, self.layers
        self.heads = keys.integer("attention.head_count", high=1 << 14)
        self.kv_heads = keys.integer("attention.head_count_kv", self.heads, high=self.heads)
        if self.heads % self.kv_heads:
            raise ModelFileError(f"{self.name}: {self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        if not keys.has("attention.key_length") and self.embedding % self.heads:
            raise ModelFileError(f"{self.name}: embedding length {self.embedding} is no multiple of {self.heads} heads")
        self.head_dim = keys.integer("attention.key_length", self.embedding // self.heads, high=1 << 14)
        self.value_dim = keys.integer("attention.value_length", self.embedding // self.heads, high=1 << 14)
        self.rope = keys.rope(self.head_dim, neox=self.neox)
        self.experts = self._experts()
        self.widths = () if self.experts else keys.per_layer("feed_forward_length", n)
        kv = self.kv_heads
        self.projections = {"q": self.heads * self.head_dim, "k": kv * self.head_dim, "v": kv * self.value_dim}
        self.fused_qkv = "blk.0.attn_qkv.weight" in tensors

    def _experts(self) -> blocks.Experts | None:
        count = self.keys.integer("expert_count", 0, low=0, high=1 << 14)
        if not count:
            return None
        used = self.keys.integer("expert_used_count", high=count)
        return blocks.Experts(count, used, self._expert_width(used))

    def _expert_width(self, used: int) -> int:
        return self.keys.integer("feed_forward_length", high=1 << 20)

    def attention(self) -> list[Attention]:
        return [Attention(self.heads, self.kv_heads, self.head_dim, self.value_dim)] * self.layers

    # -- declarations ----------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[TensorSpec]:
        e, d = self.embedding, self.head_dim
        yield TensorSpec("token_embd.weight", (e, 0), "table")
        yield TensorSpec("output_norm.weight", (e,), "vector")
        yield TensorSpec("output.weight", (e, self.vocab), optional=True)
        yield TensorSpec("output.bias", (self.vocab,), "vector", optional=True)
        if not self.neox:
            yield TensorSpec("rope_freqs.weight", (self.rope.dims // 2,), "vector", optional=True)
        for layer in range(self.layers):
            p = f"blk.{layer}."
            yield TensorSpec(f"{p}attn_norm.weight", (e,), "vector")
            yield TensorSpec(f"{p}ffn_norm.weight", (e,), "vector")
            yield from self._attention_specs(p)
            if self.qk_norm:
                yield TensorSpec(f"{p}attn_q_norm.weight", (d,), "vector")
                yield TensorSpec(f"{p}attn_k_norm.weight", (d,), "vector")
            if self.experts:
                yield from blocks.mixture_specs(p, e, self.experts)
            else:
                yield from blocks.swiglu_specs(p, e, self.widths[layer], biases=self.qkv_bias != "no")

    def _attention_specs(self, p: str) -> Iterator[TensorSpec]:
        e = self.embedding
        yield from blocks.qkv_specs(p, e, self.projections, fused=self.fused_qkv, bias=self.qkv_bias)
        yield TensorSpec(f"{p}attn_output.weight", (self.heads * self.value_dim, e))
        yield TensorSpec(f"{p}attn_output.bias", (e,), "vector", optional=True)

    # -- graph -----------------------------------------------------------------------------------------------------

    def forward(self, g: GraphBuilder, w: Weights, step: Step) -> Tensor | None:
        x = step.embed(w["token_embd.weight"])
        for layer in range(self.layers):
            step.tap(layer, x)
            p = f"blk.{layer}."
            attended = self._attend(g, w, step, layer, blocks.norm(g, x, w[f"{p}attn_norm.weight"], self.eps))
            if attended is None:
                return None
            attended, x = step.wanted(layer, attended, x)
            x = g.add(step.linear(w[f"{p}attn_output.weight"], attended, w.get(f"{p}attn_output.bias")), x)
            h = blocks.norm(g, x, w[f"{p}ffn_norm.weight"], self.eps)
            if self.experts:
                x = g.add(blocks.mixture(g, w, step, p, h, self.experts), x)
            else:
                x = g.add(blocks.swiglu(g, w, step, p, h), x)
        step.tap(self.layers, x)
        return blocks.norm(g, x, w["output_norm.weight"], self.eps)

    def _attend(self, g: GraphBuilder, w: Weights, step: Step, layer: int, h: Tensor) -> Tensor | None:
        p = f"blk.{layer}."
        q, k, v = blocks.qkv(g, w, step, p, h, self.projections)
        q = g.reshape(q, self.head_dim, self.heads, step.rows)
        k = g.reshape(k, self.head_dim, self.kv_heads, step.rows)
        v = g.reshape(v, self.value_dim, self.kv_heads, step.rows)
        if self.qk_norm:
            q = blocks.norm(g, q, w[f"{p}attn_q_norm.weight"], self.eps)
            k = blocks.norm(g, k, w[f"{p}attn_k_norm.weight"], self.eps)
        factors = w.get("rope_freqs.weight")
        q = g.rope(q, step.positions, self.rope, factors)
        k = g.rope(k, step.positions, self.rope, factors)
        return step.attend(layer, q, k, v, self.head_dim**-0.5)
