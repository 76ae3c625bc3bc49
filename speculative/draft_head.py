"""Draft by a head that drafts token by token from the trunk's hidden rows (NextN / MTP).

The head follows the trunk: it wants the row before every committed token. Rows that a verify leaves are kept until the next
proposal, where the head catches up over them and takes its first draft step in one run. A prompt's rows are given to it at
once, chunk by chunk, all but the last, whose next token is not drawn yet. After tokens without rows (a reused prefix, parked
steps) it goes on from the next row that the trunk hands out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tsgg.speculative.protocol import (
    CommittedRows,
    Draft,
    DraftContext,
    DraftHead,
    HeadRows,
    Sequence,
    Speculator,
    Trunk,
)

if TYPE_CHECKING:
    from tsgg.speculative.options import SpeculationOptions

# Rows of a prompt chunk go to the head at once: kept, a long prompt's would fill memory and make its first draft late. What
# one verify leaves (65 rows at most) waits for the run that drafts.
MOST_WAITING = 65

NO_ROW = "no hidden row yet"


@dataclass(slots=True)
class _Waiting:
    """Hidden rows of one sequence that the head has not seen, of neighbouring positions."""

    sequence: Sequence
    start: int = 0  # position of the first
    rows: list[np.ndarray] = field(default_factory=list)  # each [rows, features] f32

    def count(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def take(self) -> np.ndarray:
        """All of them, and forgets them."""
        rows = self.rows[0] if len(self.rows) == 1 else np.concatenate(self.rows)
        self.rows = []
        return rows


class DraftHeadSpeculator(Speculator):
    """Greedy drafts of a per-token head; a draft ends before the first token whose probability is under `pmin`."""

    name = "draft-head"
    needs_hidden_state = True
    # Of the best token among the ten best: a verify row costs more than a guess at 1 in 7 gives.
    default_min_draft_prob = 0.15

    def __init__(self, head: DraftHead, pmin: float = default_min_draft_prob) -> None:
        self._head, self._pmin = head, pmin
        self.taps = head.taps
        self.can_arm_after_prefix_reuse = head.resumes_after_gap
        self._waiting: dict[int, _Waiting] = {}

    def open(self, key: int, sequence: Sequence) -> None:
        self._head.forget(sequence)
        self._waiting[key] = _Waiting(sequence)

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        ready = [i for i, context in enumerate(contexts) if self._waiting[context.key].rows]
        drafts = [Draft(silence=NO_ROW)] * len(contexts)
        for window in sorted({contexts[i].window for i in ready}):
            group = [i for i in ready if contexts[i].window == window]
            made = self._head.draft([self._rows(contexts[i]) for i in group], window, self._pmin)
            for i, draft in zip(group, made, strict=True):
                drafts[i] = draft
        return drafts

    def commit(self, key: int, tokens: list[int], start_position: int, rows: CommittedRows | None) -> None:
        waiting = self._waiting[key]
        if rows is None:
            waiting.rows = []  # what follows a gap does not join what stands before it
            return
        if not waiting.rows:
            waiting.start = start_position
        waiting.rows.append(self._features(rows))
        if waiting.count() > MOST_WAITING:
            self._catch_up(waiting)

    def close(self, key: int) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._head.forget(waiting.sequence)

    def _features(self, rows: CommittedRows) -> np.ndarray:
        """A copy of the rows that the head reads: [kept, features]."""
        if not self.taps:
            return np.array(rows.hidden())
        return np.concatenate([rows.tap(layer) for layer in self.taps], axis=1)

    def _catch_up(self, waiting: _Waiting) -> None:
        """Gives the head all rows but the last."""
        features, start = waiting.take(), waiting.start
        tokens = waiting.sequence.tokens[start + 1 : start + len(features)]
        rows = HeadRows(waiting.sequence, features[:-1], np.array(tokens, np.int32), start)
        self._head.draft([rows], 0, 0.0)
        waiting.start, waiting.rows = start + len(features) - 1, [features[-1:]]

    def _rows(self, context: DraftContext) -> HeadRows:
        waiting = self._waiting[context.key]
        start, features = waiting.start, waiting.take()
        tokens = [*waiting.sequence.tokens[start + 1 : context.position], context.last]
        return HeadRows(waiting.sequence, features, np.array(tokens, np.int32), start)


def make_draft_head(trunk: Trunk, options: SpeculationOptions, head: DraftHead | None) -> Speculator | None:
    """Factory for the registry: serves heads that draft token by token."""
    if head is None or head.kind != "per_token":
        return None
    return DraftHeadSpeculator(
        head, DraftHeadSpeculator.default_min_draft_prob if options.pmin is None else options.pmin
    )
