"""The NextN block (multi-token prediction) behind a `qwen35` trunk: a layer that guesses the token after the next.

Row of the token at position p: its embedding, and the trunk's hidden row (after the final norm) of position p - 1. It predicts
the token at p + 1; its own hidden row stands in for the trunk's when the guess is taken further.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from tsgg.errors import UnsupportedError
from tsgg.ggml.buffers import F32, Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.models import blocks
from tsgg.models.base import Architecture, Attention, Step, TensorSpec, Weights

if TYPE_CHECKING:
    from tsgg.models.qwen35 import Qwen35


class NextN(Architecture):
    """One full-attention layer with a cache of its own; embedding and head are the trunk's unless the block has its own."""

    name: ClassVar[str] = "nextn"

    def __init__(self, trunk: Qwen35) -> None:
        """Raises `UnsupportedError` for a file with several blocks: chains of them are another algorithm."""
        if trunk.announced != 1:
            raise UnsupportedError(
                f"{trunk.name}.nextn_predict_layers is {trunk.announced}: draft heads of one block are implemented"
            )
        self.trunk, self.prefix = trunk, f"blk.{trunk.layers}."
        self.keys, self.context, self.eps = trunk.keys, trunk.context, trunk.eps
        self.embedding, self.vocab = trunk.embedding, trunk.vocab
        self.layers = 1
        self.layer_nodes = trunk.layer_nodes

    def attention(self) -> list[Attention]:
        trunk = self.trunk
        return [Attention(trunk.heads, trunk.kv_heads, trunk.head_dim, trunk.head_dim)]

    def tensors(self) -> Iterator[TensorSpec]:
        """The block's own: what it shares is the trunk's to load."""
        e, p = self.embedding, self.prefix
        yield from self.trunk.block_specs(p, recurrent=False)
        yield TensorSpec(f"{p}nextn.eh_proj.weight", (2 * e, e))
        yield TensorSpec(f"{p}nextn.enorm.weight", (e,), "vector")
        yield TensorSpec(f"{p}nextn.hnorm.weight", (e,), "vector")
        yield TensorSpec(f"{p}nextn.shared_head_norm.weight", (e,), "vector", optional=True)
        yield TensorSpec(f"{p}nextn.embed_tokens.weight", (e, self.vocab), "table", optional=True)
        yield TensorSpec(f"{p}nextn.shared_head_head.weight", (e, self.vocab), optional=True)

    def forward(self, g: GraphBuilder, w: Weights, step: Step) -> Tensor | None:
        p = self.prefix
        table = w.get(f"{p}nextn.embed_tokens.weight") or w["token_embd.weight"]
        token = blocks.norm(g, step.embed(table), w[f"{p}nextn.enorm.weight"], self.eps)
        hidden = g.input("hidden", F32, self.embedding, step.rows)
        hidden = blocks.norm(g, hidden, w[f"{p}nextn.hnorm.weight"], self.eps)
        x = step.linear(w[f"{p}nextn.eh_proj.weight"], g.concat(token, hidden, 0))
        x = self.trunk.block(g, w, step, 0, p, x, recurrent=False)
        if x is None:
            return None
        return blocks.norm(g, x, w.get(f"{p}nextn.shared_head_norm.weight") or w["output_norm.weight"], self.eps)

    def logits(self, g: GraphBuilder, w: Weights, step: Step, hidden: Tensor) -> Tensor:
        own = w.get(f"{self.prefix}nextn.shared_head_head.weight")
        return step.linear(own or w.get("output.weight") or w["token_embd.weight"], hidden)
