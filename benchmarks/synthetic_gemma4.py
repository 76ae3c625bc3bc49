"""Synthetic files of the Gemma 4 family: E2B in full size, and a third of its depth with an assistant that mostly knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.synthetic import Array, Fill, Kind, Options, Recipe, Tensor, normal

LOCAL_DIM, FULL_DIM, HEADS, KV_HEADS, WINDOW = 256, 512, 8, 1, 512
MARKS = 260  # first tokens of a made-up vocabulary, which the accepting model never says
SURE = 6.0  # factor on the assistant's logits: without it ten candidates look alike, and the confidence gate ends every draft
HEAD_EMBEDDING, HEAD_WIDTH, HEAD_HEADS, HEAD_BLOCKS = 256, 2048, 4, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Hyper-parameters of E2B; what is not here is the same in all sizes."""

    layers: int = 35  # every fifth is a full one
    own: int = 15  # layers with a cache; the others are twice as wide
    embedding: int = 1536
    width: int = 6144
    per_layer: int = 256
    vocab: int = 262144
    type: str = "q4_0"
    gain: float = 1.0  # what a sub-block adds to the residual stream of one
    walks: bool = False  # the LM head says the next token of one way through the vocabulary
    noise: float = 0.0  # of the assistant: how far its projection is from the token before it

    def local(self, layer: int) -> bool:
        return layer % 5 != 4

    def wide(self, layer: int) -> int:
        return self.width * (1 if layer < self.own else 2)


FULL = Shape()
ACCEPTING = Shape(layers=15, own=5, vocab=32768, gain=0.1, walks=True, noise=3.0)


def _full(options: Options) -> Recipe:
    return target(replace(FULL, type=options.type))


def _accepting(options: Options) -> Recipe:
    return target(replace(ACCEPTING, type=options.type))


def _assistant(options: Options) -> Recipe:
    noise = ACCEPTING.noise if options.noise is None else options.noise
    return assistant(replace(ACCEPTING, type=options.type, noise=noise))


KINDS: dict[str, Kind] = {
    "gemma4-e2b": ("Gemma 4 E2B", _full),
    "gemma4-accepting": ("15 layers of its width that walk through the tokens", _accepting),
    "gemma4-assistant": ("the drafter of gemma4-accepting, which mostly knows the way", _assistant),
}


# -- trunk -------------------------------------------------------------------------------------------------------------


def target(shape: Shape) -> Recipe:
    a, n = "gemma4", shape.layers
    metadata = _keys(a, shape, shape.embedding, [shape.local(i) for i in range(n)], HEADS) | {
        f"{a}.feed_forward_length": [shape.wide(i) for i in range(n)],
        f"{a}.attention.shared_kv_layers": n - shape.own,
        f"{a}.embedding_length_per_layer_input": shape.per_layer,
        f"{a}.final_logit_softcapping": 30.0,
    }
    return Recipe(a, metadata, list(_target_tensors(shape)), shape.vocab, "gpt-2")


def _target_tensors(shape: Shape) -> Iterator[Tensor]:
    e, p, n, kind = shape.embedding, shape.per_layer, shape.layers, shape.type
    if shape.walks:
        yield Tensor("token_embd.weight", (e, shape.vocab), kind, _embedding(np.arange(shape.vocab)))
        yield Tensor("output.weight", (e, shape.vocab), kind, _embedding(_before(shape.vocab)))
    else:
        yield Tensor("token_embd.weight", (e, shape.vocab), kind)
    yield _norm("output_norm.weight", e)
    yield Tensor("rope_freqs.weight", (FULL_DIM // 2,), "f32", _quarter)
    yield Tensor("per_layer_token_embd.weight", (p * n, shape.vocab), kind)
    yield Tensor("per_layer_model_proj.weight", (e, p * n), "bf16")
    yield _norm("per_layer_proj_norm.weight", p)
    for layer in range(n):
        b, head_dim = f"blk.{layer}.", LOCAL_DIM if shape.local(layer) else FULL_DIM
        yield from _block(b, e, HEADS, head_dim, shape.wide(layer), kind, shape.gain)
        # As in real files, the layers that share a cache carry the tensors that they do not use.
        yield Tensor(f"{b}attn_k.weight", (e, KV_HEADS * head_dim), kind)
        yield Tensor(f"{b}attn_v.weight", (e, KV_HEADS * head_dim), kind)
        yield _norm(f"{b}attn_k_norm.weight", head_dim, 0.35)
        yield Tensor(f"{b}inp_gate.weight", (e, p), kind)
        yield Tensor(f"{b}proj.weight", (p, e), kind)
        yield _norm(f"{b}post_norm.weight", e, shape.gain)


# -- assistant ---------------------------------------------------------------------------------------------------------


def assistant(shape: Shape) -> Recipe:
    a, e, out = "gemma4-assistant", HEAD_EMBEDDING, shape.embedding
    local = [block != HEAD_BLOCKS - 1 for block in range(HEAD_BLOCKS)]
    metadata = _keys(a, shape, e, local, HEAD_HEADS) | {
        f"{a}.embedding_length_out": out,
        f"{a}.nextn_predict_layers": HEAD_BLOCKS,
        f"{a}.feed_forward_length": HEAD_WIDTH,
        f"{a}.attention.shared_kv_layers": HEAD_BLOCKS,
        f"{a}.embedding_length_per_layer_input": 0,
    }
    tensors = [
        Tensor("token_embd.weight", (e, shape.vocab), shape.type, _projected(shape)),
        Tensor("nextn.pre_projection.weight", (2 * out, e), "f16", _token_half(shape)),
        Tensor("nextn.post_projection.weight", (e, out), "f16"),
        _norm("output_norm.weight", e),
        Tensor("rope_freqs.weight", (FULL_DIM // 2,), "f32", _quarter),
    ]
    for block, is_local in enumerate(local):
        head_dim = LOCAL_DIM if is_local else FULL_DIM
        tensors += _block(f"blk.{block}.", e, HEAD_HEADS, head_dim, HEAD_WIDTH, shape.type, shape.gain)
    return Recipe(a, metadata, tensors, shape.vocab, "gpt-2")


# -- both --------------------------------------------------------------------------------------------------------------


def _keys(a: str, shape: Shape, embedding: int, local: list[bool], heads: int) -> dict[str, object]:
    return {
        f"{a}.context_length": 131072,
        f"{a}.embedding_length": embedding,
        f"{a}.block_count": len(local),
        f"{a}.attention.head_count": heads,
        f"{a}.attention.head_count_kv": KV_HEADS,
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


def _block(b: str, e: int, heads: int, head_dim: int, width: int, kind: str, gain: float) -> Iterator[Tensor]:
    """What blocks of trunk and assistant have in common."""
    yield _norm(f"{b}attn_norm.weight", e)
    yield Tensor(f"{b}attn_q.weight", (e, heads * head_dim), kind)
    yield _norm(f"{b}attn_q_norm.weight", head_dim, 0.35)  # attention has no scale of its own
    yield Tensor(f"{b}attn_output.weight", (heads * head_dim, e), kind)
    yield _norm(f"{b}post_attention_norm.weight", e, gain)
    yield _norm(f"{b}ffn_norm.weight", e)
    yield Tensor(f"{b}ffn_gate.weight", (e, width), kind)
    yield Tensor(f"{b}ffn_up.weight", (e, width), kind)
    yield Tensor(f"{b}ffn_down.weight", (width, e), kind)
    yield _norm(f"{b}post_ffw_norm.weight", e, gain)
    yield Tensor(f"{b}layer_output_scale.weight", (1,), "f32", normal(0.0, 1.0))


def _norm(name: str, size: int, mean: float = 1.0) -> Tensor:
    return Tensor(name, (size,), "f32", normal(0.1 * mean, mean))


# -- values ------------------------------------------------------------------------------------------------------------


def _quarter(_: np.random.Generator, first: int, shape: tuple[int, int]) -> Array:
    """A full layer turns its first quarter of pairs alone: the others are slowed to nothing."""
    pairs = first + np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    factors: Array = np.where(pairs < FULL_DIM // 8, 1, 1e30).astype(np.float32)
    return factors


def _before(vocab: int) -> np.ndarray:
    """`[vocab]`: the token before each, along one way through all but the first MARKS, which lead to themselves."""
    way = np.random.default_rng(1).permutation(np.arange(MARKS, vocab))
    before = np.arange(vocab)
    before[way] = np.roll(way, 1)
    return before


def _rows(tokens: np.ndarray, columns: int) -> Array:
    """Embeddings of one, made from the tokens alone: a stream of one behind the trunk's factor."""
    drawn = [np.random.default_rng(int(token)).standard_normal(columns, dtype=np.float32) for token in tokens]
    rows: Array = np.stack(drawn) * np.float32(columns**-0.5)
    return rows


def _embedding(tokens: np.ndarray) -> Fill:
    """Row i is the embedding of `tokens[i]`."""
    return lambda _, first, shape: _rows(tokens[first : first + shape[0]], shape[1])


def _kept(embedding: int) -> Array:
    """`[head embedding, embedding]`: a projection that keeps most of the angles between embeddings."""
    drawn: Array = np.random.default_rng(2).standard_normal((HEAD_EMBEDDING, embedding), dtype=np.float32)
    drawn *= np.float32(embedding**-0.5)
    return drawn


def _projected(shape: Shape) -> Fill:
    """The assistant's LM head: in the row of a token, what it sees of the token before it."""
    before, kept = _before(shape.vocab), _kept(shape.embedding)

    def fill(_: np.random.Generator, first: int, size: tuple[int, int]) -> Array:
        rows: Array = _rows(before[first : first + size[0]], shape.embedding) @ kept.T * np.float32(SURE)
        return rows

    return fill


def _token_half(shape: Shape) -> Fill:
    """Of embedding and hidden row the first goes through, and of the second `noise` as much, in random directions."""
    e, kept = shape.embedding, _kept(shape.embedding)

    def fill(generator: np.random.Generator, first: int, size: tuple[int, int]) -> Array:
        noise = generator.standard_normal((size[0], e), dtype=np.float32) * np.float32(shape.noise * e**-0.5)
        return np.concatenate([kept[first : first + size[0]], noise], axis=1)

    return fill
