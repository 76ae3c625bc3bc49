"""Nodes of a prefix tree outside it: taken out without copying rows, put into another tree as texts that were just used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsgg.engine.tree import Node, PrefixTree, Reader
from tsgg.memory.rows import Cells, State

TOKEN = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Record:
    """A node, whose parent has an earlier place among the records; -1 is the root."""

    parent: int
    tokens: list[int]
    cells: Cells
    state: State | None

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        return len(self.tokens) * TOKEN.itemsize + self.cells.nbytes + (self.state.nbytes if self.state else 0)

    def arrays(self) -> Iterator[NDArray[Any]]:
        yield np.array(self.tokens, TOKEN)
        yield from arrays(self.cells, self.state)


def arrays(cells: Cells, state: State | None) -> Iterator[NDArray[Any]]:
    """All that these are made of, in the order of a file."""
    yield from cells.lanes
    if state is not None:
        yield from (*state.rings, *state.recurrent)


def taken(tree: PrefixTree) -> list[Record]:
    """All nodes, branches in the order of their last use. Memory that the tree gives up is held as long as they are."""
    records: list[Record] = []
    places: dict[Node, int] = {}
    for leaf in sorted((node for node in tree.nodes() if not node.children), key=lambda node: node.used):
        path: list[Node] = []
        node: Node | None = leaf
        while node is not None and node.cells is not None and node not in places:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            assert node.parent is not None and node.cells is not None
            parent, places[node] = places.get(node.parent, -1), len(records)
            records.append(Record(parent, node.tokens, node.cells, node.state))
    return records


def put(tree: PrefixTree, records: Sequence[Record]) -> int:
    """Adds what the tree lacks of them, used later than all it had. Returns the tokens of those that it took, or knew."""
    tokens = 0
    for record in records:
        path = [record]
        while path[-1].parent >= 0:
            path.append(records[path[-1].parent])
        text = list(chain.from_iterable(part.tokens for part in reversed(path)))
        start = len(text) - len(record.tokens)
        if tree.match(text, start).length < start:
            continue  # what it goes on from was pushed out
        if tree.insert(text, _reader(record.cells, start), record.state) is not None:
            tokens += len(record.tokens)
    return tokens


def _reader(cells: Cells, start: int) -> Reader:
    """Of positions that begin at `start`."""

    def read(first: int, last: int) -> Cells:
        whole = (first, last) == (start, start + cells.count)
        return cells if whole else cells.part(first - start, last - start)

    return read
