"""Helpers for tests of models: one forward as arrays, the cache bytes of a sequence, the golden trunks that can be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tsgg.ggml import buffers
from tsgg.ggml.library import ffi, lib
from tsgg.gguf import read_gguf
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.models import ARCHITECTURES
from tsgg.speculative.protocol import Batch, Want

Array = NDArray[np.float32]

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
PLAIN = Want("last")  # what a plain decode step asks for
VERIFY = Want("all")  # what a verify asks for


def golden_trunks() -> list[str]:
    """Names of the golden trunks whose architecture is implemented; none where the folder is absent."""
    paths = sorted((GOLDEN / "trunks").glob("*.gguf"))
    return [path.stem for path in paths if read_gguf(path).architecture in ARCHITECTURES]


def step(model: Model, sequence: Sequence, tokens: list[int], kept: int | None = None, want: Want = VERIFY) -> Array:
    """One forward of one sequence, of whose rows `kept` (default all) are committed: copies of logits [rows, vocab]."""
    return batch(model, [sequence], [tokens], kept, want)[0]


def batch(
    model: Model, sequences: list[Sequence], tokens: list[list[int]], kept: int | None = None, want: Want = VERIFY
) -> list[Array]:
    """`step` for several sequences in neighbouring slots, the same number of tokens for each."""
    rows = model.forward(Batch(tuple(sequences), np.array(tokens, np.int32), want))
    asked = range(len(tokens[0])) if want.logits == "all" else [-1] if want.logits == "last" else []
    logits = [np.array([rows.logits(i, row) for row in asked]) for i in range(len(sequences))]
    for sequence, row in zip(sequences, tokens, strict=True):
        sequence.commit(len(row) if kept is None else kept)
    return logits


def decode(model: Model, sequence: Sequence, tokens: list[int]) -> Array:
    """Tokens one row at a time, as plain decoding forwards them: logits [tokens, vocab]."""
    return np.concatenate([step(model, sequence, [token], want=PLAIN) for token in tokens])


def same_bits(a: Array, b: Array) -> bool:
    """Whether two F32 arrays hold the same bits; 0.0 and -0.0 differ, equal NaNs do not."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def visible_cells(model: Model, sequence: Sequence) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """(name, bytes) of every cache tensor's cells that the sequence's next row will see, in order of position, and of the
    recurrent states."""
    for name, arena in model.memory.arenas.items():
        oldest = max(0, sequence.length + 1 - arena.window) if arena.window else 0
        cells = np.arange(oldest, sequence.length) % arena.cells
        for layer in arena.layers:
            k, v = (_bytes(tensors[layer])[sequence.slot] for tensors in (arena.k, arena.v))
            yield f"{name} k {layer}", k[:, cells]
            if arena.transposed:
                size = v.shape[-1] // arena.cells
                yield f"{name} v {layer}", v.reshape(*v.shape[:2], arena.cells, size)[:, :, cells]
            else:
                yield f"{name} v {layer}", v[:, cells]
    if (recurrent := model.memory.recurrent) is not None:
        for kind, tensors in (("conv", recurrent.conv), ("state", recurrent.state)):
            for layer, tensor in tensors.items():
                yield f"{kind} {layer}", buffers.read(tensor).reshape(recurrent.slots, -1)[sequence.slot].view(np.uint8)


def _bytes(tensor: buffers.Tensor) -> NDArray[np.uint8]:
    """All bytes of a contiguous tensor: [slots, heads, ne1, bytes of a row]."""
    out = np.empty(buffers.nbytes(tensor), np.uint8)
    lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(out), 0, out.nbytes)
    _, rows, heads, slots = buffers.shape(tensor)
    return out.reshape(slots, heads, rows, -1)


def differing_cells(model: Model, one: Sequence, other: Sequence, others: Model | None = None) -> list[str]:
    """Cache tensors in which two sequences of the same length differ, bit for bit. `others`: the model of `other`."""
    pairs = zip(visible_cells(model, one), visible_cells(others or model, other), strict=True)
    return [name for (name, a), (_, b) in pairs if not np.array_equal(a, b)]
