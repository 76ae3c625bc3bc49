"""Where a request finds the rows of its prompt's beginning: in an idle slot, in a busy one, or in the tree.

A slot that a request has left keeps what it holds until another request needs the slot; then what would be lost goes into the
tree. A new request gets its prefix the cheapest way: it takes over the slot that holds it, and what lies behind the prefix is
saved; or the rows are copied from another slot or from the tree. Positions are cells: a copy has the same place in every slot.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tsgg.engine.tree import Node, PrefixTree, Reader, common_prefix
from tsgg.errors import TsggError
from tsgg.memory import Sequence
from tsgg.memory.rows import RowCopies, State
from tsgg.model import Model

log = logging.getLogger("tsgg.engine")

# Rows that can be copied in the time that one is computed. Measured on two cores with a model of 135M, where a row takes 4 ms
# and a copy 10 us; with a larger model both take longer.
COPIES_PER_ROW = 256
WORTH_SAVING = 32  # rows: fewer are computed again as quickly as they are looked for


@dataclass(frozen=True, slots=True)
class Source:
    """Where a prefix of `length` tokens can be had: from another slot, or (None) from the tree."""

    length: int
    sequence: Sequence | None = None


NOWHERE = Source(0)


class PrefixCache:
    """Owns the model's slots while no request has them. For the engine's thread."""

    def __init__(self, model: Model, budget: int) -> None:
        """`budget`: bytes of the tree."""
        self.rows = RowCopies(model.memory)
        self.tree = PrefixTree(self.rows, budget)
        self.idle = [model.new_sequence() for _ in range(model.slots.count)]  # the one that was left last comes last
        self._pinned: dict[tuple[int, ...], Node] = {}

    def found(self, tokens: list[int], limit: int, busy: list[Sequence]) -> int:
        """The most of the first `limit` tokens that `place` would not leave to compute."""
        return self._source(tokens, limit, [*self.idle, *busy]).length

    def known(self, tokens: list[int], limit: int, busy: list[Sequence]) -> int:
        """The most of the first `limit` tokens that were ever computed and are still somewhere, resumable or not.

        Where a model needs a state to resume, a request that leaves one there helps the next one.
        """
        held = (common_prefix(sequence.tokens, tokens[:limit]) for sequence in (*self.idle, *busy))
        return max(self.tree.match(tokens, limit).length, *held, 0)

    def place(self, tokens: list[int], limit: int, busy: list[Sequence]) -> Sequence:
        """An idle slot that now holds as many of the first `limit` tokens as could be found: its sequence's length."""
        best, best_score, own_rows, best_source = self.idle[0], -1, 0, NOWHERE
        everywhere = self._source(tokens, limit, [*self.idle, *busy])
        for sequence in sorted(self.idle, key=lambda idle: idle.slot):
            own = self._reach(sequence, tokens, limit)
            source = everywhere
            if source.sequence is sequence:
                others = [item for item in self.idle if item is not sequence]
                source = self._source(tokens, limit, [*others, *busy])
            taken = own * COPIES_PER_ROW - self._lost(sequence, own)
            brought = source.length * COPIES_PER_ROW - source.length - self._lost(sequence, 0)
            if max(taken, brought) > best_score:
                best, best_score = sequence, max(taken, brought)
                own_rows, best_source = (own, NOWHERE) if taken >= brought else (0, source)
        if own_rows or not best_source.length:
            self._save(best, own_rows)
            best.truncate(own_rows)
        else:
            self._bring(best, tokens, best_source)
        self.idle.remove(best)
        return best

    def release(self, sequence: Sequence) -> None:
        """A request has left the slot; what it holds can be found from now on."""
        self.idle.append(sequence)

    def capture(self, sequence: Sequence) -> None:
        """Puts what a busy slot holds now into the tree, with the state that others can go on from."""
        self.tree.insert(sequence.tokens, self._reader(sequence), self._state(sequence, sequence.length))

    def save_slots(self, busy: list[Sequence]) -> None:
        """Puts what all slots hold into the tree, as far as its budget goes. They keep it too."""
        for sequence in (*self.idle, *busy):
            self._save(sequence, 0)

    def pin(self, tokens: list[int]) -> bool:
        """Keeps the rows of a text, which some idle slot begins with, until `unpin`. False where none does any more."""
        key, end = tuple(tokens), len(tokens)
        for sequence in self.idle:
            if key not in self._pinned and sequence.tokens[:end] == tokens and sequence.reach(end) == end:
                state = self._state(sequence, end) if self.rows.needs_state else None
                node = self.tree.insert(tokens, self._reader(sequence), state, pin=True)
                assert node is not None
                self._pinned[key] = node
        return key in self._pinned

    def unpin(self, tokens: list[int]) -> None:
        """The text is forgotten as any other; one that was not pinned is left alone."""
        node = self._pinned.pop(tuple(tokens), None)
        if node is not None:
            self.tree.unpin(node)

    def forget(self) -> None:
        """Empties idle slots and the tree."""
        self._pinned.clear()
        self.tree.clear()
        for sequence in self.idle:
            sequence.truncate(0)

    def check_integrity(self, busy: list[Sequence], slots: int) -> None:
        """Raises `TsggError` where a slot is owned twice, or by nobody."""
        owned = sorted(sequence.slot for sequence in (*self.idle, *busy))
        if owned != list(range(slots)):
            raise TsggError(f"slots {owned} of {slots} have an owner: one was lost, or given out twice")
        for sequence in (*self.idle, *busy):
            if sequence.closed or sequence.pending or sequence.highest < sequence.length:
                raise TsggError(f"slot {sequence.slot} was left in the middle of a step")
        self.tree.check_integrity()

    # -- parts -----------------------------------------------------------------------------------------------------------

    def _reach(self, sequence: Sequence, tokens: list[int], limit: int) -> int:
        """How much of the first `limit` tokens is left when the slot is taken over."""
        return sequence.reach(common_prefix(sequence.tokens, tokens[:limit]))

    def _source(self, tokens: list[int], limit: int, slots: list[Sequence]) -> Source:
        """Where the longest prefix can be copied from: the tree or one of these slots."""
        best = Source(self.tree.match(tokens, limit).resumable)
        for sequence in slots:
            if (length := self._reach(sequence, tokens, limit)) > best.length:
                best = Source(length, sequence)
        return best

    def _lost(self, sequence: Sequence, kept: int) -> int:
        """Rows that are nowhere else when the slot is cut to `kept` tokens."""
        if sequence.length - kept < WORTH_SAVING:
            return 0
        lost = sequence.length - max(kept, self.tree.match(sequence.tokens, sequence.length).length)
        return lost if lost >= WORTH_SAVING else 0

    def _save(self, sequence: Sequence, kept: int) -> None:
        """Puts what the slot is about to lose into the tree."""
        if self.tree.budget == 0 or not self._lost(sequence, kept):
            return
        reader, tokens = self._reader(sequence), sequence.tokens
        try:
            if not self.rows.needs_state:
                self.tree.insert(tokens, reader)
                return
            for length in self.rows.states(sequence.slot, sequence.length):
                if length > kept and self.tree.match(tokens, length).resumable < length:
                    self.tree.insert(tokens[:length], reader, self._state(sequence, length))
        except MemoryError:  # the budget was a guess of what is free
            log.warning("no memory to keep %d rows of a prefix: they will be computed again", len(tokens) - kept)

    def _bring(self, target: Sequence, tokens: list[int], source: Source) -> None:
        """Copies a prefix into the slot, from wherever it is."""
        end, given, state = source.length, source.sequence, None
        if given is None:
            state = self.tree.match(tokens, end).state
            parts = list(self.tree.read(tokens, 0, end))  # before saving: that may push them out of the tree
            self._save(target, 0)
            target.truncate(0)
            for start, cells in parts:
                self.rows.write(target.slot, start, cells)
        else:
            self._save(target, 0)
            target.truncate(0)
            self.rows.copy(given.slot, target.slot, 0, end)
            state = self._state(given, end) if self.rows.needs_state else None
        if state is not None:
            self.rows.write_state(target.slot, state)
        target.adopt(tokens[:end], end if state is None else state.highest)

    def _state(self, sequence: Sequence, length: int) -> State:
        """The state of a sequence that reaches back to `length` tokens, as it stood then."""
        return self.rows.read_state(sequence.slot, length, sequence.highest, sequence.length)

    def _reader(self, sequence: Sequence) -> Reader:
        return lambda start, end: self.rows.read(sequence.slot, start, end)
