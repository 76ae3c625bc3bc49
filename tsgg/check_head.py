"""Whether a draft head knows its trunk: how often the trunk agrees with it on a short text, position by position.

A head that is wired wrongly (another row, another position, another model's weights) still drafts, and its drafts are merely
rejected: nothing is wrong but the speed. Here that shows as 0 %.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np

from tsgg.speculative.draft_head import DraftHeadSpeculator
from tsgg.speculative.protocol import Batch, CommittedRows, DraftContext, DraftHead, Sequence, Trunk, Want

TEXT = (
    "The river rises in the mountains, runs past three old towns and reaches the sea after two hundred miles. In spring, "
    "when the snow melts, its water is cold and brown; in summer children swim in it. Nobody knows how old the bridge is."
)
TOKENS = 64  # of the text: a forward of window + 1 rows for each
WINDOW = 3
KEY = 0  # names the sequence to the speculator
AGREES_NOWHERE = 0.02  # share of agreement up to which chance explains it


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """How many of `drafts` drafts the trunk followed up to and including each position."""

    drafts: int
    accepted: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Accepted share of the drafts, by position of the drafted token."""
        return tuple(count / self.drafts if self.drafts else 0.0 for count in self.accepted)

    @property
    def agrees(self) -> bool:
        """False where the first drafted tokens are no better than chance."""
        return self.shares[0] > AGREES_NOWHERE

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.0%}" for share in self.shares)
        text = (
            f"accepted at draft position 1 to {len(self.accepted)}: {shares} of {self.drafts}, "
            f"{1 + sum(self.shares):.2f} tokens per verify"
        )
        return text if self.agrees else f"{text}: the head does not know this model, or is wired wrongly"


def check_head(
    trunk: Trunk, sequence: Sequence, head: DraftHead, tokens: Sequences[int], window: int = WINDOW
) -> HeadCheck:
    """Drafts after every one of `tokens` and lets the trunk judge: greedy, and the text goes on as it is, whatever was drafted.

    `sequence` is empty, and empty again afterwards. Needs room for `window` rows more than tokens.
    """
    speculator = DraftHeadSpeculator(head, pmin=0.0)
    want = Want("all", "all", head.taps)
    drafts, accepted = 0, [0] * window
    speculator.open(KEY, sequence)
    try:
        for position, token in enumerate(tokens):
            draft = speculator.propose([DraftContext(KEY, token, position, window)])[0].tokens
            rows = trunk.forward(Batch((sequence,), np.array([[token, *draft]], np.int32), want))
            drafts += bool(draft)
            for i, drafted in enumerate(draft):
                if int(np.argmax(rows.logits(0, i))) != drafted:
                    break
                accepted[i] += 1
            sequence.commit(1)
            speculator.commit(KEY, [token], position, CommittedRows(rows, 0, 1))
    finally:
        speculator.close(KEY)
        sequence.truncate(0)
    return HeadCheck(drafts, tuple(accepted))
