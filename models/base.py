"""What every architecture says about itself, and what it may use while it builds a graph.

An `Architecture` is pure: metadata in, declarations and graph nodes out. It owns no memory, runs nothing, and learns of
sequences, caches and devices only through the `Step` it is handed. Shapes are in ggml's order (`ne`, fastest first).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from tsgg.errors import ModelFileError, UnsupportedError
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.gguf import Metadata, TensorInfo

MAX_LAYERS = 1024  # a hostile block_count would otherwise declare billions of tensors before one is looked for
MAX_CONTEXT = 1 << 24  # keeps positions far inside int32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that the architecture reads. A dimension of 0 in `shape` is taken from the file."""

    name: str
    shape: tuple[int, ...]
    role: str = "matrix"  # "matrix" (mul_mat), "experts" (mul_mat_id), "table" (get_rows), "vector" (F32 only)
    optional: bool = False
    # Name of a matrix that this may become rows of, with the others of that name in order: they are multiplied by the same
    # rows, and one product is cheaper than several. Where that was done there is a tensor of this name, and not its parts.
    joins: str = ""


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of the rotary embedding as ggml takes them."""

    dims: int  # channels that rotate
    neox: bool  # pairs (i, i + dims/2) instead of (2i, 2i+1)
    base: float
    scale: float = 1.0  # factor on positions: 1 / scaling factor
    original_context: int = 0  # tokens, YaRN only
    ext_factor: float = 0.0  # 1 switches YaRN's blend on
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Cache geometry of one attention layer. `window` is in tokens, 0 for full attention.

    A layer with a `donor` keeps nothing: it reads that layer's cache, which has the same geometry.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0
    donor: int | None = None  # an earlier layer


@dataclass(frozen=True, slots=True)
class Recurrent:
    """State geometry of one recurrent layer: the last rows before a causal convolution, and a matrix for each head."""

    channels: int  # of the convolution
    taps: int  # of the convolution: taps - 1 rows are state
    heads: int
    key_dim: int  # columns of a head's matrix
    value_dim: int  # its rows


class Weights(Protocol):
    """Loaded tensors by name; an optional tensor that the file lacks is None."""

    def __getitem__(self, name: str) -> Tensor: ...

    def get(self, name: str) -> Tensor | None: ...

    def scalar(self, name: str) -> float | None:
        """The value of a tensor of one element, for `scale`: as an operand of `mul` it takes 50 times as long on the CPU."""


class Step(Protocol):
    """One forward under construction: `rows` = sequences x rows per sequence, sequence-major."""

    rows: int
    positions: Tensor  # I32 {rows}

    def embed(self, table: Tensor) -> Tensor:
        """Rows of the embedding table for the step's tokens: F32 {embedding, rows}."""

    def linear(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """weight {n, m} on x {n, rows} -> {m, rows}; a row's bits do not depend on how many rows there are."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float) -> Tensor | None:
        """Stores k {d, kv heads, rows} and v, returns the attention of q {d, heads, rows}: {d * heads, rows}.

        k and v are None in a layer that reads a donor's cache. The result is None when nothing after this layer's cache rows
        is wanted: the architecture then returns None as well.
        """

    def convolve(self, layer: int, x: Tensor, kernel: Tensor) -> Tensor:
        """Causal depthwise convolution of x {channels, rows}, behind the rows that the sequence had before: the same shape.

        kernel F32 {taps, channels}; tap j multiplies the row taps - 1 - j back.
        """

    def delta_net(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor | None:
        """The gated delta rule from the sequence's state on: {value_dim * heads, rows}, or None as with `attend`.

        q, k {key_dim, key heads, rows}, v {value_dim, heads, rows}, each row of numbers contiguous; decay (its logarithm) and
        beta {heads, rows}. Head h reads key head h % key heads; outputs are scaled by key_dim ** -0.5.
        """

    def wanted(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """In the last layer keeps only the rows that somebody reads; elsewhere returns the tensors as they are."""

    def tap(self, layer: int, x: Tensor) -> None:
        """Offers the residual that enters `layer` (the number of layers: what leaves the last one)."""


class Architecture(ABC):
    """One family of trunks. A subclass sets `name`, reads its keys in `__init__` and builds its layers in `forward`."""

    name: ClassVar[str]

    preferred_draft_window: int | None = None  # narrows the default draft window only
    speculation_refusal: str | None = None  # a correctness verdict: why a verify cannot reproduce a decode
    speculation_profitable: bool = True  # a speed verdict
    layer_nodes: int = 64  # most graph nodes of one layer
    softcap: float = 0.0  # c of logits = c tanh(head row / c), applied to the rows that are read; 0 = none

    def __init__(self, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> None:
        """Reads hyper-parameters. `tensors` only answers which variant a file is. Raises `ModelFileError`."""
        self.keys = Keys(metadata, self.name)
        self.context = self.keys.integer("context_length", high=1 << 31)
        self.embedding = self.keys.integer("embedding_length", high=1 << 20)
        table = tensors.get("token_embd.weight")
        self.vocab = table.shape[-1] if table is not None else 0  # tokens; head and bias are declared with as many rows
        blocks = self.keys.integer("block_count", high=MAX_LAYERS)
        self.layers = blocks - self.keys.integer("nextn_predict_layers", 0, low=0, high=blocks - 1)
        self.eps = self.keys.number("attention.layer_norm_rms_epsilon", high=1.0)

    @abstractmethod
    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor that `forward` reads."""

    @abstractmethod
    def attention(self) -> Sequence[Attention | Recurrent]:
        """Geometry of what each layer keeps of a sequence."""

    @abstractmethod
    def forward(self, g: GraphBuilder, w: Weights, step: Step) -> Tensor | None:
        """Builds all layers; returns the hidden rows after the final norm {embedding, wanted rows}, or None."""

    def draft_block(self) -> Architecture | None:
        """The draft block that the file announces behind its layers, or None: one layer over (token, hidden row before it).

        Its `forward` takes the hidden rows as the input `hidden` {embedding, rows}. Raises `UnsupportedError`.
        """
        return None

    def logits(self, g: GraphBuilder, w: Weights, step: Step, hidden: Tensor) -> Tensor:
        """The LM head over hidden rows: {vocab, rows}."""
        return step.linear(w.get("output.weight") or w["token_embd.weight"], hidden, w.get("output.bias"))


class Keys:
    """Reads `<arch>.<key>` with ranges: sizes from a file are never trusted."""

    def __init__(self, metadata: Metadata, arch: str) -> None:
        self.metadata, self.arch = metadata, arch

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        """An integer in low..high; without a default the key is required."""
        full = f"{self.arch}.{key}"
        if default is not None and full not in self.metadata:
            return default
        return self.metadata.get_int(full, low=low, high=high)

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12) -> float:
        """A finite float in low..high; without a default the key is required."""
        full = f"{self.arch}.{key}"
        if default is not None and full not in self.metadata:
            return default
        value = self.metadata.get_float(full)
        if not low <= value <= high:
            raise ModelFileError(f"{full} is {value}, expected {low:g} to {high:g}: convert the model again")
        return value

    def per_layer(self, key: str, layers: int, default: int | None = None, *, low: int = 1) -> tuple[int, ...]:
        """A key that is one number for all layers or an array with one for each."""
        full = f"{self.arch}.{key}"
        value = self.metadata.get(full)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            return (self.integer(key, default, low=low, high=1 << 20),) * layers
        entries = value.tolist()
        if len(entries) < layers or not all(low <= entry <= 1 << 20 for entry in entries[:layers]):
            raise ModelFileError(f"{full} has {len(entries)} entries, expected {layers} of {low} to {1 << 20}")
        return tuple(entries[:layers])

    def rope(self, head_dim: int, *, neox: bool, default_base: float = 10000.0) -> Rope:
        """Rotary parameters with linear or YaRN scaling."""
        dims = self.integer("rope.dimension_count", head_dim, high=head_dim)
        if dims % 2:
            raise ModelFileError(f"{self.arch}.rope.dimension_count is {dims}, expected an even number")
        base = self.number("rope.freq_base", default_base, low=1e-3)
        kind = self.metadata.get_str(f"{self.arch}.rope.scaling.type", "linear")
        if kind == "longrope":
            raise UnsupportedError(f"{self.arch}.rope.scaling.type longrope is not implemented; linear and yarn are")
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedError(f"{self.arch}.rope.scaling.type is {kind!r}; none, linear and yarn are implemented")
        old = self.number("rope.scale_linear", 0.0)
        factor = self.number("rope.scaling.factor", old) or 1.0
        scale = 1.0 if kind == "none" else 1.0 / factor
        if kind != "yarn":
            return Rope(dims, neox, base, scale)
        # ggml itself multiplies by 1 + 0.1 ln(factor), the magnitude of the YaRN paper; attn_factor comes on top of it.
        attention = self.number("rope.scaling.attn_factor", 1.0)
        original = self.integer("rope.scaling.original_context_length", self.integer("context_length", high=1 << 31))
        return Rope(dims, neox, base, scale, original, 1.0, attention)
