"""Row-exactness probe: is a row's result the same, bit for bit, alone and among 2, 3, 4 or 8 rows?

Speculative output equals plain output token for token where it is. Three measurements, all on scratch memory, so that
sequences, slots and rows of the model stay as they are:
* weights: one matrix of every type in the file, by the route of the model's own products;
* attention: every kind of cache, past 512 cells, where ggml's flash kernel would split the work of a lone row;
* forward: the whole model on a few tokens, which catches what the parts do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tsgg.forward import Forward, Key, StepGraph
from tsgg.ggml.buffers import CACHE_TYPES, F32, I32, Tensor
from tsgg.ggml.buffers import read as read_tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.graph import Graph
from tsgg.ggml.library import ffi
from tsgg.gguf import GGML_TYPES, TensorInfo
from tsgg.memory import Memory, Slots
from tsgg.model import Model
from tsgg.speculative.protocol import Batch, Want

Array = NDArray[np.float32]

ROWS = (2, 3, 4, 8)  # kernels change between them: pairs, groups of four, the limits of GPU kernels
DEPTH = 600  # positions before the attention rows: with them more than the 512 cells from which a lone row is split
LARGE = 1 << 30  # bytes of weights from which the forward decodes two rows one by one, not eight

_TYPE_NAMES = {number: name for name, number in CACHE_TYPES.items()}
_SEED = 20250801


@dataclass(frozen=True, slots=True)
class Exactness:
    """Rows of a batch against the same rows alone."""

    exact: bool  # every bit of every row, for every row count
    difference: float  # largest absolute difference
    size: float  # root mean square of the result, to judge the difference by


@dataclass(frozen=True, slots=True)
class RowExactness:
    """What the probe found on one model and device."""

    rows: Mapping[int, bool]  # row count -> whether everything measured at it was exact
    weights: Mapping[str, Exactness]  # by type of tensor: "q4_0", "q4_0 repacked", "q4_0 experts"
    attention: Mapping[str, Exactness]  # by kind of cache: "kv soft f16/f16"
    forward: Exactness  # logits of the whole model

    @property
    def claimed(self) -> bool:
        """Whether a verify row is claimed to equal the one-row decode, bit for bit."""
        return all(self.rows.values())

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.rows))
        parts = {**self.weights, **self.attention, "whole forward": self.forward}
        if self.claimed:
            return f"exact: a row alone = the same row among {counts} (weights {', '.join(self.weights)}; {', '.join(self.attention)})"
        wrong = ", ".join(
            f"{name} by {found.difference:.1e} of {found.size:.1e}" for name, found in parts.items() if not found.exact
        )
        return f"NOT exact: rows among {counts} differ from the row alone in {wrong}"


def probe_rows(model: Model) -> RowExactness:
    """Measures one model: tens of milliseconds for a small one, about six decode steps for a large one.

    Between two forwards of the model only: the device's memory for scratch is allocated and freed again
    (`OutOfMemoryError` where there is none).
    """
    found = {"weights": _weights(model), "attention": _attention(model), "forward": {"": _forward(model)}}
    exact = {rows: all(not parts[rows] for kind in found.values() for parts in kind.values()) for rows in ROWS}
    return exact
