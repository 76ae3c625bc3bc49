"""Synthetic files of the Qwen 3.5 family: the 0.8B in full size, and a smaller trunk whose NextN head it often accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.synthetic import Array, Fill, Kind, Options, Recipe, Tensor, normal

TAPS = 4
HEAD_DIM, STATE = 256, 128
MARKS = 260  # first tokens of a made-up vocabulary, which the accepting model never says


@dataclass(frozen=True, slots=True)
class Shape:
    """Hyper-parameters; what is not here is the same in all sizes."""

    layers: int = 24
    embedding: int = 1024
    width: int = 3584
    heads: int = 8
    kv_heads: int = 2
    key_heads: int = 16
    value_heads: int = 16
    vocab: int = 248320
    tied: bool = True
    type: str = "q8_0"
    echo: float | None = None  # accepting: the factor on what a block adds, None is a model of noise
    noise: float = 0.0  # accepting: deviation of the head's projection from the token before it

    @property
    def inner(self) -> int:
        return self.value_heads * STATE

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * STATE + self.inner

    def recurrent(self, layer: int) -> bool:
        return layer < self.layers and (layer + 1) % 4 != 0


FULL = Shape()
# Vocabulary and depth are cut, for a file of a few hundred MB. With 1024 channels the noise needs to be far over the signal
# before another of 32768 tokens scores higher: at 6.5 a verify of three drafts gives 2.75 tokens.
ACCEPTING = Shape(layers=12, vocab=32768, tied=False, echo=0.05, noise=6.5)


def _full(options: Options) -> Recipe:
    return recipe(replace(FULL, type=options.type))


def _accepting(options: Options) -> Recipe:
    noise = ACCEPTING.noise if options.noise is None else options.noise
    return recipe(replace(ACCEPTING, type=options.type, noise=noise))


KINDS: dict[str, Kind] = {
    "qwen35-0.8b": ("Qwen 3.5 0.8B with its NextN block", _full),
    "qwen35-accepting": (
        "12 layers of its width that walk through the tokens, and a NextN block that mostly knows",
        _accepting,
    ),
}


def recipe(shape: Shape) -> Recipe:
    a = "qwen35"
    metadata = {
        f"{a}.block_count": shape.layers + 1,
        f"{a}.nextn_predict_layers": 1,
        f"{a}.context_length": 262144,
        f"{a}.embedding_length": shape.embedding,
        f"{a}.feed_forward_length": shape.width,
        f"{a}.attention.head_count": shape.heads,
        f"{a}.attention.head_count_kv": shape.kv_heads,
        f"{a}.attention.key_length": HEAD_DIM,
        f"{a}.attention.value_length": HEAD_DIM,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{a}.rope.freq_base": 1e7,
        f"{a}.rope.dimension_count": 64,
        f"{a}.rope.dimension_sections": [11, 11, 10, 0],
        f"{a}.ssm.conv_kernel": TAPS,
        f"{a}.ssm.state_size": STATE,
        f"{a}.ssm.group_count": shape.key_heads,
        f"{a}.ssm.time_step_rank": shape.value_heads,
        f"{a}.ssm.inner_size": shape.inner,
        f"{a}.full_attention_interval": 4,
    }
    return Recipe(a, metadata, list(_tensors(shape)), shape.vocab, "qwen35")


def _tensors(shape: Shape) -> Iterator[Tensor]:
    e = shape.embedding
    if shape.echo is None:
        yield Tensor("token_embd.weight", (e, shape.vocab), _type(shape, 0, "token_embd"))
        if not shape.tied:
            yield Tensor("output.weight", (e, shape.vocab), _type(shape, 0, "output"))
    else:
        order = _walk(shape.vocab)
        yield Tensor("token_embd.weight", (e, shape.vocab), shape.type, _embedding(np.arange(shape.vocab)))
        yield Tensor("output.weight", (e, shape.vocab), shape.type, _embedding(order))
    yield _norm(shape, "output_norm.weight", e)
    for layer in range(shape.layers + 1):
        p = f"blk.{layer}."
        yield _norm(shape, f"{p}attn_norm.weight", e)
        yield _norm(shape, f"{p}post_attention_norm.weight", e)
        yield from _delta(shape, layer, p) if shape.recurrent(layer) else _attention(shape, layer, p)
        yield Tensor(f"{p}ffn_gate.weight", (e, shape.width), _type(shape, layer, "ffn_gate"))
        yield Tensor(f"{p}ffn_up.weight", (e, shape.width), _type(shape, layer, "ffn_up"))
        yield _out(shape, layer, "ffn_down", shape.width)
    p = f"blk.{shape.layers}.nextn."
    projection = None if shape.echo is None else _token_half(shape.noise)
    yield Tensor(f"{p}eh_proj.weight", (2 * e, e), _type(shape, shape.layers, "eh_proj"), projection)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield _norm(shape, f"{p}{name}.weight", e)


def _attention(shape: Shape, layer: int, p: str) -> Iterator[Tensor]:
    e, kv = shape.embedding, shape.kv_heads * HEAD_DIM
    yield Tensor(f"{p}attn_q.weight", (e, 2 * shape.heads * HEAD_DIM), _type(shape, layer, "attn_q"))
    yield Tensor(f"{p}attn_k.weight", (e, kv), _type(shape, layer, "attn_k"))
    yield Tensor(f"{p}attn_v.weight", (e, kv), _type(shape, layer, "attn_v"))
    yield _out(shape, layer, "attn_output", shape.heads * HEAD_DIM)
    yield _norm(shape, f"{p}attn_q_norm.weight", HEAD_DIM)
    yield _norm(shape, f"{p}attn_k_norm.weight", HEAD_DIM)


def _delta(shape: Shape, layer: int, p: str) -> Iterator[Tensor]:
    e, heads = shape.embedding, shape.value_heads
    yield Tensor(f"{p}attn_qkv.weight", (e, shape.channels), _type(shape, layer, "attn_qkv"))
    yield Tensor(f"{p}attn_gate.weight", (e, shape.inner), _type(shape, layer, "attn_gate"))
    yield Tensor(f"{p}ssm_conv1d.weight", (TAPS, shape.channels), "f32", normal(0.5))
    yield Tensor(f"{p}ssm_dt.bias", (heads,), "f32", normal(0.5))
    yield Tensor(f"{p}ssm_a", (heads,), "f32", _decay)
    yield Tensor(f"{p}ssm_beta.weight", (e, heads), _type(shape, layer, "ssm_beta"))
    yield Tensor(f"{p}ssm_alpha.weight", (e, heads), _type(shape, layer, "ssm_alpha"))
    yield _norm(shape, f"{p}ssm_norm.weight", STATE)
    yield _out(shape, layer, "ssm_out", shape.inner)


def _out(shape: Shape, layer: int, name: str, columns: int) -> Tensor:
    """What a block adds to the residual stream."""
    fill = normal((1.0 if shape.echo is None else shape.echo) * columns**-0.5)
    return Tensor(f"blk.{layer}.{name}.weight", (columns, shape.embedding), _type(shape, layer, name), fill)


def _norm(shape: Shape, name: str, size: int) -> Tensor:
    return Tensor(name, (size,), "f32", normal(0.2 if shape.echo is None else 0.0, 1.0))


def _type(shape: Shape, layer: int, name: str) -> str:
    """The type itself; of q4_K the usual mix (Q4_K_M), in which some matrices of some layers are q6_K."""
    if shape.type.lower() != "q4_k":
        return shape.type
    count = shape.layers + 1
    rich = layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
    if name == "output" or (name == "token_embd" and shape.tied):
        return "q6_K"
    return "q6_K" if rich and name in ("ffn_down", "attn_v", "attn_qkv") else "q4_K"


# -- values ------------------------------------------------------------------------------------------------------------


def _decay(generator: np.random.Generator, _first: int, shape: tuple[int, int]) -> Array:
    """-exp(A): negative."""
    values: Array = -np.exp(0.5 * generator.standard_normal(shape, dtype=np.float32))
    return values


def _walk(vocab: int) -> np.ndarray:
    """`[vocab]`: the token before each, along one way through all but the first MARKS, which lead to themselves."""
    way = np.random.default_rng(1).permutation(np.arange(MARKS, vocab))
    before = np.arange(vocab)
    before[way] = np.roll(way, 1)
    return before


def _embedding(tokens: np.ndarray) -> Fill:
    """Row i is the embedding of `tokens[i]`, made from the token alone."""

    def fill(_: np.random.Generator, first: int, shape: tuple[int, int]) -> Array:
        rows = [
            np.random.default_rng(int(token)).standard_normal(shape[1], dtype=np.float32)
            for token in tokens[first : first + shape[0]]
        ]
        return np.stack(rows)

    return fill


def _token_half(noise: float) -> Fill:
    """[identity | 0] and noise: of token and hidden row the token goes through."""

    def fill(generator: np.random.Generator, first: int, shape: tuple[int, int]) -> Array:
        values: Array = generator.standard_normal(shape, dtype=np.float32) * np.float32(noise * shape[1] ** -0.5)
        values[np.arange(shape[0]), first + np.arange(shape[0])] += 1
        return values

    return fill
