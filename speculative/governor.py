"""Chooses the window of every step: the one with the most expected tokens per second; 0, a plain step, is one of them.

Three things decide. *Costs* (costs.py): what a verify of so many rows and a draft of so many tokens take, beside a plain
step. *Acceptance* (acceptance.py): how many of the drafted tokens survive. And the *purse*: the time, in plain steps, that
speculation may still lose. A verify stakes what it costs above a plain step, should nothing be accepted; a window is chosen
only if the purse pays its stake. Losses leave the purse, gains fill it, and every token brings a little back.

* A drafter that only loses costs at most PURSE + 64 * REFILL = 3 plain steps in any 64 tokens.
* Gains fill the purse up to two verifies of the winning window: one rejection may be bad luck, and two are the least that
  can tell a text that has turned. So that is what a turn costs; from then on the drafter only loses.
* Where nothing is known to win, a probe goes out as soon as the purse pays it and the waiting time, which doubles with each
  failure, is over. Probes begin at one draft and grow by one with each that is accepted in full; so does what is measured.

Rules of older governors, and what brings about the same here:

  eight-step probes, a verdict for 64 steps   every step is a sample, and the window is chosen anew in every step
  park for 32 .. 256 steps, early give-up     the purse, and waits of 1, 3, 7 .. 128 tokens
  watch a win, park it after eight losses     the purse: a win that ends is over within two or three verifies
  one probe decides for a whole turn          acceptance fades; the first draft behind a rejection has a rate of its own
  parked steps feed the baseline              only they do: a step that asked a drafter may run another graph
  silent head = speculative sample            asking has a price, paid from the purse; a lookup that costs next to nothing
                                              is asked again and again and never parked
  new request caps the park                   a new request begins with a quarter of the counts, no wait, no winnings
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tsgg.speculative.acceptance import Acceptance, expected
from tsgg.speculative.costs import StepCosts
from tsgg.speculative.protocol import Draft, WindowContext
from tsgg.speculative.stats import StepSample

# In plain steps. PURSE pays the first probes of a text; refilled within 64 tokens, it bounds what a hopeless drafter costs.
PURSE = 1.5
REFILL = PURSE / 64  # per token
VERIFIES_AT_STAKE = 2.0  # of the winning window, that gains may fill the purse up to; fewer, and bad luck ends a win
MOST_WON = 8.0  # a window of 64 on a slow machine stakes thirty plain steps: no win is worth that
LONGEST_WAIT = 128  # tokens between probes of a drafter that fails them all: under 0.5 % of the time
REFRESH = 128  # steps without a plain one: the baseline of every verdict must not grow old
# An unmeasured width looks this much better than the line through its neighbours says, and so gets measured: between two
# equally good windows nobody would ever try the wider one.
CURIOSITY = 1.05
SILENCE_MEMORY = 16  # asks that the share of silent ones remembers
FREE = 0.01  # of a plain step: a draft that costs less is asked for in full, and judged by its confidences
MOST_DRAFT = 64
MOST_REQUESTS = 32  # texts remembered at a time
MOST_KINDS = 8  # numbers of sequences per step whose costs are remembered
RUNS = 128  # of equal windows in the report

MEASURING = "measuring plain decode"
REFRESHING = "refreshing the plain baseline"
LOSING = "a plain step is faster: the next probe waits"
SPENT = "the time that speculation may lose is spent"
DECLINED = "the draft did not look worth its verify"


@dataclass(frozen=True, slots=True)
class GovernorReport:
    """What the governor chose and why, so far."""

    windows: tuple[tuple[int, int], ...]  # (window, steps in a row), oldest first, the last 128 runs
    plain_steps: int  # window 0
    asked_steps: int  # a drafter ran
    verifies: int
    probes: int  # verifies against the odds
    plain_ms: float  # per token; 0.0 = not measured
    speculative_ms: float  # per token, over all steps that asked a drafter
    expected_gain: float  # of verifies that were to pay: plain time of their expected tokens / expected time
    realised_gain: float  # the same of the tokens that came; both 1.0 while there are none
    purse: float  # plain steps that the latest request may lose now
    idle: str  # why the latest step drafted nothing; "" if it did
    forward_ms: tuple[tuple[int, float], ...]  # (rows, ms) measured, single sequence or the latest kind
    acceptance: tuple[float, ...]  # conditional, by position, of the latest request


class _Text:
    """What is known of one request's text."""

    __slots__ = ("acceptance", "confident", "failed", "length", "offered", "pending", "probe", "probing", "proposed", "purse",
                 "roof", "trusted", "wait")  # fmt: skip

    acceptance: Acceptance
    confident: bool
    offered: float
    purse: float

    def __init__(self, before: _Text | None) -> None:
        self.acceptance = Acceptance() if before is None else before.acceptance.restarted()
        self.confident = False if before is None else before.confident  # the drafter reports confidences
        self.offered = 1.0 if before is None else before.offered  # share of asks that led to a verify
        self.purse: float = PURSE if before is None else min(PURSE, before.purse)
        self.roof = PURSE  # gains fill the purse up to here
        self.probe = 1  # draft tokens of the next probe
        self.failed = 0  # verifies in a row that accepted nothing
        self.wait = 0  # tokens until the next probe
        self.length = 0  # committed tokens when last seen
        self.probing = False  # the step under way is a probe
        self.proposed = 0  # tokens of the draft under way, verified or not
        self.pending: tuple[float, ...] = ()  # confidences of those that are verified
        self.trusted = (0.0, 0.0)  # tokens and seconds expected of the step under way


class CostGovernor:
    """`WindowPolicy` for one (model, drafter, device), shared by all its requests: costs carry over, acceptance softly."""

    def __init__(self) -> None:
        self._costs: dict[int, StepCosts] = {}  # by sequences in a step
        self._texts: dict[int, _Text] = {}  # by request, the latest last
        self._unplain = 0  # steps since the last plain one
        self._idle = MEASURING
        self._runs: deque[tuple[int, int]] = deque(maxlen=RUNS)
        self._plain_steps = self._asked = self._verifies = self._probes = 0
        self._spent = (0, 0.0)  # tokens and seconds of steps that asked
        self._expected = self._realised = (0.0, 0.0)  # plain seconds of the tokens, seconds
        self._shown = (1, 0)  # sequences and context of the latest step

    # -- the choice ----------------------------------------------------------------------------------------------------

    def choose(self, context: WindowContext) -> int:
        """Draft tokens to ask for, 0..ceiling; 0 = a plain step."""
        text, costs = self._text(context.key, context.length), self._kind(context.sequences)
        ceiling, plain = min(context.ceiling, MOST_DRAFT), costs.plain(context.length)
        text.probing, text.proposed, text.pending = False, 0, ()
        if ceiling < 1 or not plain:
            return self._plain(MEASURING)
        if self._unplain >= REFRESH:
            return self._plain(REFRESHING)
        reach = min(ceiling, max(text.acceptance.reach, text.probe - 1) + 1)
        drafts = costs.draft.prices(reach, context.length)
        affordable, window = self._best(text, costs, context.length, text.acceptance.rates(reach), drafts, text.offered)
        if text.confident and affordable and drafts[affordable] <= (drafts[window] if window else 0.0) + FREE * plain:
            return affordable  # `keep` decides, knowing the draft
        if window:
            return window
        text.probing = True
        if text.wait > 0:
            return self._plain(LOSING)
        return min(text.probe, affordable) or self._plain(SPENT)

    def keep(self, context: WindowContext, draft: Draft) -> int:
        """How many tokens of this draft to verify, 0..len(draft.tokens); its own cost is spent either way."""
        count = min(len(draft.tokens), MOST_DRAFT)
        text, costs = self._text(context.key, context.length), self._kind(context.sequences)
        text.proposed = count
        text.confident = len(draft.confidences) >= count > 0
        text.pending = draft.confidences[:count] if text.confident else ()
        if text.probing or not count:
            return count
        rates = text.acceptance.rates_of(text.pending) if text.confident else text.acceptance.rates(count)
        affordable, best = self._best(text, costs, context.length, rates, [0.0] * (count + 1), 1.0)
        if not best and not text.wait and text.confident:
            text.probing, best = True, min(text.probe, affordable)
        if not best:
            self._idle = DECLINED
        return best

    def _best(
        self, text: _Text, costs: StepCosts, length: int, rates: list[float], drafts: list[float], offered: float
    ) -> tuple[int, int]:
        """The widest affordable window and the one with the most tokens per second, 0 where that is a plain step.

        rates: conditional acceptance by position. drafts: [k] seconds of drafting k tokens. offered: probability that the
        drafter has anything; a draft is taken to be as long as the window.
        """
        plain, verifies = costs.plain(length), costs.verifies(len(rates), length)
        silence = (1.0 - offered) * costs.of_silence(length)
        accepted = expected(rates)
        affordable, best, best_rate = 0, 0, 1.0 / plain
        text.trusted = (1.0, plain)
        for window in range(1, len(rates) + 1):
            stake = verifies[window] + drafts[window] - plain
            if stake > text.purse * plain:
                break
            affordable = window
            rate = (1.0 + offered * accepted[window]) / (drafts[window] + silence + offered * verifies[window])
            if best and not costs.forward.sure(window + 1):
                rate *= CURIOSITY
            if rate > best_rate:
                best, best_rate = window, rate
                text.trusted = (1.0 + accepted[window], drafts[window] + verifies[window])
                text.roof = min(MOST_WON, max(PURSE, VERIFIES_AT_STAKE * stake / plain))
        return affordable, best

    def _plain(self, reason: str) -> int:
        self._idle = reason
        return 0

    # -- the lesson ----------------------------------------------------------------------------------------------------

    def record(self, sample: StepSample) -> None:
        """Learns from a step: its cost, what was accepted, and what it lost or won."""
        drafted = min(max(sample.drafted, 0), MOST_DRAFT)
        accepted = min(max(sample.accepted, 0), drafted)
        asked = sample.window > 0
        text, costs = self._text(sample.key, sample.length), self._kind(sample.sequences)
        proposed = max(drafted, text.proposed)
        costs.add(asked, drafted, proposed, sample.forward_seconds, sample.draft_seconds, sample.length)
        self._count(sample.window if asked else 0, drafted, sample)
        text.wait = max(0, text.wait - accepted - 1)
        plain = costs.plain(sample.length)
        if asked and plain:
            self._settle(text, costs, plain, drafted, accepted, proposed, sample.length)
        if text.purse < PURSE:
            text.purse = min(PURSE, text.purse + REFILL * (accepted + 1))
        if asked:
            text.offered += (float(drafted > 0) - text.offered) / SILENCE_MEMORY
        if drafted:
            self._judge(text, drafted, accepted, sample.finished)

    def _settle(
        self, text: _Text, costs: StepCosts, plain: float, drafted: int, accepted: int, proposed: int, length: int
    ) -> None:
        """Time won or lost against plain steps, by the prices: what a stall costs is not the drafter's fault."""
        seconds = costs.draft.at(proposed, length)
        if drafted:
            seconds += costs.verifies(drafted, length)[drafted]
            if not text.probing:
                tokens, expected_seconds = text.trusted
                self._expected = (self._expected[0] + tokens * plain, self._expected[1] + expected_seconds)
                self._realised = (self._realised[0] + (accepted + 1) * plain, self._realised[1] + seconds)
        else:
            seconds += costs.of_silence(length)
        gain = accepted + 1 - seconds / plain
        text.purse = max(text.purse, min(text.roof, text.purse + gain)) if gain > 0 else text.purse + gain

    @staticmethod
    def _judge(text: _Text, drafted: int, accepted: int, finished: bool) -> None:
        """Drafts behind a stop or behind the first rejection were not judged."""
        judged = accepted if finished else min(accepted + 1, drafted)
        text.acceptance.judge(judged, accepted, text.pending)
        if accepted:
            text.failed = text.wait = 0
        elif judged:
            text.wait = min(2**text.failed - 1, LONGEST_WAIT)
            text.failed = min(text.failed + 1, 16)
        if accepted == drafted:
            text.probe = min(drafted + 1, MOST_DRAFT)
        elif judged > accepted:
            text.probe = 1

    # -- what is remembered --------------------------------------------------------------------------------------------

    def _text(self, key: int, length: int) -> _Text:
        """A request is known by its key and by growing; anything else is a new one, which starts from the latest."""
        text = self._texts.get(key)
        if text is None or length < text.length:
            latest = next(reversed(self._texts.values()), None)
            text = _Text(latest)
            self._texts.pop(key, None)
            self._texts[key] = text
            if len(self._texts) > MOST_REQUESTS:
                del self._texts[next(iter(self._texts))]
        text.length = length
        return text

    def _kind(self, sequences: int) -> StepCosts:
        costs = self._costs.get(sequences)
        if costs is None:
            costs = self._costs[sequences] = StepCosts()
            if len(self._costs) > MOST_KINDS:
                del self._costs[next(iter(self._costs))]
        return costs

    def _count(self, window: int, drafted: int, sample: StepSample) -> None:
        self._shown = (sample.sequences, sample.length)
        if self._runs and self._runs[-1][0] == window:
            self._runs[-1] = (window, self._runs[-1][1] + 1)
        else:
            self._runs.append((window, 1))
        if not window:
            self._unplain = 0
            self._plain_steps += 1
            return
        self._unplain += 1
        self._asked += 1
        seconds = sample.forward_seconds + sample.draft_seconds
        if 0.0 < seconds < float("inf"):
            self._spent = (self._spent[0] + max(sample.emitted, 1), self._spent[1] + seconds)
        if drafted:
            self._idle = ""
            self._verifies += 1
            self._probes += self._texts[sample.key].probing

    def report(self) -> GovernorReport:
        """A snapshot."""
        sequences, length = self._shown
        costs = self._costs.get(sequences) or StepCosts()
        latest = next(reversed(self._texts.values()), None) or _Text(None)
        return GovernorReport(
            windows=tuple(self._runs),
            plain_steps=self._plain_steps,
            asked_steps=self._asked,
            verifies=self._verifies,
            probes=self._probes,
            plain_ms=1e3 * costs.plain(length),
            speculative_ms=1e3 * self._spent[1] / self._spent[0] if self._spent[0] else 0.0,
            expected_gain=_ratio(self._expected),
            realised_gain=_ratio(self._realised),
            purse=latest.purse,
            idle=self._idle,
            forward_ms=tuple((rows, 1e3 * seconds) for rows, seconds in costs.forward.measured(length)),
            acceptance=tuple(latest.acceptance.rates(latest.acceptance.reach)),
        )


def _ratio(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] if pair[1] else 1.0
