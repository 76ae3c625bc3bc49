"""A sequence: exactly the tokens whose rows memory holds, and the slot they lie in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tsgg.errors import ContextFullError, TsggError, UsageError

if TYPE_CHECKING:
    from tsgg.memory.memory import Memory


class Sequence:
    """Made by `Slots.take`. Only `commit` and `truncate` change its length; a forward leaves pending rows behind it."""

    def __init__(self, slot: int, capacity: int, memory: Memory) -> None:
        self.slot = slot
        self._memory = memory
        self.highest = 0  # positions below it were written since the sequence was last empty
        self.capacity = capacity  # tokens
        self.tokens: list[int] = []
        self.pending: list[int] = []  # rows that the last forward wrote past the committed length
        self.closed = False

    @property
    def length(self) -> int:
        """Committed tokens. Position p of the sequence lies in cell p of its slot."""
        return len(self.tokens)

    @property
    def left(self) -> int:
        """Rows that still fit."""
        return self.capacity - len(self.tokens)

    def wrote(self, tokens: list[int]) -> None:
        """Called by the forward: rows of these tokens now lie behind the committed ones."""
        self.pending = tokens
        self.highest = max(self.highest, len(self.tokens) + len(tokens))

    def spoiled(self, tokens: list[int]) -> None:
        """Called by the forward: it failed while it wrote rows of these tokens, over the pending ones if there were any."""
        self.wrote(tokens)
        self.pending = []

    def commit(self, kept: int) -> int:
        """Keeps the first `kept` rows of the last forward; the others are rejected and will be overwritten.

        Returns how many of them had to be forwarded again for it, see `Memory.commit`.
        Raises `UsageError` for rows that are not there; on a model with recurrent layers `TsggError`, see `RecurrentArena`.
        """
        if not 0 <= kept <= len(self.pending):
            raise UsageError(f"commit({kept}): the last forward left {len(self.pending)} rows")
        again = 0
        with self._whole():
            if kept:
                again = self._memory.commit(self.slot, self.pending[:kept], len(self.tokens))
            self.tokens.extend(self.pending[:kept])
            self.pending = []
        return again

    def truncate(self, length: int) -> int:
        """Forgets every row past `length`; returns the length reached.

        Full attention reaches any length. A sliding window that has wrapped past it cannot, and a recurrent state reaches the
        end of some prefill chunk before it, or none: then everything goes (0).
        """
        if length < 0:
            raise UsageError(f"truncate({length}): a length is not negative")
        if self._memory.closed:
            raise TsggError("this model was closed: load it again")
        with self._whole():
            self.pending = []
            if length < len(self.tokens):
                length = self.reach(length)
                self._memory.go_back(self.slot, length)
            del self.tokens[length:]
            if not self.tokens:
                self._empty()
        return len(self.tokens)

    def reach(self, length: int) -> int:
        """What `truncate(length)` would answer."""
        return self._memory.reach(self.slot, len(self.tokens), length, self.highest)

    def adopt(self, tokens: list[int], highest: int) -> None:
        """The slot now holds the rows of `tokens`, written from outside (`RowCopies`), and rings written up to `highest`."""
        self.tokens, self.pending, self.highest = list(tokens), [], highest

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """An interrupt between memory and tokens empties the sequence: a recurrent state must not be ahead of its tokens."""
        try:
            yield
        except TsggError:  # refused, with nothing changed
            raise
        except BaseException:
            self._empty()
            raise

    def _empty(self) -> None:
        self.tokens.clear()
        self.pending, self.highest = [], 0
        self._memory.reset(self.slot)

    def check_room(self, rows: int) -> None:
        """Raises `ContextFullError` when `rows` more do not fit, `TsggError` on a sequence that was given back.

        `UsageError` where so many at once would overwrite sliding-window cells that the first of them still reads.
        """
        if self.closed:
            raise TsggError("this sequence was released: take a new one from the model")
        if rows > self.left:
            raise ContextFullError(
                f"context full: {self.length} of {self.capacity} positions are used and {rows} more were asked for; "
                "load the model with a larger n_ctx or shorten the prompt"
            )
        self._memory.check_run(len(self.tokens), self.highest, rows)


class Slots:
    """The free slots of a model. The lowest free one is handed out, so that batches find neighbours."""

    def __init__(self, count: int, capacity: int, memory: Memory) -> None:
        self.count, self.capacity, self._memory = count, capacity, memory
        self._free = list(range(count))

    def take(self) -> Sequence:
        if not self._free:
            raise ContextFullError(f"all {self.count} sequences of this model are in use: load it with a larger n_seq")
        slot = self._free.pop(0)
        self._memory.reset(slot)
        return Sequence(slot, self.capacity, self._memory)

    def release(self, sequence: Sequence) -> None:
        """Gives the slot back; a second call does nothing."""
        if not sequence.closed:
            sequence.closed = True
            sequence.tokens, sequence.pending = [], []
            self._free = sorted([*self._free, sequence.slot])
