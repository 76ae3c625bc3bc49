"""`gemma4-assistant`: the draft head of Gemma 4, in a file of its own. It keeps nothing: its blocks read the target's caches.

Row of the token at position p: the target's embedding of it, and the target's hidden row (after the final norm) of position
p - 1. It predicts the token at p + 1, and a hidden row in the target's width that stands in for the next step's; p stays the
same for all steps of a draft. Facts: reference/gemma.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from tsgg.errors import ModelFileError
from tsgg.ggml.buffers import F32, Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.gguf import Metadata, TensorInfo
from tsgg.models import blocks
from tsgg.models.base import MAX_LAYERS, Architecture, Attention, Keys, Recurrent, Step, TensorSpec, Weights
from tsgg.models.gemma4 import Gemma4, Layer, block_specs, read_layers, rope_specs, rotate

TARGET_TABLE = "target.token_embd.weight"  # under this name the head is handed the target's embeddings
# Architecture names of converters before the present layout, with the names that they gave the tensors.
OLDER_DIALECTS = {"gemma4_assistant": "mtp.pre_projection", "gemma4_mtp": "mtp_pre_proj"}


class Gemma4Assistant(Architecture):
    """A few blocks without keys and values; its own embedding table is the LM head alone.

    `forward` takes the hidden row as the input `hidden` {target embedding, rows}, and offers the next one as the residual that
    leaves the last block.
    """

    name: ClassVar[str] = "gemma4-assistant"
    layer_nodes = 96

    def __init__(self, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> None:
        self.keys = keys = Keys(metadata, self.name)
        self.context = keys.integer("context_length", high=1 << 31)
        self.embedding = keys.integer("embedding_length", high=1 << 20)
        self.target_embedding = keys.integer("embedding_length_out", high=1 << 20)
        self.layers = keys.integer("block_count", high=MAX_LAYERS)
        drafting = keys.integer("nextn_predict_layers", high=MAX_LAYERS)
        if drafting != self.layers:
            raise ModelFileError(
                f"{self.name}.nextn_predict_layers is {drafting}, expected all {self.layers} blocks: convert the model again"
            )
        self.eps = keys.number("attention.layer_norm_rms_epsilon", high=1.0)
        table = tensors.get("token_embd.weight")
        self.vocab = table.shape[-1] if table is not None else 0
        self.kinds = read_layers(keys, self.layers)
        if any(kind.window == 1 for kind in self.kinds):
            raise ModelFileError(
                f"{self.name}.attention.sliding_window is 1, which shows a draft nothing: expected 2 or more"
            )

    def attention(self) -> list[Attention]:
        """What the caches must look like that the blocks read."""
        return [Attention(k.heads, k.kv_heads, k.head_dim, k.value_dim, k.window) for k in self.kinds]

    def donors(self, target: Architecture) -> tuple[int, ...]:
        """The target's layer whose cache each block reads: the last but one with a window, the last without."""
        return tuple(target.layers - (2 if kind.window else 1) for kind in self.kinds)

    def disagreements(self, target: Architecture) -> list[str]:
        """What keeps this head from drafting for `target`: fields with both values; empty where they fit."""
        if target.name != Gemma4.name or target.layers < 2:
            return [f"architecture {target.name} of {target.layers} layers (the drafter needs {Gemma4.name})"]
        pairs = [
            ("embedding_length_out", self.target_embedding, target.embedding),
            ("rows of token_embd.weight", self.vocab, target.vocab),
        ]
        layers = target.attention()
        for kind, donor in dict(zip(self.kinds, self.donors(target), strict=True)).items():
            pairs += _geometry(kind, layers[donor])
        return [
            f"{name} {own} (the target has {theirs})" for name, own, theirs in dict.fromkeys(pairs) if own != theirs
        ]

    # -- declarations ----------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[TensorSpec]:
        e, out = self.embedding, self.target_embedding
        yield TensorSpec("token_embd.weight", (e, 0))
        yield TensorSpec("output_norm.weight", (e,), "vector")
        yield TensorSpec("nextn.pre_projection.weight", (2 * out, e))
        yield TensorSpec("nextn.post_projection.weight", (e, out))
        yield from rope_specs(self.kinds)
        for layer, kind in enumerate(self.kinds):
            b = f"blk.{layer}."
            yield from block_specs(b, e, kind, scaled=True)
            yield TensorSpec(f"{b}attn_q.weight", (e, kind.projections["q"]))

    # -- graph -----------------------------------------------------------------------------------------------------

    def forward(self, g: GraphBuilder, w: Weights, step: Step) -> Tensor | None:
        token = g.scale(step.embed(w[TARGET_TABLE]), self.target_embedding**0.5)
        hidden = g.input("hidden", F32, self.target_embedding, step.rows)
        x = step.linear(w["nextn.pre_projection.weight"], g.concat(token, hidden, 0))
        for layer, kind in enumerate(self.kinds):
            b = f"blk.{layer}."
            q = step.linear(w[f"{b}attn_q.weight"], blocks.norm(g, x, w[f"{b}attn_norm.weight"], self.eps))
            q = g.reshape(q, kind.head_dim, kind.heads, step.rows)
            q = rotate(g, w, step, kind, blocks.norm(g, q, w[f"{b}attn_q_norm.weight"], self.eps))
            attended = step.attend(layer, q, None, None, 1.0)
            if attended is None:
                return None
            attended = step.linear(w[f"{b}attn_output.weight"], attended)
            x = g.add(x, blocks.norm(g, attended, w[f"{b}post_attention_norm.weight"], self.eps))
            fed = blocks.geglu(g, w, step, b, blocks.norm(g, x, w[f"{b}ffn_norm.weight"], self.eps))
            x = g.add(x, blocks.norm(g, fed, w[f"{b}post_ffw_norm.weight"], self.eps))
            scale = w.scalar(f"{b}layer_output_scale.weight")
            assert scale is not None  # `check` has refused a file without it
            x = g.scale(x, scale)
        x = blocks.norm(g, x, w["output_norm.weight"], self.eps)
        step.tap(self.layers, step.linear(w["nextn.post_projection.weight"], x))
        return x

    def logits(self, g: GraphBuilder, w: Weights, step: Step, hidden: Tensor) -> Tensor:
        """Without the target's soft cap, which changes no order."""
        return step.linear(w["token_embd.weight"], hidden)


def _geometry(kind: Layer, donor: Attention | Recurrent) -> list[tuple[str, int, int]]:
    """Fields of a block beside those of the layer whose cache it reads."""
    assert isinstance(donor, Attention)
    end = "_swa" if kind.window else ""
    return [
        ("attention.sliding_window", kind.window, donor.window),
        ("attention.head_count_kv", kind.kv_heads, donor.kv_heads),
        (f"attention.key_length{end}", kind.head_dim, donor.head_dim),
        (f"attention.value_length{end}", kind.value_dim, donor.value_dim),
    ]
