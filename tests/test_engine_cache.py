"""The prefix cache on real memory: where a prompt's beginning is found, what its slot then holds, and what stays of the others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine_requests import KINDS, text, write
from tests.trunk_steps import differing_cells
from tsgg.engine.cache import WORTH_SAVING, PrefixCache
from tsgg.errors import TsggError
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.speculative.protocol import Batch, Want

N_CTX = 1000  # a ring of the window layers is written over
A, B, C, D = (list(text(200, seed)) for seed in (1, 2, 3, 4))


class Desk:
    """A cache and those who have taken a slot of it. `fresh`: another model, to compute what a slot should hold."""

    def __init__(self, model: Model, fresh: Model, budget: int) -> None:
        self.model, self.fresh = model, fresh
        self.cache = PrefixCache(model, budget)
        self.busy: list[Sequence] = []

    def take(self, tokens: list[int]) -> tuple[Sequence, int]:
        """A slot in which the prompt was read, and how many of its tokens were found."""
        sequence = self.cache.place(tokens, len(tokens) - 1, self.busy)
        found = sequence.length
        assert sequence.tokens == tokens[:found]
        self.busy.append(sequence)
        forward(self.model, sequence, tokens[found:])
        return sequence, found

    def leave(self, sequence: Sequence) -> None:
        self.busy.remove(sequence)
        self.cache.release(sequence)
        self.check()

    def run(self, tokens: list[int]) -> int:
        """Takes, reads and leaves; how many tokens were found."""
        sequence, found = self.take(tokens)
        self.leave(sequence)
        return found

    def check(self) -> None:
        self.cache.check_integrity(self.busy, self.model.slots.count)

    def differences(self, sequence: Sequence) -> list[str]:
        """Where the slot holds other bits than one that has read the same tokens at once."""
        lone = self.fresh.new_sequence()
        forward(self.fresh, lone, sequence.tokens)
        try:
            return differing_cells(self.model, sequence, lone, self.fresh)
        finally:
            self.fresh.release(lone)

    def close(self) -> None:
        for sequence in (*self.busy, *self.cache.idle):
            self.model.release(sequence)


def forward(model: Model, sequence: Sequence, tokens: list[int]) -> None:
    for start in range(0, len(tokens), 512):
        chunk = tokens[start : start + 512]
        model.forward(Batch((sequence,), np.array([chunk], np.int32), Want("last")))
        sequence.commit(len(chunk))


class Shop:
    """The models of one kind; desks are opened over them, one after the other."""

    def __init__(self, path: Path, kind: str) -> None:
        self.kind = kind
        self._models = {slots: Model(path, n_ctx=N_CTX, n_seq=slots, n_threads=1) for slots in (1, 3)}
        self._fresh = Model(path, n_ctx=N_CTX, n_threads=1)
        self._open: list[Desk] = []

    def desk(self, slots: int, budget: int = 64 << 20) -> Desk:
        self.leave()
        self._open.append(Desk(self._models[slots], self._fresh, budget))
        return self._open[-1]

    def leave(self) -> None:
        while self._open:
            self._open.pop().close()

    def close(self) -> None:
        for model in (*self._models.values(), self._fresh):
            model.close()


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(write(tmp_path_factory.mktemp("cache"), request.param), request.param)
    yield shop
    shop.close()


@pytest.fixture
def shop(opened: Shop) -> Iterator[Shop]:
    yield opened
    opened.leave()


# -- where a beginning is found --------------------------------------------------------------------------------------------


def test_a_prompt_takes_over_the_slot_that_holds_it(shop: Shop) -> None:
    desk = shop.desk(3)
    slots = {}
    for tokens in (A, B, C):
        sequence, found = desk.take(tokens)
        assert found == 0
        slots[tokens[0]] = sequence.slot
        desk.leave(sequence)
    for tokens in (B, C, A):
        sequence, found = desk.take([*tokens, 5, 6, 7])
        assert (found, sequence.slot) == (200, slots[tokens[0]])
        assert not desk.differences(sequence)
        desk.leave(sequence)
    assert len(desk.cache.tree) == 0, "nothing was lost, so nothing was saved"


def test_what_a_slot_loses_is_found_in_the_tree(shop: Shop) -> None:
    desk = shop.desk(1)
    for tokens in (A, B, C):
        assert desk.run(tokens) == 0
    for tokens in (A, C, B):
        sequence, found = desk.take([*tokens, 9, 9])
        assert found == 200
        assert not desk.differences(sequence)
        desk.leave(sequence)


def test_a_beginning_that_a_busy_slot_holds_is_copied(shop: Shop) -> None:
    desk = shop.desk(3)
    holder, _ = desk.take(A)
    sequence, found = desk.take([*A, 1, 2])
    assert found == 200 and sequence is not holder
    assert not desk.differences(sequence) and not desk.differences(holder)
    assert holder.tokens == A


def test_a_text_that_parts_from_another_shares_what_the_kind_of_memory_can_share(shop: Shop) -> None:
    """Full attention goes on anywhere, a ring as far back as it reaches, a recurrent state only where one was kept."""
    desk = shop.desk(3)
    desk.run(A)
    parted = [*A[:150], *D[:80]]
    sequence, found = desk.take(parted)
    assert found == (0 if shop.kind == "qwen35" else 150)
    assert not desk.differences(sequence)
    desk.leave(sequence)
    assert desk.cache.known([*A[:150], 1, 1], 151, []) == 150, "the rows are there, though no state may be"


def test_where_texts_part_a_captured_state_lets_others_go_on(shop: Shop) -> None:
    desk = shop.desk(3)
    sequence = desk.cache.place(A, 150, [])
    desk.busy.append(sequence)
    forward(desk.model, sequence, A[:150])
    desk.cache.capture(sequence)
    forward(desk.model, sequence, A[150:])
    assert len(desk.cache.tree) == 150
    other, found = desk.take([*A[:150], *D[:50]])
    assert found == 150
    assert not desk.differences(other)


def test_the_row_of_the_last_token_is_never_taken_as_found(shop: Shop) -> None:
    desk = shop.desk(1)
    desk.run(A)
    _, found = desk.take(A)
    assert found == (0 if shop.kind == "qwen35" else 199)


# -- pins and budgets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1 << 10, 64 << 20])
def test_a_pinned_text_is_found_whatever_comes_until_it_is_unpinned(shop: Shop, budget: int) -> None:
    desk = shop.desk(1, budget)
    assert not desk.cache.pin(A), "no slot holds it yet"
    desk.run(A)
    assert desk.cache.pin(A) and desk.cache.pin(A)
    for tokens in (B, C, D, B):
        desk.run(tokens)
    sequence, found = desk.take([*A, 4, 4])
    assert found == 200
    assert not desk.differences(sequence)
    desk.leave(sequence)
    desk.cache.unpin(A)
    desk.cache.unpin(A)
    desk.cache.unpin(B)
    desk.check()
    assert desk.cache.tree.nbytes <= budget


def test_a_pinned_text_is_pinned_once_however_often_it_was_warmed(shop: Shop) -> None:
    desk = shop.desk(1, budget=0)
    for _ in range(3):
        desk.run(A)
        assert desk.cache.pin(A)
    desk.cache.unpin(A)
    assert len(desk.cache.tree) == 0


def test_the_tree_keeps_to_its_budget_and_forgets_the_oldest(shop: Shop) -> None:
    wide = shop.desk(1)
    for tokens in (A, B):
        wide.run(tokens)
    size = wide.cache.tree.nbytes  # of one text
    desk = shop.desk(1, budget=int(2.5 * size))
    for tokens in (A, B, C, D):  # D stays in the slot
        desk.run(tokens)
        assert desk.cache.tree.nbytes <= 2.5 * size
    found = [desk.cache.found([*tokens, 1], 200, []) for tokens in (A, B, C, D)]
    assert found == [0, 200, 200, 200]


def test_without_a_budget_idle_slots_alone_keep_what_they_hold(shop: Shop) -> None:
    desk = shop.desk(1, budget=0)
    desk.run(A)
    assert desk.run([*A, 1]) == 200
    desk.run(B)
    assert desk.run([*A, 1]) == 0 and len(desk.cache.tree) == 0


@pytest.mark.parametrize("budget", [0, 64 << 20])
def test_the_slot_that_was_left_longest_ago_is_given_to_a_stranger(shop: Shop, budget: int) -> None:
    desk = shop.desk(3, budget)
    slots = {}
    for tokens in (B, C, A, [*B, 1]):  # B comes again: it was left last
        sequence, _ = desk.take(tokens)
        slots[tokens[0]] = sequence.slot
        desk.leave(sequence)
    assert len(set(slots.values())) == 3, "an empty slot before one that holds something"
    sequence, found = desk.take(D)
    assert (found, sequence.slot) == (0, slots[C[0]])


def test_a_few_tokens_are_not_worth_saving(shop: Shop) -> None:
    desk = shop.desk(1)
    desk.run(A[: WORTH_SAVING - 1])
    desk.run(B)
    assert len(desk.cache.tree) == 0
    desk.run(C)
    assert len(desk.cache.tree) == len(B)


def test_forgetting_empties_idle_slots_and_the_tree_and_leaves_busy_ones(shop: Shop) -> None:
    desk = shop.desk(3)
    holder, _ = desk.take(A)
    desk.run(B)
    assert desk.cache.pin(B)
    desk.cache.forget()
    assert holder.tokens == A and len(desk.cache.tree) == 0
    assert not any(sequence.length for sequence in desk.cache.idle)
    desk.cache.unpin(B)
    assert desk.run([*B, 1]) == 0
    assert desk.run([*A, 1]) == 200


# -- any order of things -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots, budget, seed", [(1, 64 << 20, 1), (3, 64 << 20, 2), (3, 100_000, 3), (1, 0, 4)])
def test_whatever_was_done_before_a_slot_holds_what_its_tokens_give(
    shop: Shop, slots: int, budget: int, seed: int
) -> None:
    rng = random.Random(seed)
    desk = shop.desk(slots, budget)
    roots = (A, [*A[:90], *B], list(text(790, 9)))
    answers: list[list[int]] = []
    for number in range(40):
        if len(desk.busy) == slots or (desk.busy and rng.random() < 0.4):
            sequence = rng.choice(desk.busy)
            answers.append(list(sequence.tokens))
            desk.leave(sequence)
            continue
        root = rng.choice((*roots, *answers[-4:]))
        tokens = [*root[: rng.choice((30, 85, 150, len(root)))], *text(rng.randint(1, 40), number)]
        expected = desk.cache.found(tokens, len(tokens) - 1, desk.busy)
        sequence, found = desk.take(tokens[:N_CTX])
        assert found == expected
        if number % 4 == 0 or found:
            assert not desk.differences(sequence), number
        if rng.random() < 0.5 and sequence.left > 3:  # rows that a verify has written and lost
            desk.model.forward(Batch((sequence,), np.array([[1, 2, 3]], np.int32), Want("all")))
            sequence.commit(rng.randint(0, 2))


@pytest.mark.parametrize("damage", ["lost", "twice", "pending", "closed"])
def test_a_slot_that_is_lost_or_left_in_the_middle_is_told(shop: Shop, damage: str) -> None:
    desk = shop.desk(3)
    sequence, _ = desk.take(A)
    desk.check()
    if damage == "lost":
        desk.busy.remove(sequence)
    elif damage == "twice":
        desk.busy.append(sequence)
    elif damage == "pending":
        desk.model.forward(Batch((sequence,), np.array([[1, 2]], np.int32), Want("all")))
    else:
        sequence.closed = True
    with pytest.raises(TsggError, match="slot"):
        desk.check()
    sequence.closed = False
    desk.busy = [sequence]
