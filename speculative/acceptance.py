"""How likely drafts are accepted: by position, behind a rejection, and by what the drafter itself thinks of them.

Every rate is conditional: of the drafts at position i whose predecessors were all accepted, the share that was accepted too.
A draft behind a rejection or behind a stop was not judged and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 64  # verifies that counts remember
# Weight, in drafts, of the rate over all positions beside a position's own: without it a single rejection far out closes that
# position for good, since a narrower window never tries it again.
POOLED = 32.0
# A rejection says more about the next draft than the average does: a text that has turned rejects them all, a text that still
# quotes lost one word. The first draft behind a rejection has a rate of its own, quickly learned (verifies remembered), and
# even odds before anything is known.
MEMORY_BEHIND_REJECTION = 8
EVEN_ODDS = 2.0
BUCKETS = 4  # of confidence
CLAIMED = 2.0  # drafts that a drafter's own word weighs, before its bucket is counted
TRIED = (
    4.0  # verifies of a bucket, as far as remembered, that are enough to believe that the drafter's doubts are right
)
RESTART = 0.25  # share of the counts that a new request begins with: another text, the same drafter


class Acceptance:
    """Counts of one request; `restarted()` gives those of the next."""

    def __init__(self) -> None:
        self.rejected = False  # the latest verify accepted nothing
        self.reach = 0  # most drafts that were ever accepted in a row
        self._judged: list[float] = []  # [i]: drafts at position i
        self._accepted: list[float] = []
        self._behind = [0.0, 0.0]  # judged, accepted: first drafts behind a rejection
        self._bucket_judged = [0.0] * BUCKETS
        self._bucket_accepted = [0.0] * BUCKETS

    def restarted(self) -> Acceptance:
        """The same with little weight."""
        new = Acceptance()
        new.reach = self.reach
        new._judged = [RESTART * n for n in self._judged]
        new._accepted = [RESTART * n for n in self._accepted]
        new._behind = [RESTART * n for n in self._behind]
        new._bucket_judged = [RESTART * n for n in self._bucket_judged]
        new._bucket_accepted = [RESTART * n for n in self._bucket_accepted]
        return new

    def judge(self, judged: int, accepted: int, confidences: Sequence[float]) -> None:
        """A verify judged its first `judged` drafts and accepted `accepted` of them: all, or all but the last."""
        if judged < 1:
            return
        keep = 1.0 - 1.0 / MEMORY
        self._judged = [keep * n for n in self._judged] + [0.0] * (judged - len(self._judged))
        self._accepted = [keep * n for n in self._accepted] + [0.0] * (judged - len(self._accepted))
        for i in range(judged):
            won = float(i < accepted)
            if i == 0 and self.rejected:
                keep_behind = 1.0 - 1.0 / MEMORY_BEHIND_REJECTION
                self._behind = [keep_behind * self._behind[0] + 1.0, keep_behind * self._behind[1] + won]
            else:
                self._judged[i] += 1.0
                self._accepted[i] += won
        if confidences:
            self._bucket_judged = [keep * n for n in self._bucket_judged]
            self._bucket_accepted = [keep * n for n in self._bucket_accepted]
            for i, confidence in enumerate(confidences[:judged]):
                bucket = _bucket(confidence)
                self._bucket_judged[bucket] += 1.0
                self._bucket_accepted[bucket] += float(i < accepted)
        self.rejected = accepted == 0
        self.reach = max(self.reach, accepted)

    def rates(self, count: int) -> list[float]:
        """Conditional acceptance of the positions 0..count-1 of the next draft."""
        pooled = (sum(self._accepted) + 0.5) / (sum(self._judged) + 1.0)
        rates = [
            (accepted + POOLED * pooled) / (judged + POOLED)
            for judged, accepted in zip(self._judged[:count], self._accepted[:count], strict=True)
        ]
        rates += [pooled] * (count - len(rates))
        if self.rejected and rates:
            judged, accepted = self._behind
            rates[0] = (accepted + 0.5 * EVEN_ODDS) / (judged + EVEN_ODDS)
        return rates

    def rates_of(self, confidences: Sequence[float]) -> list[float]:
        """Conditional acceptance of drafts with these confidences: the drafter's word, calibrated."""
        rates = []
        for confidence in confidences:
            bucket = _bucket(confidence)
            claimed = (bucket + 0.5) / BUCKETS
            rates.append((self._bucket_accepted[bucket] + CLAIMED * claimed) / (self._bucket_judged[bucket] + CLAIMED))
        return rates

    def hardly_tried(self, confidence: float) -> bool:
        """Whether what is said of such drafts is little more than the drafter's own word."""
        return self._bucket_judged[_bucket(confidence)] < TRIED


def expected(rates: Sequence[float]) -> list[float]:
    """[k]: tokens accepted on average of a draft of k tokens: the sum over i <= k of the product of the first i rates."""
    survival, total, sums = 1.0, 0.0, [0.0]
    for rate in rates:
        survival *= rate
        total += survival
        sums.append(total)
    return sums


def _bucket(confidence: float) -> int:
    """A confidence that is no number between 0 and 1 is none: the lowest bucket."""
    return min(int(confidence * BUCKETS), BUCKETS - 1) if 0.0 <= confidence <= 1.0 else 0
