"""Files of saved prefixes, made without a model: well-formed ones, and forged ones whose checksums are right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from tsgg.engine import file
from tsgg.engine.records import Record, arrays
from tsgg.ggml.devices import pick_device
from tsgg.memory import Memory
from tsgg.memory.rows import RowCopies
from tsgg.models.base import Attention, Recurrent

BINDING = {"model file": "abc", "device": "CPU"}
VOCAB = 300
BUDGET = 1 << 20


@lru_cache(maxsize=1)
def rows() -> RowCopies:
    """Of a memory with a layer of each kind."""
    layers = (Attention(2, 2, 8, 8), Attention(2, 1, 8, 4, window=8), Recurrent(6, 4, 2, 4, 4))
    memory = Memory(layers, 256, 1, pick_device("cpu"), "f16", "f16")
    rows.memory = memory  # type: ignore[attr-defined]  # kept as long as the rows
    return RowCopies(memory)


def record(parent: int, tokens: list[int], start: int, highest: int = 0) -> Record:
    """Tokens behind `start` others, with cells of their own, and a state where `highest` says how far rings were written."""
    cells = rows().new_cells(len(tokens))
    state = rows().new_state(start + len(tokens), highest) if highest else None
    rng = np.random.default_rng(sum(tokens))
    for array in arrays(cells, state):
        array.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, array.nbytes)
    return Record(parent, tokens, cells, state)


@lru_cache(maxsize=1)
def some_records() -> tuple[Record, ...]:
    return (
        record(-1, [1, 2, 3, 4, 5], 0),
        record(0, [6, 7], 5, highest=9),
        record(0, [8, 9, 10], 5),
        record(2, [11], 8, highest=30),
        record(-1, [2, 2], 0, highest=2),
    )


def read(path: str | Path, budget: int = BUDGET) -> list[Record]:
    """What `read` makes of a file, called in a child process too."""
    return file.read(path, BINDING, rows(), VOCAB, budget)


@dataclass
class Forged:
    """A file of `some_records` in which something was changed before it was sealed."""

    magic: bytes = file.MAGIC
    version: int = file.VERSION
    header: bytes = json.dumps(BINDING).encode()
    index: list[tuple[int, int, int, int]] = field(
        default_factory=lambda: [
            (r.parent, len(r.tokens), r.state.highest if r.state else 0, r.nbytes) for r in some_records()
        ]
    )
    blocks: list[bytes] = field(
        default_factory=lambda: [b"".join(array.tobytes() for array in r.arrays()) for r in some_records()]
    )
    header_bytes: int | None = None  # what the start says, where it is not so
    nodes: int | None = None

    def parts(self) -> Sequence[bytes]:
        """All that borders on something else."""
        counts = (
            len(self.header) if self.header_bytes is None else self.header_bytes,
            len(self.index) if self.nodes is None else self.nodes,
        )
        start = file.START.pack(self.magic, self.version, *counts)
        head = [start, self.header, *(file.INDEX.pack(*entry) for entry in self.index)]
        whole = [*head, hashlib.sha256(b"".join(head)).digest(), *self.blocks]
        return [*whole, hashlib.sha256(b"".join(whole)).digest()]

    def data(self) -> bytes:
        return b"".join(self.parts())
