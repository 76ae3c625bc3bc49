"""How likely drafts are right: behind a mistake or in a run, by position, and by what the drafter itself thinks of them.

Every rate is conditional: of the drafts whose predecessors were all right, the share that was right too. A draft behind a
rejection or behind a stop was not judged and counts nowhere. A draft that was not verified counts as well, as far as the
plain step that was run instead shows whether its first token was right: looking on costs nothing but the draft.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

MEMORY = 64  # verifies that the counts by position remember
# Weight, in drafts, of the rate over all positions beside a position's own: without it a single rejection far out closes that
# position for good, since a narrower window never tries it again.
POOLED = 32.0
# The first draft of a step has a rate by how many drafts before it were right in a row: a text that has turned rejects them
# all, a text that still quotes lost one word, and one lucky hit in prose is no quotation.
STREAKS = 4  # 0, 1, 2, and 3 or more in a row
STREAK_MEMORY = (8, 16, 16, 32)  # drafts that each of those rates remembers: a text that turns shows within a few
UNTRIED = 2.0  # drafts that the rule of succession weighs, (n + 1) / (n + 2) after n right in a row
# Confidences are counted in buckets, narrow at the top: in a draft of eight, 0.9 and 0.99 are far apart.
EDGES = (0.25, 0.5, 0.75, 0.9, 0.97)
CLAIMS = (0.125, 0.375, 0.625, 0.825, 0.935, 0.985)  # what a drafter says of each
CLAIMED = 2.0  # drafts that a drafter's own word weighs, before its bucket is counted
RESTART = 0.25  # share of the counts that a new request begins with: another text, the same drafter


class Acceptance:
    """Counts of one request; `restarted()` gives those of the next."""

    def __init__(self) -> None:
        self.streak = 0  # drafts right in a row until now
        self.reach = 0  # longest streak
        self._first = [[0.0, 0.0] for _ in range(STREAKS)]  # judged, right: first drafts, by the streak before
        self._judged: list[float] = []  # [i]: drafts at position i
        self._accepted: list[float] = []
        self._behind = [0.0, 0.0]  # judged, right: drafts of all positions behind one that was right
        self._buckets = [[[0.0, 0.0] for _ in CLAIMS] for _ in range(2)]  # [in a streak][confidence]

    def restarted(self) -> Acceptance:
        """The same with little weight."""
        new = Acceptance()
        new.reach = self.reach
        new._first = [_scaled(pair, RESTART) for pair in self._first]
        new._judged = _scaled(self._judged, RESTART)
        new._accepted = _scaled(self._accepted, RESTART)
        new._behind = _scaled(self._behind, RESTART)
        new._buckets = [[_scaled(pair, RESTART) for pair in half] for half in self._buckets]
        return new

    def judge(self, judged: int, accepted: int, confidences: Sequence[float]) -> None:
        """A verify judged its first `judged` drafts and accepted `accepted` of them: all, or all but the last."""
        if judged < 1:
            return
        keep = 1.0 - 1.0 / MEMORY
        self._judged = _scaled(self._judged, keep) + [0.0] * (judged - len(self._judged))
        self._accepted = _scaled(self._accepted, keep) + [0.0] * (judged - len(self._accepted))
        for i in range(judged):
            right = i < accepted
            self._judged[i] += 1.0
            self._accepted[i] += right
            if i:
                _count(self._behind, right, MEMORY)
            self._see(right, i == 0, confidences[i] if i < len(confidences) else None)

    def foresee(self, right: bool, confidence: float | None) -> None:
        """A draft was not verified, and its first token was what came, or not."""
        if self.streak:
            _count(self._behind, right, MEMORY)
        self._see(right, True, confidence)

    def _see(self, right: bool, first: bool, confidence: float | None) -> None:
        if first:
            streak = min(self.streak, STREAKS - 1)
            _count(self._first[streak], right, STREAK_MEMORY[streak])
        if confidence is not None:
            _count(self._buckets[self.streak > 0][_bucket(confidence)], right, MEMORY)
        self.streak = self.streak + 1 if right else 0
        self.reach = max(self.reach, self.streak)

    def rates(self, count: int) -> list[float]:
        """Conditional acceptance of the positions 0..count-1 of the next draft."""
        if count < 1:
            return []
        judged, right = self._behind
        pooled = (right + UNTRIED * 2 / 3) / (judged + UNTRIED)
        rates = [
            (right + POOLED * pooled) / (judged + POOLED)
            for judged, right in zip(self._judged[:count], self._accepted[:count], strict=True)
        ]
        rates += [pooled] * (count - len(rates))
        judged, right = self._first[min(self.streak, STREAKS - 1)]
        rates[0] = (right + UNTRIED * (self.streak + 1) / (self.streak + 2)) / (judged + UNTRIED)
        return rates

    def rates_of(self, confidences: Sequence[float]) -> list[float]:
        """Conditional acceptance of drafts with these confidences: the drafter's word, calibrated."""
        rates, half = [], self._buckets[self.streak > 0]
        for confidence in confidences:
            bucket = _bucket(confidence)
            judged, right = half[bucket]
            rates.append((right + CLAIMED * CLAIMS[bucket]) / (judged + CLAIMED))
            half = self._buckets[True]
        return rates

    def by_position(self) -> tuple[float, ...]:
        """Share of the verified drafts that were accepted, position by position, for reports."""
        return tuple(a / j if j else 0.0 for j, a in zip(self._judged, self._accepted, strict=True))


def expected(rates: Sequence[float]) -> list[float]:
    """[k]: tokens accepted on average of a draft of k tokens: the sum over i <= k of the product of the first i rates."""
    survival, total, sums = 1.0, 0.0, [0.0]
    for rate in rates:
        survival *= rate
        total += survival
        sums.append(total)
    return sums


def _count(pair: list[float], right: bool, memory: int) -> None:
    keep = 1.0 - 1.0 / memory
    pair[0] = keep * pair[0] + 1.0
    pair[1] = keep * pair[1] + right


def _scaled(counts: Sequence[float], share: float) -> list[float]:
    return [share * n for n in counts]


def _bucket(confidence: float) -> int:
    """A confidence that is no number between 0 and 1 is none: the lowest bucket."""
    return bisect_right(EDGES, confidence) if 0.0 <= confidence <= 1.0 else 0
