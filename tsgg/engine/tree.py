"""A radix tree over token ids: rows of prefixes that no slot holds any more, on the host, under a byte budget.

    root ── "You are a helpful ..." ──┬── "What is ggml?" ...     node: tokens, their cells, and where the model has windows
              pinned                  └── "Write a poem" ...      or recurrent layers perhaps a state behind the last of them

A node is cut in two where texts part. The leaf that was used longest ago goes first; a pinned node, and so its ancestors, stay.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tsgg.errors import TsggError
from tsgg.memory.rows import Cells, RowCopies, State

Reader = Callable[[int, int], Cells]  # positions start..end - 1


@dataclass(slots=True, eq=False)
class Node:
    """Positions start.. of a text, up to the next place where texts part."""

    start: int
    tokens: list[int]
    cells: Cells | None  # None: the root
    parent: Node | None
    state: State | None = None  # behind the last token
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    used: int = 0
    pins: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return (self.cells.nbytes if self.cells else 0) + (self.state.nbytes if self.state else 0)


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knows of a text."""

    length: int  # tokens that are there
    resumable: int  # of these, as many as a sequence can be put back from
    state: State | None  # what it is put back with, where the model needs one


class PrefixTree:
    """For the engine's thread. `nbytes` never exceeds `budget`, except by what is pinned."""

    def __init__(self, rows: RowCopies, budget: int) -> None:
        self._rows = rows
        self.budget = budget
        self.nbytes = 0
        self._root = Node(0, [], None, None)
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        """Tokens."""
        return sum(len(node.tokens) for node in self.nodes())

    def nodes(self) -> Iterator[Node]:
        """All but the root, parents before children."""
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """What is there of the first `limit` tokens. Changes nothing, not even who was used last."""
        path = self._walk(tokens, limit)
        length = path[-1][0].start + path[-1][1]
        if not self._rows.needs_state:
            return Match(length, length, None)
        best, state = 0, None
        for node, _ in path:
            if node.state is not None:
                reached = min(length, node.state.length)
                if reached > best and self._rows.reaches(node.state, reached):
                    best, state = reached, node.state
        return Match(length, best, state)

    def read(self, tokens: Sequence[int], start: int, end: int) -> Iterator[tuple[int, Cells]]:
        """The cells of positions start..end - 1, which `match` has found, as (first position, cells)."""
        for node, matched in self._walk(tokens, end):
            node.used = next(self._clock)
            first, last = max(start, node.start), min(end, node.start + matched)
            if node.cells is not None and first < last:
                yield first, node.cells.part(first - node.start, last - node.start)

    def insert(
        self, tokens: Sequence[int], reader: Reader, state: State | None = None, pin: bool = False
    ) -> Node | None:
        """Adds what is missing of the text, and the state behind it. None where that is more than the budget allows.

        `pin`: it stays until `unpin`.
        """
        node, matched = self._walk(tokens, len(tokens))[-1]
        missing = len(tokens) - node.start - matched
        size = missing * self._rows.row_bytes + (state.nbytes if state else 0)
        if not pin and size > self.budget:
            return None
        if matched < len(node.tokens):
            node = self._split(node, matched)
        now = next(self._clock)
        if missing:
            start = node.end
            child = Node(start, list(tokens[start:]), reader(start, len(tokens)), node)
            node.children[child.tokens[0]] = child
            node = child
            self.nbytes += child.nbytes
        if state is not None and node.state is None and node is not self._root:
            node.state = state
            self.nbytes += state.nbytes
        node.pins += pin
        above: Node | None = node
        while above is not None:
            above.used, above = now, above.parent
        self._evict(keep=node)
        return node

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        self._evict()

    def clear(self) -> None:
        """Forgets everything, pinned or not."""
        self._root.children.clear()
        self.nbytes = 0

    def check_integrity(self) -> None:
        """Raises `TsggError` where the tree contradicts itself."""
        size = 0
        for node in self.nodes():
            parent = node.parent
            if parent is None or parent.children.get(node.tokens[0]) is not node or parent.end != node.start:
                raise TsggError(f"prefix tree: the node at {node.start} hangs in the wrong place")
            if node.cells is None or node.cells.count != len(node.tokens):
                raise TsggError(f"prefix tree: the node at {node.start} has other cells than tokens")
            if node.state is not None and node.state.length != node.end:
                raise TsggError(f"prefix tree: the node at {node.start} has the state of another length")
            size += node.nbytes
        if size != self.nbytes:
            raise TsggError(f"prefix tree: {self.nbytes} bytes are accounted for and {size} are there")
        pinned = any(node.pins for node in self.nodes())
        if size > self.budget and not pinned:
            raise TsggError(f"prefix tree: {size} bytes are over the budget of {self.budget}")

    def _walk(self, tokens: Sequence[int], limit: int) -> list[tuple[Node, int]]:
        """The nodes along the text, with how many of their tokens it shares. All but the last share all."""
        path, node, at = [(self._root, 0)], self._root, 0
        while at < limit and (child := node.children.get(tokens[at])) is not None:
            shared = common_prefix(child.tokens, tokens[at : min(limit, at + len(child.tokens))])
            path.append((child, shared))
            node, at = child, at + shared
            if shared < len(child.tokens):
                break
        return path

    def _split(self, node: Node, count: int) -> Node:
        """Cuts a node behind its first `count` tokens and returns the new first part."""
        assert node.cells is not None and node.parent is not None
        head = Node(node.start, node.tokens[:count], node.cells.part(0, count), node.parent, used=node.used)
        node.parent.children[head.tokens[0]] = head
        head.children[node.tokens[count]] = node
        node.cells = node.cells.part(count, len(node.tokens))
        node.start, node.tokens, node.parent = node.start + count, node.tokens[count:], head
        return head

    def _evict(self, keep: Node | None = None) -> None:
        """Frees leaves until the budget holds; `keep` goes last."""
        if self.nbytes <= self.budget:
            return
        leaves = [(node is keep, node.used, id(node), node) for node in self.nodes() if not node.children]
        heapq.heapify(leaves)
        while self.nbytes > self.budget and leaves:
            *_, node = heapq.heappop(leaves)
            if node.pins:
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens[0]]
            self.nbytes -= node.nbytes
            if not parent.children and parent is not self._root:
                heapq.heappush(leaves, (parent is keep, parent.used, id(parent), parent))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two lists share, by comparing runs: lists of thousands are compared at the speed of C."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end
    low, high = 0, end  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
