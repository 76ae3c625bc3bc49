"""`gemma4`: Gemma 3's layers with two head sizes, layers that read an earlier layer's cache, per-layer embeddings, experts.

One class for the dense, the E-series and the mixture files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tsgg.errors import ModelFileError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.gguf import Metadata, TensorInfo
from tsgg.models import blocks
from tsgg.models.base import MAX_CONTEXT, Architecture, Attention, Keys, Rope, Step, TensorSpec, Weights

SOFTCAP = 30.0  # where the file does not say
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
EXPERT_NORMS = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of one layer: those with a window have other heads and another rope than the full ones."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int  # tokens, 0 = full
    rope: Rope
    width: int  # of the (shared) feed-forward

    @property
    def projections(self) -> dict[str, int]:
        return {
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "v": self.kv_heads * self.value_dim,
        }


def read_layers(keys: Keys, count: int) -> tuple[Layer, ...]:
    """Sizes of all layers, from keys that Gemma 4 and its assistant share. Raises `ModelFileError`."""
    heads = keys.per_layer("attention.head_count", count)
    kv_heads = keys.per_layer("attention.head_count_kv", count, heads[0])
    widths = keys.per_layer("feed_forward_length", count)
    for many, few in zip(heads, kv_heads, strict=True):
        if many % few:
            raise ModelFileError(
                f"{keys.arch}: {few} KV heads for {many} heads, expected a divisor: convert the model again"
            )
    full_dims = _dims(keys, "")
    local_dims = _dims(keys, "_swa")
    window = keys.integer("attention.sliding_window", high=MAX_CONTEXT)
    rope = keys.rope(full_dims[0], neox=True)
    rotated = keys.integer("rope.dimension_count_swa", rope.dims)
    if rotated > local_dims[0] or rotated % 2:
        raise ModelFileError(
            f"{keys.arch}.rope.dimension_count_swa is {rotated}, expected an even number up to {local_dims[0]}: convert the "
            "model again"
        )
    local_rope = Rope(rotated, True, keys.number("rope.freq_base_swa", 10000.0, low=1e-3))
    return tuple(
        Layer(heads[i], kv_heads[i], *local_dims, window, local_rope, widths[i])
        if is_local
        else Layer(heads[i], kv_heads[i], *full_dims, 0, rope, widths[i])
        for i, is_local in enumerate(blocks.windowed_layers(keys, count))
    )


def _dims(keys: Keys, kind: str) -> tuple[int, int]:
    """Channels of a key and of a value."""
    key, value = (keys.integer(f"attention.{name}_length{kind}", high=1 << 14) for name in ("key", "value"))
    return key, value


def rope_specs(layers: tuple[Layer, ...]) -> Iterator[TensorSpec]:
    """Frequency factors, for full layers only: they turn most pairs off."""
    if full := next((layer for layer in layers if not layer.window), None):
        yield TensorSpec("rope_freqs.weight", (full.rope.dims // 2,), "vector")


def block_specs(prefix: str, embedding: int, layer: Layer, *, scaled: bool = False) -> Iterator[TensorSpec]:
    """What every layer has, but for its projections of queries, keys and values. `scaled`: it must have an output scale."""
    yield TensorSpec(f"{prefix}attn_q_norm.weight", (layer.head_dim,), "vector")
    yield TensorSpec(f"{prefix}attn_output.weight", (layer.heads * layer.value_dim, embedding))
    yield TensorSpec(f"{prefix}layer_output_scale.weight", (1,), "vector", optional=not scaled)
    for name in NORMS:
        yield TensorSpec(f"{prefix}{name}.weight", (embedding,), "vector")
    yield from blocks.swiglu_specs(prefix, embedding, layer.width)


def rotate(g: GraphBuilder, w: Weights, step: Step, layer: Layer, x: Tensor) -> Tensor:
    return g.rope(x, step.positions, layer.rope, None if layer.window else w["rope_freqs.weight"])


class Gemma4(Architecture):
    """Text models of E2B to 31B."""

    name: ClassVar[str] = "gemma4"

    def __init__(self, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> None:
        super().__init__(metadata, tensors)
        keys, n = self.keys, self.layers
        self.softcap = keys.number("final_logit_softcapping", SOFTCAP)
        self.kinds = read_layers(keys, n)
        self.own = n - keys.integer("attention.shared_kv_layers", 0, low=0, high=n - 1)  # layers with a cache
        self.donors = tuple(self._donor(layer) if layer >= self.own else None for layer in range(n))
        self.per_layer = keys.integer("embedding_length_per_layer_input", low=0, high=1 << 16)
        self.fused_qkv = tuple(f"blk.{i}.attn_qkv.weight" in tensors for i in range(n))
        self.tied_kv = tuple(
            not fused and f"blk.{i}.attn_v.weight" not in tensors for i, fused in enumerate(self.fused_qkv)
        )
        for i, (kind, tied) in enumerate(zip(self.kinds, self.tied_kv, strict=True)):
            if i < self.own and tied and kind.head_dim != kind.value_dim:
                raise ModelFileError(
                    f"tensor blk.{i}.attn_v.weight is missing, and keys of {kind.head_dim} channels cannot serve as values of "
                    f"{kind.value_dim}: convert the model again"
                )
        self.experts = self._experts(tensors)
        self.fused_experts = any(f"blk.{i}.ffn_gate_up_exps.weight" in tensors for i in self.experts)
        self.layer_nodes = 96

    def attention(self) -> list[Attention]:
        shapes = []
        for kind, donor in zip(self.kinds, self.donors, strict=True):
            kv_heads = kind.kv_heads if donor is None else self.kinds[donor].kv_heads
            shapes.append(Attention(kind.heads, kv_heads, kind.head_dim, kind.value_dim, kind.window, donor))
        return shapes

    def _donor(self, layer: int) -> int:
        """Whose cache a layer without one reads: the last layer of its kind that has one, by a fixed distance."""
        donor = self.own - (2 if self.kinds[layer].window else 1)
        if donor < 0 or bool(self.kinds[donor].window) != bool(self.kinds[layer].window):
            raise ModelFileError(
                f"{self.name}.attention.shared_kv_layers leaves {self.own} layers with a cache, expected that the last two "
                "have a window and none: convert the model again"
            )
        if self.kinds[layer].heads % self.kinds[donor].kv_heads:
            raise ModelFileError(
                f"{self.name}: layer {layer} has {self.kinds[layer].heads} heads, expected a multiple of the "
                f"{self.kinds[donor].kv_heads} KV heads of layer {donor}, whose cache it reads: convert the model again"
            )
        return donor

    def _experts(self, tensors: Mapping[str, TensorInfo]) -> dict[int, blocks.Experts]:
        """The mixture of each layer that has one."""
        layers = [i for i in range(self.layers) if f"blk.{i}.ffn_gate_inp.weight" in tensors]
        if not layers:
            return {}
        count = self.keys.integer("expert_count", high=1 << 12)
        used = self.keys.integer("expert_used_count", high=count)
        widths = self.keys.per_layer("expert_feed_forward_length", self.layers)
        return {i: blocks.Experts(count, used, widths[i]) for i in layers}

    # -- declarations ----------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[TensorSpec]:
        e, n, p = self.embedding, self.layers, self.per_layer
        yield TensorSpec("token_embd.weight", (e, 0), "table")
        yield TensorSpec("output_norm.weight", (e,), "vector")
        yield TensorSpec("output.weight", (e, self.vocab), optional=True)
        yield from rope_specs(self.kinds)
        if p:
            yield TensorSpec("per_layer_token_embd.weight", (p * n, self.vocab), "table")
            yield TensorSpec("per_layer_model_proj.weight", (e, p * n))
            yield TensorSpec("per_layer_proj_norm.weight", (p,), "vector")
        for layer in range(n):
            yield from self._layer_specs(layer, f"blk.{layer}.")

    def _layer_specs(self, layer: int, b: str) -> Iterator[TensorSpec]:
        e, p, kind = self.embedding, self.per_layer, self.kinds[layer]
        yield from block_specs(b, e, kind)
        sizes = kind.projections
        if not self.fused_qkv[layer]:
            sizes = {name: sizes[name] for name in self._projected(layer)}
        yield from blocks.qkv_specs(b, e, sizes, fused=self.fused_qkv[layer])
        if layer < self.own:
            yield TensorSpec(f"{b}attn_k_norm.weight", (kind.head_dim,), "vector")
        if p:
            yield TensorSpec(f"{b}inp_gate.weight", (e, p))
            yield TensorSpec(f"{b}proj.weight", (p, e))
            yield TensorSpec(f"{b}post_norm.weight", (e,), "vector")
        if (experts := self.experts.get(layer)) is not None:
            yield from blocks.mixture_specs(b, e, experts, fused=self.fused_experts)
            yield TensorSpec(f"{b}ffn_gate_inp.scale", (e,), "vector")
            yield TensorSpec(f"{b}ffn_down_exps.scale", (experts.count,), "vector", optional=True)
            for name in EXPERT_NORMS:
                yield TensorSpec(f"{b}{name}.weight", (e,), "vector")

    def _projected(self, layer: int) -> str:
        """Which of q, k and v the layer computes. A file may carry k and v of layers that use none."""
        return "q" if layer >= self.own else "qk" if self.tied_kv[layer] else "qkv"

    # -- graph -----------------------------------------------------------------------------------------------------

    def forward(self, g: GraphBuilder, w: Weights, step: Step) -> Tensor | None:
        x = g.scale(step.embed(w["token_embd.weight"]), self.embedding**0.5)
        extra = self._per_layer_inputs(g, w, step, x) if self.per_layer else None
        for layer in range(self.layers):
            step.tap(layer, x)
            b = f"blk.{layer}."
            attended = self._attend(g, w, step, layer, blocks.norm(g, x, w[f"{b}attn_norm.weight"], self.eps))
            if attended is None:
                return None
            if extra is None:
                attended, x = step.wanted(layer, attended, x)
            else:
                attended, x, mine = step.wanted(layer, attended, x, self._slice(g, extra, layer))
            attended = step.linear(w[f"{b}attn_output.weight"], attended)
            x = g.add(x, blocks.norm(g, attended, w[f"{b}post_attention_norm.weight"], self.eps))
            fed = self._feed(g, w, step, layer, x)
            x = g.add(x, blocks.norm(g, fed, w[f"{b}post_ffw_norm.weight"], self.eps))
            if extra is not None:
                gate = g.mul(g.gelu(step.linear(w[f"{b}inp_gate.weight"], x)), mine)
                x = g.add(
                    x, blocks.norm(g, step.linear(w[f"{b}proj.weight"], gate), w[f"{b}post_norm.weight"], self.eps)
                )
            if (scale := w.scalar(f"{b}layer_output_scale.weight")) is not None:
                x = g.scale(x, scale)
        step.tap(self.layers, x)
        return blocks.norm(g, x, w["output_norm.weight"], self.eps)

    def _attend(self, g: GraphBuilder, w: Weights, step: Step, layer: int, h: Tensor) -> Tensor | None:
        b, kind = f"blk.{layer}.", self.kinds[layer]
        sizes = {name: kind.projections[name] for name in self._projected(layer)}
        q, *kv = blocks.qkv(g, w, step, b, h, sizes)
        q = g.reshape(q, kind.head_dim, kind.heads, step.rows)
        q = rotate(g, w, step, kind, blocks.norm(g, q, w[f"{b}attn_q_norm.weight"], self.eps))
        if not kv:
            return step.attend(layer, q, None, None, 1.0)
        k = g.reshape(kv[0], kind.head_dim, kind.kv_heads, step.rows)
        v = g.reshape(
            kv[-1], kind.value_dim, kind.kv_heads, step.rows
        )  # without a projection of their own: the raw keys
        k = rotate(g, w, step, kind, blocks.norm(g, k, w[f"{b}attn_k_norm.weight"], self.eps))
        return step.attend(layer, q, k, g.rms_norm(v, self.eps), 1.0)  # the norms' weights carry the scale

    def _feed(self, g: GraphBuilder, w: Weights, step: Step, layer: int, x: Tensor) -> Tensor:
        """The feed-forward, and beside it the mixture where the layer has one."""
        b = f"blk.{layer}."
        fed = blocks.geglu(g, w, step, b, blocks.norm(g, x, w[f"{b}ffn_norm.weight"], self.eps))
        if (experts := self.experts.get(layer)) is None:
            return fed
        rows = int(x.ne[1])
        fed = blocks.norm(g, fed, w[f"{b}post_ffw_norm_1.weight"], self.eps)
        seen = g.mul(g.scale(g.rms_norm(x, self.eps), self.embedding**-0.5), w[f"{b}ffn_gate_inp.scale"])
        picks, weights = blocks.route(g, step.linear(w[f"{b}ffn_gate_inp.weight"], seen), experts)
        if (scale := w.get(f"{b}ffn_down_exps.scale")) is not None:
            scales = g.repeat(g.reshape(scale, 1, experts.count, 1), 1, experts.count, rows)
            weights = g.mul(weights, g.get_rows(scales, picks))
        mixed = blocks.norm(g, x, w[f"{b}pre_ffw_norm_2.weight"], self.eps)
        mixed = blocks.mix(g, w, b, mixed, picks, weights, experts, gelu=True)
        return g.add(fed, blocks.norm(g, mixed, w[f"{b}post_ffw_norm_2.weight"], self.eps))

    def _per_layer_inputs(self, g: GraphBuilder, w: Weights, step: Step, x: Tensor) -> Tensor:
        """Half looked up, half projected from the embedding: {per_layer, layers, rows}."""
        p, n, rows = self.per_layer, self.layers, step.rows
        looked_up = g.scale(g.reshape(step.embed(w["per_layer_token_embd.weight"]), p, n, rows), p**0.5)
        projected = g.scale(step.linear(w["per_layer_model_proj.weight"], x), self.embedding**-0.5)
        projected = blocks.norm(g, g.reshape(projected, p, n, rows), w["per_layer_proj_norm.weight"], self.eps)
        return g.scale(g.add(looked_up, projected), 0.5**0.5)

    def _slice(self, g: GraphBuilder, extra: Tensor, layer: int) -> Tensor:
        return g.view(extra, (self.per_layer, int(extra.ne[2])), (int(extra.nb[2]),), layer * int(extra.nb[1]))
