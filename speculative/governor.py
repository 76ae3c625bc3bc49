"""Chooses the window of every step: the one with the most expected tokens per second; 0, a plain step, is one of them.

Three things decide. *Costs* (costs.py): what a verify of so many rows and a draft of so many tokens take, beside a plain
step. *Acceptance* (acceptance.py): how many of the drafted tokens survive. And the *purse*: the time, in plain steps, that
speculation may still lose. A verify stakes what it costs above a plain step, should nothing be accepted; a window is chosen
only if the purse pays its stake. Losses leave the purse, gains fill it, and every token brings a little back.

* A drafter that only loses costs at most PURSE + 64 * REFILL = 3 plain steps in any 64 tokens.
* Gains fill the purse up to two verifies of the winning window and a bit: one rejection may be bad luck, and two are the
  least that can tell a text that has turned. So that is what a turn costs; from then on the drafter only loses.
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

from tsgg.speculative.acceptance import Acceptance, expected
from tsgg.speculative.costs import StepCosts
from tsgg.speculative.journal import GovernorReport, Journal
from tsgg.speculative.protocol import Draft, WindowContext
from tsgg.speculative.stats import StepSample

# In plain steps. PURSE pays the first probes of a text; refilled within 64 tokens, it bounds what a hopeless drafter costs.
PURSE = 1.5
REFILL = PURSE / 64  # per token
# Verifies of the winning window that gains may fill the purse up to: two, and a small one behind them. With fewer, bad luck
# ends wins (1.3: a turn costs under 3 plain steps on every simulated machine, but quoting on a slow one runs 13 % slower).
VERIFIES_AT_STAKE = 2.25
MOST_WON = 8.0  # a window of 64 on a slow machine stakes thirty plain steps: no win is worth that
LONGEST_WAIT = 128  # tokens between probes of a drafter that fails them all: under 0.5 % of the time
REFRESH = 128  # steps without a plain one: the baseline of every verdict must not grow old
# An unmeasured width looks this much better than the line through its neighbours says, and so gets measured: between two
# equally good windows nobody would ever try the wider one.
CURIOSITY = 1.05
# Verifies between looks at a wider window while the widest would be this much better at the price of the widest measured:
# kernels change at some width, and beyond that step a curve is often flat.
LOOK = 32
PROMISE = 1.1
SILENCE_MEMORY = 16  # asks that the share of silent ones remembers
FREE = 0.01  # of a plain step: who costs less is asked in every step, for as much as may be, and judged by the draft
MOST_DRAFT = 64
MOST_REQUESTS = 32  # texts remembered at a time
MOST_KINDS = 8  # numbers of sequences per step whose costs are remembered

MEASURING = "measuring plain decode"
REFRESHING = "refreshing the plain baseline"
LOSING = "a plain step is faster: the next probe waits"
SPENT = "the time that speculation may lose is spent"
DECLINED = "the draft did not look worth its verify"


class _Text:
    """What is known of one request's text."""

    __slots__ = ("acceptance", "confident", "failed", "length", "offered", "pending", "probe", "probing", "proposed", "purse",
                 "roof", "trusted", "wait")  # fmt: skip

    def __init__(self, before: _Text | None) -> None:
        self.acceptance: Acceptance = Acceptance() if before is None else before.acceptance.restarted()
        self.confident: bool = False if before is None else before.confident  # the drafter reports confidences
        self.offered: float = 1.0 if before is None else before.offered  # share of asks that led to a verify
        self.purse: float = PURSE if before is None else min(PURSE, before.purse)
        self.roof = PURSE  # gains fill the purse up to here
        self.probe = 1  # draft tokens of the next probe
        self.failed = 0  # verifies in a row that accepted nothing, or lost as probes
        self.wait = 0  # tokens until the next probe
        self.length = 0  # committed tokens when last seen
        self.probing = False  # the step under way is a probe
        self.proposed = 0  # tokens of the draft under way, verified or not
        self.pending: tuple[float, ...] = ()  # confidences of those that are verified
        self.trusted = (0.0, 0.0)  # tokens and seconds expected of the step under way

    def wait_longer(self) -> None:
        """A probe failed."""
        self.wait = min(2**self.failed - 1, LONGEST_WAIT)
        self.failed = min(self.failed + 1, 16)


class CostGovernor:
    """`WindowPolicy` for one (model, drafter, device), shared by all its requests: costs carry over, acceptance softly."""

    def __init__(self) -> None:
        self._costs: dict[int, StepCosts] = {}  # by sequences in a step
        self._texts: dict[int, _Text] = {}  # by request, the latest last
        self._unplain = 0  # steps since the last plain one
        self._look_at = LOOK  # verifies before the next look at a wider window
        self._journal = Journal(MEASURING)

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
        reach = min(ceiling, text.acceptance.reach + 1)
        drafts = costs.draft.prices(reach, context.length)
        affordable, window = self._best(text, costs, context.length, text.acceptance.rates(reach), drafts, text.offered)
        if text.confident and affordable and drafts[affordable] <= (drafts[window] if window else 0.0) + FREE * plain:
            return affordable  # `keep` decides, knowing the draft
        if window:
            return self._wider(text, costs, context.length, window, affordable, ceiling)
        text.probing = True
        if text.wait > 0:
            return self._plain(LOSING)
        return min(text.probe, affordable) or self._plain(SPENT)

    def keep(self, context: WindowContext, draft: Draft) -> int:
        """How many tokens of this draft to verify, 0..len(draft.tokens); its own cost is spent either way.

        A draft is weighed anew if it is shorter than it might be, or comes with confidences; ceiling: the window asked for.
        """
        count = min(len(draft.tokens), MOST_DRAFT)
        text, costs = self._text(context.key, context.length), self._kind(context.sequences)
        text.proposed = count
        text.confident = len(draft.confidences) >= count > 0
        text.pending = draft.confidences[:count] if text.confident else ()
        if not count or not costs.plain(context.length):
            return count
        if not text.confident and (text.probing or count >= context.ceiling):
            return count
        rates = text.acceptance.rates_of(text.pending) if text.confident else text.acceptance.rates(count)
        affordable, best = self._best(text, costs, context.length, rates, [0.0] * (count + 1), 1.0)
        if not best and text.confident and self._worth_a_probe(text):
            text.probing, best = True, min(text.probe, affordable)
        elif best:
            text.probing = False
        if not best:
            self._journal.idle = DECLINED
        return best

    @staticmethod
    def _worth_a_probe(text: _Text) -> bool:
        """A draft that looks too bad is verified for what it teaches, if its drafter believes in it or its kind is new."""
        believed = text.pending[0] >= 0.5 and not text.wait
        return believed or text.acceptance.hardly_tried(text.pending[0])

    def _best(
        self, text: _Text, costs: StepCosts, length: int, rates: list[float], drafts: list[float], offered: float
    ) -> tuple[int, int]:
        """The widest affordable window and the one with the most tokens per second, 0 where that is a plain step.

        rates: conditional acceptance by position. drafts: [k] seconds of drafting k tokens. offered: probability that the
        drafter has anything; a draft is taken to be as long as the window.
        """
        verifies = costs.verifies(len(rates), length)
        plain, silence = verifies[0], (1.0 - offered) * costs.of_silence(length)
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

    def _wider(self, text: _Text, costs: StepCosts, length: int, window: int, affordable: int, ceiling: int) -> int:
        """The window, or now and then a wider one that is not measured: behind a step of the curve it may be flat again."""
        if text.probe <= window or self._journal.verifies < self._look_at:
            return window
        unmeasured = [w for w in range(window + 1, affordable + 1) if not costs.forward.sure(w + 1)]
        tokens, seconds = text.trusted
        most = 1.0 + expected(text.acceptance.rates(ceiling))[ceiling]
        if not unmeasured or most * seconds < PROMISE * tokens * costs.forward.widest(length):
            return window
        text.probing, self._look_at = True, self._journal.verifies + LOOK
        return unmeasured[0]

    def _plain(self, reason: str) -> int:
        self._journal.idle = reason
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
        self._unplain = self._unplain + 1 if asked else 0
        self._journal.step(asked, drafted, text.probing, sample)
        text.wait = max(0, text.wait - accepted - 1)
        plain = costs.plain(sample.length)
        gain = self._settle(text, costs, plain, drafted, accepted, proposed, sample) if asked and plain else 0.0
        if text.purse < PURSE:
            text.purse = min(PURSE, text.purse + REFILL * (accepted + 1))
        if asked:
            text.offered += (float(drafted > 0) - text.offered) / SILENCE_MEMORY
        if drafted:
            self._judge(text, drafted, accepted, sample.finished, gain)
        elif text.probing and gain < -FREE:
            text.wait_longer()  # a head that ran for nothing

    def _settle(
        self,
        text: _Text,
        costs: StepCosts,
        plain: float,
        drafted: int,
        accepted: int,
        proposed: int,
        sample: StepSample,
    ) -> float:
        """Plain steps won or lost, by the prices: what a stall costs is not the drafter's fault."""
        length = sample.length
        seconds = costs.draft.at(proposed, length)
        if drafted:
            seconds += costs.paid(drafted, sample.forward_seconds, length)
            if not text.probing:
                self._journal.gain(text.trusted, (accepted + 1.0, seconds), plain)
        else:
            seconds += costs.of_silence(length)
        gain = accepted + 1 - seconds / plain
        text.purse = max(text.purse, min(text.roof, text.purse + gain)) if gain > 0 else text.purse + gain
        return gain

    @staticmethod
    def _judge(text: _Text, drafted: int, accepted: int, finished: bool, gain: float) -> None:
        """Drafts behind a stop or behind the first rejection were not judged."""
        judged = accepted if finished else min(accepted + 1, drafted)
        text.acceptance.judge(judged, accepted, text.pending)
        if text.pending and not text.probing:
            pass  # a draft that looked good says nothing of those that do not
        elif accepted and (gain > 0 or not text.probing):
            text.failed = text.wait = 0
        elif judged:
            text.wait_longer()
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

    def report(self) -> GovernorReport:
        """A snapshot."""
        sequences, length = self._journal.latest
        costs = self._costs.get(sequences) or StepCosts()
        text = next(reversed(self._texts.values()), None) or _Text(None)
        rates = text.acceptance.rates(text.acceptance.reach)
        return self._journal.report(costs.plain(length), text.purse, costs.forward.measured(length), rates)
