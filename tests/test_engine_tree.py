"""The radix tree of prefixes, beside a dict of every prefix that was ever put in: what is found, read, kept and pushed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tsgg.engine.tree import Node, PrefixTree, common_prefix
from tsgg.errors import TsggError
from tsgg.memory.rows import Cells, RowCopies, State

AXES = (1, 0)  # of positions: rows as K has them, and transposed as V
ROW = 2 * 4 + 3 * 4  # bytes of a position in both lanes
STATE = 16  # bytes


class FakeRows(RowCopies):
    """Stands for a model's memory: what a row holds follows from the tokens up to it, as in a model."""

    def __init__(self, needs_state: bool = False, slack: int = 0) -> None:
        """`slack`: how far a state reaches back, as rings do."""
        self.row_bytes, self.needs_state, self.slack = ROW, needs_state, slack

    def reaches(self, state: State, length: int) -> bool:
        return state.length - self.slack <= length <= state.length


def cells(tokens: Sequence[int], start: int, end: int) -> Cells:
    codes = np.array([hash(tuple(tokens[: at + 1])) & 0x7FFFFFFF for at in range(start, end)], np.int32)
    k, v = np.stack([codes, codes + 1]), np.stack([codes, -codes, codes ^ 5], axis=1)
    return Cells(end - start, (k, v), AXES)


def reader(tokens: Sequence[int]) -> Callable[[int, int], Cells]:
    return lambda start, end: cells(tokens, start, end)


def state(length: int) -> State:
    return State(length, length, (), (np.full(STATE, length % 251, np.uint8),))


def add(tree: PrefixTree, tokens: Sequence[int], with_state: bool = False, pin: bool = False) -> Node | None:
    node = tree.insert(list(tokens), reader(tokens), state(len(tokens)) if with_state else None, pin=pin)
    tree.check_integrity()
    return node


def held(tree: PrefixTree, tokens: Sequence[int]) -> int:
    return tree.match(list(tokens), len(tokens)).length


def assert_reads(tree: PrefixTree, tokens: Sequence[int], start: int, end: int) -> None:
    """The parts lie side by side and hold what was put in."""
    at = start
    for first, part in tree.read(list(tokens), start, end):
        assert first == at and part.count > 0
        at += part.count
        expected = cells(tokens, first, at)
        assert all(np.array_equal(a, b) for a, b in zip(part.lanes, expected.lanes, strict=True))
    assert at == end


# -- beside a dict -------------------------------------------------------------------------------------------------------

TEXTS = st.lists(st.integers(0, 2), max_size=12).map(tuple)  # few tokens: texts part and meet at every length


@dataclass
class Known:
    """A dict in place of the tree: every prefix that was put in, and at which of them a state lies. It forgets nothing."""

    rows: set[tuple[int, ...]]
    states: set[tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        return ROW * len(self.rows) + STATE * len(self.states)

    def length(self, tokens: tuple[int, ...]) -> int:
        return max((at for at in range(len(tokens) + 1) if tokens[:at] in self.rows), default=0)

    def resumable(self, tokens: tuple[int, ...], slack: int) -> int:
        """The furthest that a state on the way reaches, none behind where the text leaves what is known..."""
        length = self.length(tokens)
        reached = [0]
        for text in self.states:
            shared = min(length, common_prefix(text, tokens))
            if shared >= len(text) - slack and shared:
                reached.append(min(shared, len(text)))
        return max(reached)


class TreeMachine(RuleBasedStateMachine):
    @initialize(budget=st.sampled_from((0, 5 * ROW, 20 * ROW, 10**6)), needs_state=st.booleans())
    def begin(self, budget: int, needs_state: bool) -> None:
        self.tree = PrefixTree(FakeRows(needs_state), budget)
        self.known = Known(set(), set())
        self.pins: list[tuple[Node, tuple[int, ...]]] = []

    @rule(tokens=TEXTS.filter(bool), with_state=st.booleans(), pin=st.sampled_from((False, False, False, True)))
    def insert(self, tokens: tuple[int, ...], with_state: bool, pin: bool) -> None:
        free = not any(node.pins for node in self.tree.nodes())
        node = add(self.tree, tokens, with_state, pin)
        if node is None:
            assert not pin and len(tokens) * ROW + STATE > self.tree.budget
            return
        self.known.rows |= {tokens[:at] for at in range(1, len(tokens) + 1)}
        if with_state:
            self.known.states.add(tokens)
        if pin:
            self.pins.append((node, tokens))
        if pin or (free and len(tokens) * (ROW + STATE) <= self.tree.budget):
            assert held(self.tree, tokens) == len(tokens), "the latest goes last"

    @rule(tokens=TEXTS, limit=st.integers(0, 12))
    def match(self, tokens: tuple[int, ...], limit: int) -> None:
        limit = min(limit, len(tokens))
        found, length = self.tree.match(list(tokens), limit), self.known.length(tokens[:limit])
        everything = self.known.nbytes <= self.tree.budget
        assert found.length == length if everything else found.length <= length
        assert found.resumable <= found.length
        if not self.tree._rows.needs_state:
            assert found.resumable == found.length and found.state is None
            return
        resumable = self.known.resumable(tokens[:limit], 0)
        assert found.resumable == resumable if everything else found.resumable <= resumable
        assert found.resumable == (found.state.length if found.state else 0)

    @rule(tokens=TEXTS, start=st.integers(0, 11))
    def read(self, tokens: tuple[int, ...], start: int) -> None:
        end = held(self.tree, tokens)
        if start < end:
            assert_reads(self.tree, tokens, start, end)

    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        if self.pins:
            node, _ = self.pins.pop(which % len(self.pins))
            self.tree.unpin(node)

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.known, self.pins = Known(set(), set()), []
        assert len(self.tree) == self.tree.nbytes == 0

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        assert len(self.tree) <= len(self.known.rows)
        for _, tokens in self.pins:
            assert held(self.tree, tokens) == len(tokens)
        if self.tree.nbytes > self.tree.budget:
            leaves = [node for node in self.tree.nodes() if not node.children]
            assert all(node.pins for node in leaves), "over the budget only by what is pinned, and what it hangs on"


def test_the_tree_finds_and_reads_what_a_dict_of_prefixes_would() -> None:
    once = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
    run_state_machine_as_test(TreeMachine, settings=once)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TEXTS, TEXTS)
def test_the_common_prefix_is_that_of_a_loop(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    assert common_prefix(list(a), list(b)) == count


# -- one rule at a time --------------------------------------------------------------------------------------------------


def test_the_leaf_that_was_used_longest_ago_goes_first_and_its_parent_after_it() -> None:
    tree = PrefixTree(FakeRows(), 8 * ROW)
    for text in ((1, 1, 2), (1, 1, 3), (4, 4), (5, 5)):  # 4 + 2 + 2 rows: all fit
        add(tree, text)
    list(tree.read([1, 1, 2], 0, 3))
    add(tree, (6, 6))
    assert [held(tree, text) for text in ((1, 1, 2), (1, 1, 3), (4, 4), (5, 5), (6, 6))] == [3, 2, 0, 2, 2]
    add(tree, (7, 7, 7, 7))
    assert [held(tree, text) for text in ((1, 1, 2), (5, 5), (6, 6), (7, 7, 7, 7))] == [2, 0, 2, 4]
    add(tree, (8, 8))
    assert [held(tree, text) for text in ((1, 1, 2), (6, 6), (7, 7, 7, 7), (8, 8))] == [0, 2, 4, 2]


def test_looking_for_a_text_does_not_keep_it() -> None:
    tree = PrefixTree(FakeRows(), 4 * ROW)
    add(tree, (1, 1))
    add(tree, (2, 2))
    assert held(tree, (1, 1)) == 2
    add(tree, (3, 3))
    assert [held(tree, text) for text in ((1, 1), (2, 2), (3, 3))] == [0, 2, 2]


def test_a_pinned_text_stays_with_what_it_hangs_on_until_its_last_pin_is_gone() -> None:
    tree = PrefixTree(FakeRows(), 4 * ROW)
    add(tree, (1, 1))
    node = add(tree, (1, 1, 2, 2, 2, 2), pin=True)
    assert node is not None and add(tree, (1, 1, 2, 2, 2, 2), pin=True) is node
    for first in (5, 6, 7):
        add(tree, (first, 1))
    assert held(tree, (1, 1, 2, 2, 2, 2)) == 6 and tree.nbytes == 6 * ROW, "all else had to go"
    tree.unpin(node)
    assert held(tree, (1, 1, 2, 2, 2, 2)) == 6
    tree.unpin(node)
    assert tree.nbytes <= tree.budget and held(tree, (1, 1, 2, 2, 2, 2)) == 2


def test_a_pin_holds_though_its_node_is_cut_later() -> None:
    tree = PrefixTree(FakeRows(), 4 * ROW)
    node = add(tree, (1, 2, 3, 4), pin=True)
    add(tree, (1, 2, 9))
    add(tree, (8, 8, 8))
    assert held(tree, (1, 2, 3, 4)) == 4
    assert node is not None
    tree.unpin(node)
    assert tree.nbytes <= tree.budget


def test_what_is_larger_than_the_budget_is_not_taken_and_pushes_nothing_out() -> None:
    tree = PrefixTree(FakeRows(), 4 * ROW)
    add(tree, (1, 1, 1))
    assert add(tree, (2, 2, 2, 2, 2)) is None and add(tree, (2, 2, 2, 2), with_state=True) is None
    assert held(tree, (1, 1, 1)) == 3 and held(tree, (2,)) == 0
    assert add(tree, (1, 1, 1, 1, 1, 1, 1)) is not None, "of a text that is partly there only the rest counts"


def test_a_text_can_be_resumed_where_a_state_lies_and_as_far_back_as_it_reaches() -> None:
    tree = PrefixTree(FakeRows(needs_state=True, slack=2), 10**6)
    add(tree, (1, 2, 3, 4), with_state=True)
    add(tree, (1, 2, 3, 4, 5, 6, 7, 8, 9), with_state=True)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert [tree.match(text, limit).resumable for limit in range(11)] == [0, 0, 2, 3, 4, 4, 4, 7, 8, 9, 9]
    found = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 8], 9)
    assert (found.length, found.resumable) == (8, 8) and found.state is not None and found.state.length == 9


def test_the_first_state_behind_a_text_stays() -> None:
    tree = PrefixTree(FakeRows(needs_state=True), 10**6)
    for _ in range(2):
        add(tree, (1, 2), with_state=True)
    assert tree.nbytes == 2 * ROW + STATE
    add(tree, (1, 2, 3))
    assert tree.match([1, 2, 3], 3).resumable == 2


def test_both_halves_of_a_cut_node_own_their_rows() -> None:
    """Else the memory of one that is pushed out would stay as long as the other."""
    tree = PrefixTree(FakeRows(), 10**6)
    add(tree, (1, 2, 3, 4))
    add(tree, (1, 2, 5))
    lanes = [lane for node in tree.nodes() for lane in (node.cells.lanes if node.cells else ())]
    assert len(lanes) == 6 and all(lane.base is None for lane in lanes)
    assert_reads(tree, (1, 2, 3, 4), 0, 4)
    assert_reads(tree, (1, 2, 5), 1, 3)


def test_rows_that_cannot_be_read_leave_the_tree_whole() -> None:
    tree = PrefixTree(FakeRows(), 10**6)
    add(tree, (1, 2, 3, 4))

    def refuse(start: int, end: int) -> Cells:
        raise MemoryError

    with pytest.raises(MemoryError):
        tree.insert([1, 2, 5], refuse)
    tree.check_integrity()
    assert held(tree, (1, 2, 3, 4)) == 4 and held(tree, (1, 2, 5)) == 2


@pytest.mark.parametrize("damage", ["bytes", "count", "place", "state"])
def test_a_tree_that_contradicts_itself_is_told(damage: str) -> None:
    tree = PrefixTree(FakeRows(), 10**6)
    add(tree, (1, 2, 3))
    node = add(tree, (1, 2, 3, 4, 5), with_state=True)
    assert node is not None
    if damage == "bytes":
        tree.nbytes += 1
    elif damage == "count":
        node.cells = cells((1, 2, 3, 4, 5), 3, 4)
    elif damage == "place":
        node.start += 1
    else:
        node.state = state(4)
    with pytest.raises(TsggError, match="prefix tree"):
        tree.check_integrity()
