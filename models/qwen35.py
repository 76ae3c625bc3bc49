"""`qwen35`, `qwen35moe` (Qwen 3.5 to 3.8): three layers of gated delta rule to one of gated attention, dense or mixture.

The file's norms carry their + 1 already, and its value heads are tiled: head h reads key head
h % key heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from tsgg.errors import ModelFileError, UnsupportedError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.gguf import Metadata, TensorInfo
from tsgg.models import blocks
from tsgg.models.base import Architecture, Attention, Keys, Recurrent, Step, TensorSpec, Weights
from tsgg.models.qwen35_mtp import NextN

INTERVAL = 4  # layers from one full attention to the next, where the file does not say
FLOAT = 4  # bytes of an activation


class Qwen35(Architecture):
    """The dense trunk. What `nextn_predict_layers` counts is no part of it: see `draft_block`."""

    name: ClassVar[str] = "qwen35"
    preferred_draft_window = 3  # a verify keeps the recurrent state after every row

    def __init__(self, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__(metadata, tensors)
        keys = self.keys
        self.heads = keys.integer("attention.head_count", high=1 << 14)
        self.kv_heads = keys.integer("attention.head_count_kv", self.heads, high=self.heads)
        self.head_dim = keys.integer("attention.key_length", high=1 << 14)
        value_dim = keys.integer("attention.value_length", self.head_dim, high=1 << 14)
        if self.heads % self.kv_heads or value_dim != self.head_dim:
            raise ModelFileError(
                f"{self.name}: {self.heads} heads of {self.head_dim} over {self.kv_heads} KV heads of {value_dim}: expected "
                "KV heads that divide the heads, and keys as wide as values. Convert the model again."
            )
        self.rope = keys.rope(self.head_dim, neox=True)
        _check_sections(keys, self.rope.dims)
        self.taps = keys.integer("ssm.conv_kernel", low=2, high=64)
        self.state_size = keys.integer("ssm.state_size", high=1 << 12)
        self.key_heads = keys.integer("ssm.group_count", high=1 << 12)
        self.value_heads = keys.integer("ssm.time_step_rank", high=1 << 12)
        self.inner = keys.integer("ssm.inner_size", high=1 << 24)
        if self.value_heads % self.key_heads or self.inner != self.value_heads * self.state_size:
            raise ModelFileError(
                f"{self.name}: ssm.inner_size {self.inner} with {self.value_heads} heads of {self.state_size} over "
                f"{self.key_heads} key heads: expected heads x size, and key heads that divide the heads. Convert the model again."
            )
        self.channels = 2 * self.key_heads * self.state_size + self.inner  # of the convolution: queries, keys, values
        self.recurrent = self._recurrent_layers()
        self.tensor_names = frozenset(tensors)
        self.experts = self._experts()
        self.layer_nodes = 96 + (2 * self.experts.used + 32 if self.experts else 0)
        self.announced = keys.integer("nextn_predict_layers", 0, low=0)

    def _recurrent_layers(self) -> tuple[bool, ...]:
        keys, name = self.keys, "attention.recurrent_layers"
        if not keys.has(name):
            interval = keys.integer("full_attention_interval", INTERVAL, high=1 << 10)
            return tuple((layer + 1) % interval != 0 for layer in range(self.layers))
        flags = keys.metadata.get_array(f"{keys.arch}.{name}")
        if flags.dtype.kind not in "biu" or len(flags) < self.layers or np.any(flags[self.layers :]):
            raise ModelFileError(
                f"{keys.arch}.{name} has {len(flags)} entries of {flags.dtype.name}, expected a bool for each of {self.layers} "
                "layers, and false for draft blocks behind them: convert the model again"
            )
        return tuple(bool(flag) for flag in flags[: self.layers].tolist())

    def _experts(self) -> blocks.Experts | None:
        self.width = self.keys.integer("feed_forward_length", high=1 << 20)
        return None

    def attention(self) -> list[Attention | Recurrent]:
        full = Attention(self.heads, self.kv_heads, self.head_dim, self.head_dim)
        state = Recurrent(self.channels, self.taps, self.value_heads, self.state_size, self.state_size)
        return [state if recurrent else full for recurrent in self.recurrent]

    def draft_block(self) -> Architecture | None:
        return NextN(self) if self.announced else None

    # -- declarations ----------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[TensorSpec]:
        e = self.embedding
        yield TensorSpec("token_embd.weight", (e, 0), "table")
        yield TensorSpec("output_norm.weight", (e,), "vector")
        yield TensorSpec("output.weight", (e, self.vocab), optional=True)
        for layer, recurrent in enumerate(self.recurrent):
            yield from self.block_specs(f"blk.{layer}.", recurrent)

    def block_specs(self, p: str, recurrent: bool) -> Iterator[TensorSpec]:
        """Tensors of one block; a draft block has the same as a full-attention layer."""
        scaled = next((name for name in self.tensor_names if name.startswith(p) and name.endswith(".scale")), None)
        if scaled is not None:
            raise UnsupportedError(
                f"{self.name}: tensor {scaled}: weights with a scale beside them are not implemented"
            )
        e = self.embedding
        yield TensorSpec(f"{p}attn_norm.weight", (e,), "vector")
        yield TensorSpec(f"{p}post_attention_norm.weight", (e,), "vector")
        yield from self._delta_specs(p) if recurrent else self._attention_specs(p)
        if self.experts is None:
            yield from blocks.swiglu_specs(p, e, self.width)
        else:
            yield from self._mixture_specs(p, self.experts)

    def _attention_specs(self, p: str) -> Iterator[TensorSpec]:
        fused = f"{p}attn_qkv.weight" in self.tensor_names
        yield from blocks.qkv_specs(p, self.embedding, self._projections(), fused=fused)
        yield TensorSpec(f"{p}attn_output.weight", (self.heads * self.head_dim, self.embedding))
        for name in ("attn_q_norm", "attn_k_norm"):
            yield TensorSpec(f"{p}{name}.weight", (self.head_dim,), "vector")

    def _delta_specs(self, p: str) -> Iterator[TensorSpec]:
        e, heads = self.embedding, self.value_heads
        yield TensorSpec(f"{p}attn_qkv.weight", (e, self.channels))
        yield TensorSpec(f"{p}attn_gate.weight", (e, self.inner))
        yield TensorSpec(f"{p}ssm_conv1d.weight", (self.taps, self.channels), "vector")
        yield TensorSpec(f"{p}ssm_dt.bias", (heads,), "vector")
        yield TensorSpec(f"{p}ssm_a", (heads,), "vector")
        yield TensorSpec(f"{p}ssm_beta.weight", (e, heads))
        yield TensorSpec(f"{p}ssm_alpha.weight", (e, heads))
        yield TensorSpec(f"{p}ssm_norm.weight", (self.state_size,), "vector")
        yield TensorSpec(f"{p}ssm_out.weight", (self.inner, e))

    def _mixture_specs(self, p: str, experts: blocks.Experts) -> Iterator[TensorSpec]:
        raise NotImplementedError

    def _projections(self) -> dict[str, int]:
        kv = self.kv_heads * self.head_dim
        return {"q": 2 * self.heads * self.head_dim, "k": kv, "v": kv}  # of each head first the query, then its gate

    # -- graph -----------------------------------------------------------------------------------------------------

    def forward(self, g: GraphBuilder, w: Weights, step: Step) -> Tensor | None:
        x = step.embed(w["token_embd.weight"])
        for layer, recurrent in enumerate(self.recurrent):
            step.tap(layer, x)
            x = self.block(g, w, step, layer, f"blk.{layer}.", x, recurrent)
            if x is None:
                return None
        step.tap(self.layers, x)
        return blocks.norm(g, x, w["output_norm.weight"], self.eps)

    def block(
        self, g: GraphBuilder, w: Weights, step: Step, layer: int, p: str, x: Tensor, recurrent: bool
    ) -> Tensor | None:
        """One block: its tensors start with `p`, memory knows it as `layer`. None as with `Step.attend`."""
        mix, out = (self._delta, "ssm_out") if recurrent else (self._attend, "attn_output")
        mixed = mix(g, w, step, layer, p, blocks.norm(g, x, w[f"{p}attn_norm.weight"], self.eps))
        if mixed is None:
            return None
        mixed, x = step.wanted(layer, mixed, x)
        x = g.add(step.linear(w[f"{p}{out}.weight"], mixed), x)
        return g.add(self._feed(g, w, step, p, blocks.norm(g, x, w[f"{p}post_attention_norm.weight"], self.eps)), x)

    def _attend(self, g: GraphBuilder, w: Weights, step: Step, layer: int, p: str, h: Tensor) -> Tensor | None:
        d, rows = self.head_dim, step.rows
        both, k, v = blocks.qkv(g, w, step, p, h, self._projections())
        strides = (2 * d * FLOAT, 2 * d * self.heads * FLOAT)
        q = blocks.norm(g, g.view(both, (d, self.heads, rows), strides), w[f"{p}attn_q_norm.weight"], self.eps)
        gate = g.view(both, (d, self.heads, rows), strides, d * FLOAT)
        k = blocks.norm(g, g.reshape(k, d, self.kv_heads, rows), w[f"{p}attn_k_norm.weight"], self.eps)
        q, k = g.rope(q, step.positions, self.rope), g.rope(k, step.positions, self.rope)
        attended = step.attend(layer, q, k, g.reshape(v, d, self.kv_heads, rows), d**-0.5)
        if attended is None:
            return None
        return g.mul(attended, g.sigmoid(g.reshape(g.cont(gate), d * self.heads, rows)))

    def _delta(self, g: GraphBuilder, w: Weights, step: Step, layer: int, p: str, h: Tensor) -> Tensor | None:
        d, rows, row = self.state_size, step.rows, self.channels * FLOAT
        z = step.linear(w[f"{p}attn_gate.weight"], h)
        beta = g.sigmoid(step.linear(w[f"{p}ssm_beta.weight"], h))
        decay = g.softplus(step.linear(w[f"{p}ssm_alpha.weight"], h, w[f"{p}ssm_dt.bias"]))
        decay = g.mul(decay, w[f"{p}ssm_a"])  # the logarithm: ssm_a is -exp(A)
        mixed = step.linear(w[f"{p}attn_qkv.weight"], h)
        mixed = g.silu(step.convolve(layer, mixed, w[f"{p}ssm_conv1d.weight"]))
        # x / sqrt(sum of squares + eps), for query and key heads at once
        qk = g.rms_norm(g.view(mixed, (d, 2 * self.key_heads, rows), (d * FLOAT, row)), self.eps / d)
        qk = g.scale(qk, d**-0.5)
        strides = (d * FLOAT, 2 * self.key_heads * d * FLOAT)
        q, k = (g.view(qk, (d, self.key_heads, rows), strides, i * self.key_heads * d * FLOAT) for i in (0, 1))
        v = g.view(mixed, (d, self.value_heads, rows), (d * FLOAT, row), 2 * self.key_heads * d * FLOAT)
        out = step.delta_net(layer, q, k, v, decay, beta)
        if out is None:
            return None
        out = blocks.norm(g, g.reshape(out, d, self.value_heads, rows), w[f"{p}ssm_norm.weight"], self.eps)
        return g.swiglu_split(z, g.reshape(out, self.inner, rows))

    def _feed(self, g: GraphBuilder, w: Weights, step: Step, p: str, h: Tensor) -> Tensor:
        return blocks.swiglu(g, w, step, p, h)


class Qwen35MoE(Qwen35):
    """Every layer a mixture, beside an expert that all rows go through, behind a gate of one number."""

    name: ClassVar[str] = "qwen35moe"

    def _experts(self) -> blocks.Experts | None:
        keys = self.keys
        count = keys.integer("expert_count", high=1 << 14)
        used = keys.integer("expert_used_count", high=count)
        whole = keys.integer("feed_forward_length", 0, low=0, high=1 << 20)
        width = keys.integer("expert_feed_forward_length", whole // used or None, high=1 << 20)
        self.shared_width = keys.integer("expert_shared_feed_forward_length", whole or None, high=1 << 20)
        return blocks.Experts(count, used, width)

    def _mixture_specs(self, p: str, experts: blocks.Experts) -> Iterator[TensorSpec]:
        e, shared = self.embedding, self.shared_width
        fused = f"{p}ffn_gate_up_exps.weight" in self.tensor_names
        yield from blocks.mixture_specs(p, e, experts, fused=fused)
        yield TensorSpec(f"{p}ffn_gate_inp_shexp.weight", (e, 1))
        yield TensorSpec(f"{p}ffn_gate_shexp.weight", (e, shared))
        yield TensorSpec(f"{p}ffn_up_shexp.weight", (e, shared))
        yield TensorSpec(f"{p}ffn_down_shexp.weight", (shared, e))

    def _feed(self, g: GraphBuilder, w: Weights, step: Step, p: str, h: Tensor) -> Tensor:
        assert self.experts is not None
        routed = blocks.mixture(g, w, step, p, h, self.experts)
        inner = g.swiglu_split(
            step.linear(w[f"{p}ffn_gate_shexp.weight"], h), step.linear(w[f"{p}ffn_up_shexp.weight"], h)
        )
        shared = step.linear(w[f"{p}ffn_down_shexp.weight"], inner)
        gate = g.sigmoid(step.linear(w[f"{p}ffn_gate_inp_shexp.weight"], h))  # {1, rows}
        return g.add(routed, g.mul(shared, gate))


def _check_sections(keys: Keys, dims: int) -> None:
    """M-RoPE turns a pair by one of four positions, of which a text's token has three alike: then it is plain rope.

    Pair j goes by place j modulo the sum of the sections; the fourth position, that of uncovered pairs, is 0 in text.
    """
    name = f"{keys.arch}.rope.dimension_sections"
    value = keys.metadata.get(name)
    value = np.full(4, value) if isinstance(value, int) else value
    sections = value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "iu" else None
    if sections is None or len(sections) != 4 or min(sections) < 0 or not 0 < sum(sections) <= 1 << 12:
        raise ModelFileError(
            f"{name} is {value!r}, expected four integers such as [11, 11, 10, 0]: convert the model again"
        )
    for pair in range(dims // 2):
        place = pair % sum(sections)
        if place >= 3 * sections[place % 3]:
            raise UnsupportedError(
                f"{name} is {sections}: it leaves pair {pair} of {dims // 2} without a text position, which is not implemented"
            )
