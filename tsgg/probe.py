"""Row-exactness probe: is a row's result the same, bit for bit, alone and among 2, 3, 4 or 8 rows?

Where it is, speculative output equals plain output token for token. Three measurements, on scratch memory, so that the
sequences, slots and rows of the model stay as they are:
* weights: a matrix of every type in the file, by the route of the model's own products;
* attention: every kind of cache, past the 512 cells from which ggml's flash kernel splits the work of a lone row;
* forward: the whole model on a few tokens, which catches what the parts do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tsgg.forward import Forward, Key, StepGraph
from tsgg.ggml import buffers
from tsgg.ggml.buffers import CACHE_TYPES, F32, I32, Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Backend
from tsgg.ggml.graph import Graph
from tsgg.ggml.library import ffi
from tsgg.gguf import GGML_TYPES
from tsgg.memory import Memory, Slots
from tsgg.memory.kv import KVArena, KVInputs, KVStep
from tsgg.models.base import TensorSpec
from tsgg.speculative.protocol import Batch, Want

if TYPE_CHECKING:
    from tsgg.model import Model

Array = NDArray[np.float32]

ROWS = (2, 3, 4, 8)  # kernels change between them: pairs, groups of four, the limits of GPU kernels
MOST = max(ROWS)
DEPTH = 600  # positions in the cache before the attention rows: more than 512, see above
LARGE = 64 << 20  # bytes of weights from which the whole forward is tried with fewer rows: it must not take long
SEED = 20250801

_CACHE_NAMES = {number: name for name, number in CACHE_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Exactness:
    """Rows of a batch against the same rows alone."""

    wrong: tuple[int, ...]  # row counts at which some bit differs
    difference: float  # largest absolute difference
    size: float  # root mean square of the result, to judge the difference by

    @property
    def exact(self) -> bool:
        return not self.wrong


@dataclass(frozen=True, slots=True)
class RowExactness:
    """What the probe found on one model and its device."""

    weights: Mapping[str, Exactness]  # by type and placement: "q4_1", "q4_0 repacked", "q4_0 experts"
    attention: Mapping[str, Exactness]  # by kind of cache: "kv f16/f16 soft"
    forward: Exactness  # logits of the whole model

    @property
    def rows(self) -> dict[int, bool]:
        """Row count -> whether everything measured at it was exact."""
        wrong = {count for part in self._parts().values() for count in part.wrong}
        return {count: count not in wrong for count in ROWS}

    @property
    def claimed(self) -> bool:
        """Whether a verify row is claimed to equal the one-row decode, bit for bit."""
        return all(self.rows.values())

    def __str__(self) -> str:
        counts = ", ".join(map(str, ROWS))
        if self.claimed:
            names = ", ".join([*self.weights, *self.attention])
            return f"a row among {counts} equals the row alone, bit for bit ({names})"
        wrong = "; ".join(
            f"{name}: {part.difference:.1e} at a size of {part.size:.1e}, among {', '.join(map(str, part.wrong))}"
            for name, part in self._parts().items()
            if part.wrong
        )
        return f"a row among others does NOT equal the row alone ({wrong})"

    def _parts(self) -> dict[str, Exactness]:
        return {**self.weights, **self.attention, "whole forward": self.forward}


def probe_rows(model: Model) -> RowExactness:
    """Measures one model: tens of milliseconds for a small one, the time of some six decode steps for a large one.

    Raises `OutOfMemoryError` where the device has no room for the scratch memory.
    """
    backends = model._forward.backends
    weights = {name: _weight(model, backends[0], spec) for name, spec in _representatives(model).items()}
    attention = dict(_attention(model, backends[0], name, arena) for name, arena in model.memory.arenas.items())
    return RowExactness(weights, attention, _forward(model, backends))


def _compare(run: Callable[[int, int], Array], counts: tuple[int, ...] = ROWS, alone: int = MOST) -> Exactness:
    """`run(first, count)` gives the rows first .. first + count of the same MOST rows, computed together: [count, n]."""
    single = np.concatenate([run(i, 1) for i in range(alone)])
    together = {count: run(0, count)[:alone] for count in counts}
    wrong = tuple(count for count, rows in together.items() if rows.tobytes() != single[: len(rows)].tobytes())
    difference = max(float(np.abs(rows - single[: len(rows)]).max()) for rows in together.values())
    return Exactness(wrong, difference, float(np.sqrt(np.mean(np.square(single, dtype=np.float64)))))


# -- weights -----------------------------------------------------------------------------------------------------------


def _representatives(model: Model) -> dict[str, TensorSpec]:
    """The smallest matrix of every type and placement that the model multiplies with."""
    files = model.file.tensors
    tied = "output.weight" not in files
    found: dict[str, tuple[int, TensorSpec]] = {}
    for spec in model.arch.tensors():
        tensor = model.weights.get(spec.name)
        if tensor is None or model.weights.host_table(tensor):
            continue
        if spec.role not in ("matrix", "experts") and not (tied and spec.name == "token_embd.weight"):
            continue
        name = GGML_TYPES[tensor.type].name
        name += " repacked" if model.weights.repacked(tensor) else ""
        name += " tiled" if model.weights.tiled(tensor) else ""
        name += " experts" if spec.role == "experts" else ""
        size = files[spec.name].nbytes
        if name not in found or size < found[name][0]:
            found[name] = size, spec
    return {name: spec for name, (_, spec) in found.items()}


def _weight(model: Model, backend: Backend, spec: TensorSpec) -> Exactness:
    """One matrix times rows of normal numbers, by the route that a step takes."""
    weight = model.weights[spec.name]
    columns, experts = int(weight.ne[0]), int(weight.ne[2])
    x = _normal(MOST, columns)
    picks = np.arange(MOST, dtype=np.int32) // 2 % experts  # neighbours go to the same expert in pairs

    def run(first: int, count: int) -> Array:
        g = GraphBuilder(capacity=32)
        rows = g.input("x", F32, columns, count)
        inputs: dict[str, NDArray[Any]] = {"x": x[first : first + count]}
        if spec.role == "experts":
            inputs["picks"] = picks[first : first + count]
            y = g.mul_mat_id(weight, g.reshape(rows, columns, 1, count), g.input("picks", I32, 1, count))
        else:
            key = Key(count, 1, 0, model.memory.buckets(count, count), Want("all"))
            y = StepGraph(key, g, model.arch, model.weights, model.memory).linear(weight, rows)
        return _replay(g, backend, g.output(y), inputs).reshape(count, -1)

    return _compare(run)


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(model: Model, backend: Backend, name: str, like: KVArena) -> tuple[str, Exactness]:
    """One layer's attention over normal keys and values, in an arena like one of the model's; its name first."""
    layer = next(iter(like.layers.values()))
    types = _CACHE_NAMES[like.type_k], _CACHE_NAMES[like.type_v]
    depth = max(0, min(DEPTH, model.n_ctx - MOST))
    shapes = {
        "q": (layer.head_dim, layer.heads),
        "k": (layer.head_dim, layer.kv_heads),
        "v": (layer.value_dim, layer.kv_heads),
    }
    values = {x: _normal(depth + MOST, width * heads) for x, (width, heads) in shapes.items()}
    arena = KVArena({0: layer}, depth + MOST, 1, model.device, *types)

    def run(first: int, count: int, attends: bool = True) -> Array:
        g = GraphBuilder(capacity=64)
        step = KVStep(arena, g, "cache", 0, 1, count, arena.bucket(first + count, count))
        q, k, v = (g.input(x, F32, width, heads, count) for x, (width, heads) in shapes.items())
        step.store(0, k, v)
        result = g.output(step.attend(0, q, layer.head_dim**-0.5)) if attends else None
        inputs = {x: rows[first : first + count] for x, rows in values.items()}
        return _replay(g, backend, result, inputs, step, first).reshape(count, -1)

    with closing(arena):
        if depth:
            run(0, depth, attends=False)
        path = "flash" if KVStep(arena, GraphBuilder(64), "cache", 0, 1, 1, arena.bucket(1, 1)).flash else "soft"
        return f"{name} {'/'.join(types)} {path}", _compare(lambda first, count: run(depth + first, count))


def _replay(
    g: GraphBuilder,
    backend: Backend,
    result: Tensor | None,
    inputs: Mapping[str, NDArray[Any]],
    step: KVStep | None = None,
    first: int = 0,
) -> Array:
    """Runs a graph once and frees it; `first` is the position of the first row of `step`. Returns the result's values."""
    with closing(Graph(g, backend)) as graph:
        for name, rows in inputs.items():
            graph.inputs[name].reshape(rows.shape)[:] = rows
        if step is not None:
            KVInputs(step, graph.inputs).fill(ffi.new("int32_t[1]", [first]))
        graph.replay()
        return np.empty(0, np.float32) if result is None else buffers.read(result)


# -- the whole model ---------------------------------------------------------------------------------------------------


def _forward(model: Model, backends: tuple[Backend, ...]) -> Exactness:
    """Logits of a few tokens after a short prefix, in a sequence of its own."""
    large = sum(info.nbytes for info in model.file.tensors.values()) > LARGE
    rng = np.random.default_rng(SEED)
    prefix, tokens = (rng.integers(0, model.vocab_size, (1, count)).astype(np.int32) for count in (MOST // 2, MOST))
    arena = next(iter(model.memory.arenas.values()))
    types = _CACHE_NAMES[arena.type_k], _CACHE_NAMES[arena.type_v]
    memory = Memory(model.arch.attention(), prefix.size + MOST, 1, model.device, *types)
    with closing(memory), closing(Forward(model.arch, model.weights, memory, backends, model.vocab_size)) as forward:
        sequence = Slots(1, prefix.size + MOST, memory).take()

        def extend(tokens: NDArray[np.int32]) -> None:
            forward.run(Batch((sequence,), tokens, Want("none")))
            sequence.commit(tokens.size)

        def run(first: int, count: int) -> Array:
            if sequence.truncate(prefix.size + first) < prefix.size + first:  # a recurrent state begins anew
                sequence.truncate(0)
                extend(prefix)
                for i in range(first):
                    extend(tokens[:, i : i + 1])
            want = Want("last" if count == 1 else "all")  # what a plain step and a verify ask for
            rows = forward.run(Batch((sequence,), tokens[:, first : first + count], want))
            sequence.commit(count)
            return np.stack([rows.logits(0, i) for i in range(count)])

        return _compare(run, (2, MOST), 2) if large else _compare(run)


def _normal(rows: int, columns: int) -> Array:
    return np.random.default_rng(SEED).standard_normal((rows, columns), np.float32)
