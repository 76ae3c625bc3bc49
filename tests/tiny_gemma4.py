"""Tiny `gemma4` trunks (dense, E-like, mixture) with an assistant that often guesses right: seeded weights, F32.

The trunk walks: its LM head holds, in the row of a token, the embedding of the token before it on one way through the
vocabulary, and its blocks add little, though enough to leave the way here and there. The assistant's projection keeps most of
that embedding, so it knows the way, and like the trunk its blocks (which read the trunk's caches) turn it off at times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.gguf_writer import Tensor, f32, write_gguf

Array = NDArray[np.float32]

EMBEDDING, HEADS, LOCAL_DIM, FULL_DIM, WIDTH = 64, 4, 32, 64, 96
HEAD_EMBEDDING, HEAD_BLOCKS, HEAD_WIDTH = 48, 4, 64
PER_LAYER, EXPERTS, EXPERT_WIDTH = 16, 8, 48
WINDOW = 4  # tokens
SPECIAL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<|tool_response>",
)
TYPES = (3, 3, 3, 2, 3, 3, 4, 4, 3, 4)
MERGES = ("h e", "l l", "he ll", "hell o", "▁ w", "o r", "▁w or")
WALKED = range(24, 300)  # tokens on the way; the others lead to themselves
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)


@dataclass(frozen=True)
class TinyGemma4:
    """kind: "dense", "e" (per-layer embeddings, shared caches) or "moe"."""

    kind: str = "dense"
    head_gain: float = 0.25  # of the assistant, as `gain`
    context: int = 4096
    seed: int = 0

    @property
    def local(self) -> list[bool]:
        """Per layer, whether it has a window."""
        return ([True] * 4 + [False]) * 2 if self.kind == "e" else [True] * 5 + [False]

    @property
    def gain(self) -> float:
        """What a block adds, of the stream's one: enough to leave the way at times."""
        return 0.13 if self.kind == "e" else 0.25

    @property
    def shared(self) -> int:
        return 5 if self.kind == "e" else 0

    def kv_heads(self, local: bool) -> int:
        return 2 if self.kind == "e" or not local else 4


def write_pair(folder: Path, shape: TinyGemma4) -> tuple[Path, Path]:
    """Files of the trunk and of its assistant."""
    return (
        write_gguf(folder / "target.gguf", target_metadata(shape), list(target_tensors(shape))),
        write_gguf(folder / "assistant.gguf", assistant_metadata(shape), list(assistant_tensors(shape))),
    )


def vocabulary() -> list[str]:
    letters = ["\n", "▁", *(chr(code) for code in range(ord("a"), ord("z") + 1))]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(m.replace(" ", "") for m in MERGES)]
    return [*words[: WALKED.stop - 1], "!"]


def target_metadata(shape: TinyGemma4) -> dict[str, object]:
    a = "gemma4"
    values = _shared_keys(a, shape, EMBEDDING, shape.local) | {
        f"{a}.feed_forward_length": [WIDTH * (2 if i >= 5 else 1) for i in range(10)] if shape.kind == "e" else WIDTH,
        f"{a}.attention.shared_kv_layers": shape.shared,
        f"{a}.embedding_length_per_layer_input": PER_LAYER if shape.kind == "e" else 0,
        f"{a}.final_logit_softcapping": 30.0,
    }
    if shape.kind == "moe":
        values |= {f"{a}.expert_count": EXPERTS, f"{a}.expert_used_count": 2}
        values[f"{a}.expert_feed_forward_length"] = EXPERT_WIDTH
    words = vocabulary()
    normal = len(words) - len(TYPES) - 256
    return values | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [*TYPES, *[6] * 256, *[1] * normal],
        "tokenizer.ggml.merges": list(MERGES[:3]),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def assistant_metadata(shape: TinyGemma4) -> dict[str, object]:
    a = "gemma4-assistant"
    return _shared_keys(a, shape, HEAD_EMBEDDING, [True] * 3 + [False]) | {
        f"{a}.embedding_length_out": EMBEDDING,
        f"{a}.nextn_predict_layers": HEAD_BLOCKS,
        f"{a}.feed_forward_length": HEAD_WIDTH,
        f"{a}.vocab_size": WALKED.stop,
        "tokenizer.ggml.model": "no_vocab",
    }


def _shared_keys(a: str, shape: TinyGemma4, embedding: int, local: list[bool]) -> dict[str, object]:
    return {
        "general.architecture": a,
        f"{a}.context_length": shape.context,
        f"{a}.embedding_length": embedding,
        f"{a}.block_count": len(local),
        f"{a}.attention.head_count": HEADS,
        f"{a}.attention.head_count_kv": [shape.kv_heads(flag) for flag in local],
        f"{a}.attention.key_length": FULL_DIM,
        f"{a}.attention.value_length": FULL_DIM,
        f"{a}.attention.key_length_swa": LOCAL_DIM,
        f"{a}.attention.value_length_swa": LOCAL_DIM,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{a}.attention.sliding_window": WINDOW,
        f"{a}.attention.sliding_window_pattern": local,
        f"{a}.rope.freq_base": 1e6,
        f"{a}.rope.freq_base_swa": 1e4,
        f"{a}.rope.dimension_count": FULL_DIM,
        f"{a}.rope.dimension_count_swa": LOCAL_DIM,
    }


# -- tensors -----------------------------------------------------------------------------------------------------------


class _Draws:
    """Random tensors, in the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def matrix(self, name: str, columns: int, *rows: int) -> Tensor:
        return f32(name, self.rng.standard_normal((*rows, columns)) * columns**-0.5)

    def vector(self, name: str, size: int, mean: float = 1.0) -> Tensor:
        return f32(name, mean * (1 + 0.1 * self.rng.standard_normal(size)))

    def block(self, b: str, embedding: int, head_dim: int, width: int, gain: float) -> Iterator[Tensor]:
        """What blocks of trunk and assistant have in common; the norms behind a sub-block say what it adds."""
        yield self.matrix(f"{b}attn_q.weight", embedding, HEADS * head_dim)
        yield self.matrix(f"{b}attn_output.weight", HEADS * head_dim, embedding)
        yield self.vector(f"{b}attn_q_norm.weight", head_dim, 0.35)  # attention has no scale of its own
        yield self.vector(f"{b}attn_norm.weight", embedding)
        yield self.vector(f"{b}ffn_norm.weight", embedding)
        yield self.vector(f"{b}post_attention_norm.weight", embedding, gain)
        yield self.vector(f"{b}post_ffw_norm.weight", embedding, gain)
        yield f32(f"{b}layer_output_scale.weight", [0.9])
        yield self.matrix(f"{b}ffn_gate.weight", embedding, width)
        yield self.matrix(f"{b}ffn_up.weight", embedding, width)
        yield self.matrix(f"{b}ffn_down.weight", width, embedding)


def embeddings(shape: TinyGemma4) -> Array:
    """[vocab, embedding], scaled by the root of the embedding when read: a stream of one."""
    rng = np.random.default_rng(shape.seed + 100)
    values = rng.standard_normal((WALKED.stop, EMBEDDING)) * EMBEDDING**-0.5
    return np.asarray(values, np.float32)


def before(shape: TinyGemma4) -> NDArray[np.int64]:
    """[vocab]: the token before each on the way."""
    way = np.random.default_rng(shape.seed + 200).permutation(np.array(WALKED))
    found = np.arange(WALKED.stop)
    found[way] = np.roll(way, 1)
    return found


def _rope_factors() -> Tensor:
    return f32("rope_freqs.weight", [1.0] * 8 + [1e30] * (FULL_DIM // 2 - 8))


def target_tensors(shape: TinyGemma4) -> Iterator[Tensor]:
    draws, e, n = _Draws(shape.seed), EMBEDDING, len(shape.local)
    yield f32("token_embd.weight", embeddings(shape))
    yield f32("output.weight", 2 * embeddings(shape)[before(shape)])
    yield draws.vector("output_norm.weight", e)
    yield _rope_factors()
    if shape.kind == "e":
        yield draws.matrix("per_layer_token_embd.weight", PER_LAYER * n, WALKED.stop)
        yield draws.matrix("per_layer_model_proj.weight", e, PER_LAYER * n)
        yield draws.vector("per_layer_proj_norm.weight", PER_LAYER)
    for layer, local in enumerate(shape.local):
        b, head_dim = f"blk.{layer}.", LOCAL_DIM if local else FULL_DIM
        width = WIDTH * (2 if shape.kind == "e" and layer >= 5 else 1)
        yield from draws.block(b, e, head_dim, width, shape.gain)
        if layer < n - shape.shared:
            yield draws.matrix(f"{b}attn_k.weight", e, shape.kv_heads(local) * head_dim)
            yield draws.vector(f"{b}attn_k_norm.weight", head_dim, 0.35)
            if shape.kind == "e" or local:  # elsewhere the full layers take their keys as values
                yield draws.matrix(f"{b}attn_v.weight", e, shape.kv_heads(local) * head_dim)
        if shape.kind == "e":
            yield draws.matrix(f"{b}inp_gate.weight", e, PER_LAYER)
            yield draws.matrix(f"{b}proj.weight", PER_LAYER, e)
            yield draws.vector(f"{b}post_norm.weight", e, shape.gain)
        if shape.kind == "moe":
            yield draws.matrix(f"{b}ffn_gate_inp.weight", e, EXPERTS)
            yield draws.vector(f"{b}ffn_gate_inp.scale", e, 8.0)
            for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
                yield draws.vector(f"{b}{name}.weight", e)
            yield draws.matrix(f"{b}ffn_gate_up_exps.weight", e, EXPERTS, 2 * EXPERT_WIDTH)
            yield draws.matrix(f"{b}ffn_down_exps.weight", EXPERT_WIDTH, EXPERTS, e)
            yield draws.vector(f"{b}ffn_down_exps.scale", EXPERTS)


def assistant_tensors(shape: TinyGemma4) -> Iterator[Tensor]:
    draws, e = _Draws(shape.seed + 1), HEAD_EMBEDDING
    token_half = draws.rng.standard_normal((e, EMBEDDING)) * e**-0.5  # keeps most of the angles between embeddings
    hidden_half = draws.rng.standard_normal((e, EMBEDDING)) * EMBEDDING**-0.5 * shape.head_gain
    yield f32("token_embd.weight", 2 * embeddings(shape)[before(shape)] @ token_half.T)
    yield f32("nextn.pre_projection.weight", np.concatenate([token_half, hidden_half], axis=1))
    yield draws.matrix("nextn.post_projection.weight", e, EMBEDDING)
    yield draws.vector("output_norm.weight", e)
    yield _rope_factors()
    for block in range(HEAD_BLOCKS):
        head_dim = FULL_DIM if block == HEAD_BLOCKS - 1 else LOCAL_DIM
        yield from draws.block(f"blk.{block}.", e, head_dim, HEAD_WIDTH, shape.head_gain)
