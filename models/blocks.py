"""Building blocks that several architectures share. Each takes the builder `g`, the step and tensors, and returns one.

Shapes are in ggml's order: activations {features, rows}.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tsgg.errors import ModelFileError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.models.base import Keys, Step, TensorSpec, Weights

FLOAT = 4  # bytes
SMALLEST_WEIGHT_SUM = 6.103515625e-5  # the smallest normal half: keeps a router whose picks underflow finite


@dataclass(frozen=True, slots=True)
class Experts:
    """Shape of a mixture of experts."""

    count: int
    used: int
    width: int  # features inside one expert


def norm(g: GraphBuilder, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm times weight. Two adjacent nodes, so that backends fuse them."""
    return g.mul(g.rms_norm(x, eps), weight)


def swiglu(g: GraphBuilder, w: Weights, step: Step, prefix: str, x: Tensor) -> Tensor:
    """down . (silu(gate . x) * (up . x)), biases where the file has them."""
    gate, up = _gate_up(g, w, step, prefix, x)
    return step.linear(w[f"{prefix}ffn_down.weight"], g.swiglu_split(gate, up), w.get(f"{prefix}ffn_down.bias"))


def geglu(g: GraphBuilder, w: Weights, step: Step, prefix: str, x: Tensor) -> Tensor:
    """down . (gelu(gate . x) * (up . x)): `swiglu` with the tanh approximation of GELU. Tensors: `swiglu_specs`."""
    gate, up = _gate_up(g, w, step, prefix, x)
    return step.linear(w[f"{prefix}ffn_down.weight"], g.geglu_split(gate, up), w.get(f"{prefix}ffn_down.bias"))


def _gate_up(g: GraphBuilder, w: Weights, step: Step, prefix: str, x: Tensor) -> list[Tensor]:
    both = w.get(f"{prefix}ffn_gate_up.weight")
    if both is None:
        return [step.linear(w[f"{prefix}ffn_{n}.weight"], x, w.get(f"{prefix}ffn_{n}.bias")) for n in ("gate", "up")]
    width = int(both.ne[1]) // 2
    parts = _split(g, step.linear(both, x), (width, width))
    return [_biased(g, part, w.get(f"{prefix}ffn_{n}.bias")) for n, part in zip(("gate", "up"), parts, strict=True)]


def _split(g: GraphBuilder, y: Tensor, sizes: Iterable[int]) -> list[Tensor]:
    """Views {size, rows} of y {all sizes, rows}, side by side."""
    parts, offset, rows = [], 0, int(y.ne[1])
    for size in sizes:
        parts.append(g.view(y, (size, rows), (int(y.nb[1]),), offset * FLOAT))
        offset += size
    return parts


def _biased(g: GraphBuilder, y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else g.add(y, bias)


def swiglu_specs(prefix: str, embedding: int, width: int, *, biases: bool = False) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}ffn_gate.weight", (embedding, width), joins=f"{prefix}ffn_gate_up.weight")
    yield TensorSpec(f"{prefix}ffn_up.weight", (embedding, width), joins=f"{prefix}ffn_gate_up.weight")
    yield TensorSpec(f"{prefix}ffn_down.weight", (width, embedding))
    if biases:
        for name, size in (("gate", width), ("up", width), ("down", embedding)):
            yield TensorSpec(f"{prefix}ffn_{name}.bias", (size,), "vector", optional=True)


def qkv(g: GraphBuilder, w: Weights, step: Step, prefix: str, x: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
    """The projections {size, rows} named by `sizes` ("q", "k", "v"), from one tensor each or out of a fused one.

    Each is contiguous. A bias of a fused tensor is the file's; those of single ones stay single where they were joined.
    """
    fused = w.get(f"{prefix}attn_qkv.weight")
    if fused is None:
        return [step.linear(w[f"{prefix}attn_{n}.weight"], x, w.get(f"{prefix}attn_{n}.bias")) for n in sizes]
    parts = _split(g, step.linear(fused, x, w.get(f"{prefix}attn_qkv.bias")), sizes.values())
    parts = [_biased(g, part, w.get(f"{prefix}attn_{n}.bias")) for n, part in zip(sizes, parts, strict=True)]
    return parts if step.rows == 1 else [g.cont(part) for part in parts]


def qkv_specs(
    prefix: str, embedding: int, sizes: Mapping[str, int], *, fused: bool, bias: str = "optional"
) -> Iterator[TensorSpec]:
    """`bias`: "no", "optional", "required"."""
    for name, size in ({"qkv": sum(sizes.values())} if fused else sizes).items():
        joins = "" if fused else f"{prefix}attn_qkv.weight"
        yield TensorSpec(f"{prefix}attn_{name}.weight", (embedding, size), joins=joins)
        if bias != "no":
            yield TensorSpec(f"{prefix}attn_{name}.bias", (size,), "vector", optional=bias == "optional")


def windowed_layers(keys: Keys, layers: int, period: int | None = None) -> tuple[bool, ...]:
    """Which layers see a window only, from `attention.sliding_window_pattern`: a bool for each layer, or a period n.

    With a period every n-th layer is full. `period` None: the key is required, and an array (Gemma 4).
    """
    name = "attention.sliding_window_pattern"
    value = keys.metadata.get(f"{keys.arch}.{name}")
    if isinstance(value, np.ndarray) or period is None:
        flags = keys.metadata.get_array(f"{keys.arch}.{name}")
        if flags.dtype.kind not in "biu" or len(flags) != layers:
            raise ModelFileError(
                f"{keys.arch}.{name} has {len(flags)} entries of {flags.dtype.name}, expected {layers} bools: "
                "convert the model again"
            )
        return tuple(bool(flag) for flag in flags.tolist())
    n = keys.integer(name, period, high=1 << 10)
    return tuple(layer % n < n - 1 for layer in range(layers))


def mixture(g: GraphBuilder, w: Weights, step: Step, prefix: str, x: Tensor, experts: Experts) -> Tensor:
    """Softmax router over all experts, the best `used` with their weights normalised, SwiGLU experts."""
    picks, weights = route(g, step.linear(w[f"{prefix}ffn_gate_inp.weight"], x), experts)
    return mix(g, w, prefix, x, picks, weights, experts)


def route(g: GraphBuilder, scores: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """From a router's scores {count, rows} the best experts {used, rows}, and their probabilities {1, used, rows} that sum to 1."""
    rows = int(scores.ne[1])
    probabilities = g.soft_max(scores)
    picks = g.argsort_top_k(probabilities, experts.used)
    weights = g.get_rows(g.reshape(probabilities, 1, experts.count, rows), picks)  # {1, used, rows}
    weights = g.reshape(weights, experts.used, rows)
    total = g.clamp(g.sum_rows(weights), SMALLEST_WEIGHT_SUM, float("inf"))
    return picks, g.reshape(g.div(weights, total), 1, experts.used, rows)


def mix(
    g: GraphBuilder, w: Weights, prefix: str, x: Tensor, picks: Tensor, weights: Tensor, experts: Experts,
    gelu: bool = False,
) -> Tensor:  # fmt: skip
    """Outputs of the picked experts, times their weights {1, used, rows}: SwiGLU, or GEGLU with `gelu`.

    Sums in pick order, rank 0 first, like every engine that the golden files came from.
    """
    embedding, rows = int(x.ne[0]), int(x.ne[1])
    x = g.reshape(x, embedding, 1, rows)
    fused = w.get(f"{prefix}ffn_gate_up_exps.weight")
    if fused is None:
        gate = g.mul_mat_id(w[f"{prefix}ffn_gate_exps.weight"], x, picks)  # {width, used, rows}
        up = g.mul_mat_id(w[f"{prefix}ffn_up_exps.weight"], x, picks)
        inner = g.geglu_split(gate, up) if gelu else g.swiglu_split(gate, up)
    else:
        both = g.mul_mat_id(fused, x, picks)
        inner = g.geglu(both) if gelu else g.swiglu(both)
    down = g.mul_mat_id(w[f"{prefix}ffn_down_exps.weight"], inner, picks)
    weighted = g.mul(down, weights)  # {embedding, used, rows}
    stride = int(weighted.nb[2])
    parts = [g.view(weighted, (embedding, rows), (stride,), i * int(weighted.nb[1])) for i in range(experts.used)]
    result = parts[0]
    for part in parts[1:]:
        result = g.add(result, part)
    return result if experts.used > 1 else g.cont(result)


def mixture_specs(prefix: str, embedding: int, experts: Experts, *, fused: bool = False) -> Iterator[TensorSpec]:
    """`fused`: gate and up projection are one tensor, gate first."""
    yield TensorSpec(f"{prefix}ffn_gate_inp.weight", (embedding, experts.count))
    widths = {"gate_up": 2 * experts.width} if fused else {"gate": experts.width, "up": experts.width}
    for name, width in widths.items():
        yield TensorSpec(f"{prefix}ffn_{name}_exps.weight", (embedding, width, experts.count), "experts")
    yield TensorSpec(f"{prefix}ffn_down_exps.weight", (experts.width, embedding, experts.count), "experts")
