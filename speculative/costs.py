"""What steps cost: seconds of a forward by its rows and of a draft by its tokens, learned from the steps themselves.

A curve is a set of measured sizes with straight lines between them: measured curves have steps in them (8 to 9 rows on a
GPU), so no formula is fitted. Each size keeps a mean over its last samples and a slope over the context.
"""

from __future__ import annotations

from bisect import insort

from tsgg.speculative.stats import StepSample

# Samples that a mean remembers: one odd step moves it by a sixteenth, a slower machine shows within seconds.
MEMORY = 16
# A sample that is half as much again as expected is a stall until the next one confirms it: one stall flips no verdict. The
# same bound tells a step of the curve from the building of a graph in the first sample of a size.
STANDS_OUT = 1.5
# Plain steps, at most, that a row beyond the widest measured step is taken to cost: a second row may cost as much as the first
# and the third next to nothing, and who believes the line through the first two never finds out.
HOPE = 0.5
# Samples of a curve after which a size not seen among them counts as unmeasured: the machine may have been busy then.
FORGET = 2048
# Tokens^2 of context that samples must spread over before their slope counts: noise has one too.
SPREAD = 1024.0 * 1024.0
LONGEST = 3600.0  # seconds; a step that claims more is a broken clock


class _Size:
    """Mean seconds at one size, around the mean context of its samples."""

    __slots__ = ("context", "covariance", "held", "last", "seconds", "slope", "variance", "weight")

    def __init__(self, seconds: float, context: int, now: int) -> None:
        self.seconds = seconds
        self.context = float(context)
        self.weight = 0  # samples in the mean; 0 = only the first, which the second replaces
        self.slope = 0.0  # seconds per token of context, >= 0
        self.variance = self.covariance = 0.0
        self.held = False  # the latest sample stood out and waits for the next
        self.last = now

    def at(self, context: int) -> float:
        return max(self.seconds + self.slope * (context - self.context), 0.25 * self.seconds)

    def add(self, seconds: float, context: int) -> None:
        expected = self.at(context)
        stands_out = not expected / STANDS_OUT <= seconds <= expected * STANDS_OUT
        first_was_odd = self.weight == 0 and seconds < expected
        if stands_out and not self.held and not first_was_odd:
            self.held = True
            return
        self.held = False
        distance, excess = context - self.context, seconds - self.seconds
        if self.weight:
            self.variance += distance * distance
            self.covariance += distance * excess
            self.slope = max(0.0, self.covariance / (self.variance + SPREAD))
        self.weight = 1 if stands_out else min(self.weight + 1, MEMORY)
        self.seconds += excess / self.weight
        self.context += distance / self.weight


class CostCurve:
    """Seconds by size and context. Bounded: one entry per size, and sizes are at most 65."""

    def __init__(self, hopeful: bool = False) -> None:
        self._hopeful = hopeful  # of sizes beyond the largest that was measured
        self._sizes: dict[int, _Size] = {}
        self._order: list[int] = []
        self._now = 0

    def add(self, size: int, seconds: float, context: int) -> None:
        """One sample. Zero, negative, endless or undefined times are ignored.

        The first sample of a size pays for its graph: it is taken for what the neighbours promise, unless it lies so far
        above that it must be a step of the curve; the second replaces it.
        """
        if not 0.0 < seconds < LONGEST:
            return
        self._now += 1
        known = self._sizes.get(size)
        if known is not None:
            known.add(seconds, context)
            known.last = self._now
        else:
            promised = self.at(size, context) if self._sizes and (self._hopeful or len(self._sizes) > 1) else 0.0
            if 0.0 < promised < seconds and (len(self._sizes) == 1 or seconds <= promised * STANDS_OUT):
                seconds = promised
            self._sizes[size] = _Size(seconds, context, self._now)
            insort(self._order, size)
        if self._now - self._sizes[self._order[self._now % len(self._order)]].last > FORGET:
            self._drop(self._order[self._now % len(self._order)])

    def sure(self, size: int) -> bool:
        """Whether more than a first sample stands behind the price."""
        known = self._sizes.get(size)
        return known is not None and known.weight > 0

    def at(self, size: int, context: int) -> float:
        """Seconds of one size; 0.0 while nothing is measured."""
        known = self._sizes.get(size)
        return known.at(context) if known is not None else self.prices(size, context)[size]

    def prices(self, most: int, context: int) -> list[float]:
        """Seconds of the sizes 0..most: measured, on the line between measured neighbours, or on the line through the
        smallest and the largest beyond that."""
        if not self._order:
            return [0.0] * (most + 1)
        first = below = self._order[0]
        start = low = self._sizes[first].at(context)
        prices = [low] * (first + 1)
        for size in self._order[1:]:
            if below >= most:
                break
            high = self._sizes[size].at(context)
            if size > below + 1:
                step = (high - low) / (size - below)
                prices += [low + step * i for i in range(1, size - below)]
            prices.append(high)
            below, low = size, high
        if below < most:
            slope = (low - start) / (below - first) if below > first else 0.0
            if self._hopeful:
                slope = HOPE * start if below == first else min(slope, HOPE * start)
            prices += [low + max(0.0, slope) * i for i in range(1, most - below + 1)]
        return prices[: most + 1]

    @property
    def most(self) -> int:
        """The largest size that was measured; 0 for none."""
        return self._order[-1] if self._order else 0

    def widest(self, context: int) -> float:
        """Seconds of the largest size that was measured; 0.0 for none."""
        return self._sizes[self._order[-1]].at(context) if self._order else 0.0

    def measured(self, context: int) -> tuple[tuple[int, float], ...]:
        """(size, seconds) of the measured sizes."""
        return tuple((size, self._sizes[size].at(context)) for size in self._order)

    def _drop(self, size: int) -> None:
        del self._sizes[size]
        self._order.remove(size)


class StepCosts:
    """The curves of steps over one number of sequences; times per sequence."""

    def __init__(self) -> None:
        self.forward = CostCurve(hopeful=True)  # by rows; 1 = the plain step, from steps that asked for no draft
        self.silent = (
            CostCurve()
        )  # size 0: forward of a step that asked and verified nothing: for some heads another graph
        self.draft = CostCurve()  # by tokens drafted; 0 = it was asked and had nothing

    def plain(self, context: int) -> float:
        """Seconds of a plain step; 0.0 until two were seen (the first builds the graph)."""
        return self.forward.at(1, context) if self.forward.sure(1) else 0.0

    def add(self, sample: StepSample, drafted: int, proposed: int) -> None:
        """One step: so many tokens were drafted by whoever was asked, and so many of them verified."""
        if sample.window > 0:
            self.draft.add(proposed, sample.draft_seconds, sample.length)
        if drafted or sample.bare or not sample.window:
            self.forward.add(drafted + 1, sample.forward_seconds, sample.length)
        if sample.window > 0 and not drafted:
            self.silent.add(0, sample.forward_seconds, sample.length)

    def verifies(self, most: int, context: int) -> list[float]:
        """[k]: seconds of a verify of k drafts, k <= most. Until it is measured a row is taken to cost a plain step at most:
        the first sample of a size may hold the making of kernels."""
        prices = self.forward.prices(most + 1, context)[1:]
        for k in range(1, most + 1):
            if not self.forward.sure(k + 1):
                prices[k] = min(prices[k], (k + 1) * prices[0])
        return prices

    def paid(self, drafted: int, forward: float, context: int) -> float:
        """Seconds to charge for a verify that took `forward`: its price, or, while that is not sure, what it really took."""
        price, plain = self.verifies(drafted, context)[drafted], self.plain(context)
        if not self.forward.sure(drafted + 1) and price < forward:
            return min(forward, (drafted + 1) * plain)
        return price

    def of_silence(self, context: int) -> float:
        """Seconds of the forward behind a drafter that had nothing."""
        return self.silent.at(0, context) or self.plain(context)
