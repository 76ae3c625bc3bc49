"""Chooses the window of every step: the one that gains most over this text's own pace; 0, a plain step, is one of them.

The *pace* is tokens per plain step, as this text went lately. A window is worth the tokens that it is expected to emit, less
what would be emitted at that pace in the time that it takes. So where drafts look better than usual more of them are verified
than would give the most tokens per second in this one step, for such places are rare; and where they look worse, fewer.

Three things decide. *Costs* (costs.py): what a verify of so many rows and a draft of so many tokens take, beside a plain
step. *Acceptance* (acceptance.py): how many of the drafted tokens survive. And a limit on the *stake*, which is what a verify
costs above a plain step should nothing be accepted; all of it in plain steps:

* While the text is *proven*, by the latest verify or by looks, MOST_STAKE. One rejected verify ends that: it is all that the
  end of a quotation costs.
* Otherwise what is in the purse, and MOST_LOST in all since the latest success. The purse is a little at first, gets a little
  back with every token and what verifies win, so a drafter that only loses costs at most PURSE + 64 * REFILL = 3 plain steps
  in any 64 tokens.

A *look*: a draft need not be verified to be judged. Beside a plain step it is enough to see whether its first token is what
came. A drafter that costs next to nothing is looked at in every plain step; one with a price when its waiting time, which
doubles with every failure, is over. So text that turns good is noticed within two or three tokens, and after a rejection the
next token tells whether it was bad luck. How many looks in a row prove a text doubles with every verify that they led to in
vain.

What other governors have rules for, and what brings about the same here:

  eight-step probes, a verdict for 64 steps   every step is a sample, and the window is chosen anew in every step
  probes that cost a verify                   looks, which cost a draft; widths are tried one beyond the widest measured
  park for 32 .. 256 steps, early give-up     looks at waits of 1, 3, 7 .. 128 tokens; no waits where looking is free
  watch a win, park it after eight losses     one rejected verify, and the text is to be proven anew
  one probe decides for a whole turn          acceptance fades; a first draft has rates of its own, by the streak before it
  parked steps feed the baseline              any step that ran plain decoding's own graph does
  silent head = speculative sample            asking has a price, paid from the purse; a lookup that costs next to nothing
                                              is asked again and again and never parked
  new request caps the park                   a new request begins with a quarter of the counts, no wait, no winnings
"""

from __future__ import annotations

from tsgg.speculative.acceptance import Acceptance, expected
from tsgg.speculative.costs import StepCosts
from tsgg.speculative.journal import GovernorReport, Journal
from tsgg.speculative.options import MAX_DRAFT
from tsgg.speculative.protocol import Draft, WindowContext
from tsgg.speculative.stats import StepSample

# In plain steps. PURSE pays the first verifies of a text; refilled within 64 tokens, it bounds what a hopeless drafter costs.
PURSE = 1.5
REFILL = PURSE / 64  # per token
MOST_LOST = 3.0  # since the latest success, in unproven text; and the most that the purse holds
MOST_STAKE = 4.0  # of one verify in proven text: what a text that turns may cost
# Steps that a text's pace remembers, and plain steps that it starts with: until it is known to be quick, what is gained over
# plain decoding counts, so that a good place at the start is used to the full.
PACE_MEMORY, PACE_PRIOR = 64, 48.0
FIRST_PROOF = 2  # right looks in a row that prove a new text: one may be luck
MOST_PROOF = 64
LONGEST_WAIT = 128  # tokens between looks at a drafter that has a price and fails: under 0.5 % of the time
REFRESH = 128  # steps without a plain one: the baseline of every verdict must not grow old
# An unmeasured width looks this much better than the line through its neighbours says, and so gets measured: between two
# equally good windows nobody would ever try the wider one.
CURIOSITY = 1.05
# Verifies until a wider window is tried though it does not look better, doubled each time, while the widest would be PROMISE
# times better at the price of the widest measured: curves have bumps, and behind a bump they are often flat.
FIRST_TRY, LAST_TRY = 2, 128
PROMISE = 1.1
# Right looks in a row that bring about a verify against the odds, doubled each time: of as many tokens as the stake allows, for
# two rows may cost twice as much as one, and four hardly more; or prices come from a moment when the machine was busy.
LONG_STREAK = 4
SILENCE_MEMORY = 16  # asks that the share of silent ones remembers
FREE = 0.01  # of a plain step: who costs less is asked in every step, for as much as may be, and judged by the draft
MOST_REQUESTS = (
    512  # texts remembered at a time: more than a model has sequences, or those side by side would forget each other
)
MOST_KINDS = 8  # numbers of sequences per step whose costs are remembered

NO_ROOM = "no room for a draft"
MEASURING = "measuring plain decode"
REFRESHING = "refreshing the plain baseline"
LOSING = "a plain step is faster: the next look at the drafter waits"
LOOKING = "a plain step is faster: drafts are only looked at"


class _Text:
    """What is known of one request's text."""

    __slots__ = (
        "acceptance",
        "asked",
        "confidence",
        "confident",
        "convinced",
        "emitted",
        "failed",
        "length",
        "looking",
        "lost",
        "offered",
        "pace",
        "pending",
        "proof",
        "proposed",
        "proven",
        "purse",
        "rejected",
        "spent",
        "trusted",
        "trying",
        "wait",
    )  # fmt: skip

    def __init__(self, before: _Text | None) -> None:
        self.acceptance: Acceptance = Acceptance() if before is None else before.acceptance.restarted()
        self.confident: bool = False if before is None else before.confident  # the drafter reports confidences
        self.offered: float = 1.0 if before is None else before.offered  # share of asks that had an answer
        self.purse: float = PURSE if before is None else min(PURSE, before.purse)
        self.emitted = self.spent = PACE_PRIOR  # tokens, and what they took in plain steps; lately
        self.pace = 1.0  # plain decoding's, at least: that can always be had
        self.lost = 0.0  # plain steps since the latest success
        self.proven = False  # the latest verify or look was right
        self.proof = FIRST_PROOF  # right looks in a row that it takes to prove this text
        self.rejected = 0  # verifies in a row that accepted nothing
        self.convinced = LONG_STREAK  # right looks in a row that bring about a verify against the odds
        self.failed = 0  # looks in a row that failed
        self.wait = 0  # tokens until the next look
        self.length = 0  # committed tokens when last seen
        self.trying = False  # the draft under way is to be verified whatever it looks like
        self.asked = False  # in the latest step
        self.looking = False  # the draft under way is not to be verified
        self.proposed = 0  # tokens of the draft under way, verified or not
        self.confidence: float | None = None  # of its first token
        self.pending: tuple[float, ...] = ()  # confidences of those that are verified
        self.trusted = (0.0, 0.0)  # tokens and seconds expected of the step under way

    def went(self, emitted: int, spent: float) -> None:
        """A step emitted so many tokens, and took as long as `spent` plain ones."""
        keep = 1.0 - 1.0 / PACE_MEMORY
        self.emitted, self.spent = keep * self.emitted + emitted, keep * self.spent + spent
        self.pace = max(1.0, self.emitted / self.spent)

    def verified(self, accepted: bool) -> None:
        """A verify accepted something, or nothing."""
        if accepted:
            self.rejected = 0
            self._succeed()
        else:
            self.proof = min(2**self.rejected, MOST_PROOF)
            self.rejected, self.proven = self.rejected + 1, False

    def looked(self, right: bool) -> None:
        """A look, or an ask that nothing came of."""
        if right:
            self._succeed()
            self.proven = self.acceptance.streak >= self.proof
        else:
            self.proven = False
            self.wait = min(2**self.failed - 1, LONGEST_WAIT)
            self.failed = min(self.failed + 1, 16)

    def _succeed(self) -> None:
        self.failed = self.wait = 0
        self.lost, self.proven = 0.0, True


class CostGovernor:
    """`WindowPolicy` for one (model, drafter, device), shared by all its requests: costs carry over, acceptance softly."""

    def __init__(self) -> None:
        self._costs: dict[int, StepCosts] = {}  # by sequences in a step
        self._texts: dict[int, _Text] = {}  # by request, the latest last
        self._unplain = 0  # steps since the last one that ran the plain graph
        self._try_at = self._try_after = FIRST_TRY  # verifies until a wider window is tried, and until the next time
        self._journal = Journal(MEASURING)

    # -- the choice ----------------------------------------------------------------------------------------------------

    def choose(self, context: WindowContext) -> int:
        """Draft tokens to ask for, 0..ceiling; 0 = a plain step."""
        text, costs = self._text(context.key, context.length), self._kind(context.sequences)
        ceiling, plain = min(context.ceiling, MAX_DRAFT), costs.plain(context.length)
        text.looking = text.trying = False
        text.proposed, text.pending, text.confidence = 0, (), None
        if ceiling < 1:
            return self._plain(NO_ROOM)
        if not plain:
            return self._plain(MEASURING)
        if self._unplain >= REFRESH:
            return self._plain(REFRESHING)
        # One past the longest streak, and one past the widest step measured: neither is extrapolated further.
        reach = min(ceiling, text.acceptance.reach + 1, costs.forward.most)
        drafts = costs.draft.prices(reach, context.length)
        affordable, window = self._best(text, costs, context.length, text.acceptance.rates(reach), drafts, text.offered)
        if not window and text.proven and text.acceptance.streak >= text.convinced:
            text.convinced *= 2
            text.trying = True
            return self._widest(costs, context.length, min(ceiling, text.acceptance.streak))
        if text.confident and affordable and drafts[affordable] <= (drafts[window] if window else 0.0) + FREE * plain:
            return affordable  # `keep` decides, knowing the draft
        if window:
            return self._wider(text, costs, context.length, window, affordable, ceiling)
        if drafts[1] > FREE * plain and (text.wait > 0 or drafts[1] > text.purse * plain):
            return self._plain(LOSING)
        text.looking = True
        self._journal.idle = LOOKING
        return 1

    def keep(self, context: WindowContext, draft: Draft) -> int:
        """How many tokens of this draft to verify, 0..len(draft.tokens); its own cost is spent either way.

        A draft is weighed anew if it is shorter than it might be, or comes with confidences; ceiling: the window asked for.
        """
        count = min(len(draft.tokens), MAX_DRAFT)
        text, costs = self._text(context.key, context.length), self._kind(context.sequences)
        text.proposed = count
        if count:
            text.confident = len(draft.confidences) >= count
        text.pending = draft.confidences[:count] if text.confident and count else ()
        if not count or not costs.plain(context.length):
            return count
        if text.confident:
            text.confidence = text.pending[0]
        if text.trying:
            return count
        if not text.confident and (text.looking or count >= context.ceiling):
            return 0 if text.looking else count
        rates = text.acceptance.rates_of(text.pending) if text.confident else text.acceptance.rates(count)
        _, best = self._best(text, costs, context.length, rates, [0.0] * (count + 1), 1.0)
        text.looking = not best
        if not best:
            self._journal.idle = LOOKING
        return best

    def _best(
        self, text: _Text, costs: StepCosts, length: int, rates: list[float], drafts: list[float], offered: float
    ) -> tuple[int, int]:
        """The widest affordable window and the one that gains most over the text's pace, 0 where that is a plain step.

        rates: conditional acceptance by position. drafts: [k] seconds of drafting k tokens. offered: probability that the
        drafter has anything; a draft is taken to be as long as the window.
        """
        verifies = costs.verifies(len(rates), length)
        plain, silence = verifies[0], (1.0 - offered) * costs.of_silence(length)
        limit = plain * (MOST_STAKE if text.proven else min(text.purse, MOST_LOST - text.lost))
        accepted = expected(rates)
        pace = text.pace
        affordable, best, best_worth = 0, 0, 1.0 - pace
        text.trusted = (1.0, plain)
        for window in range(1, len(rates) + 1):
            if verifies[window] + drafts[window] - plain > limit:
                break
            affordable = window
            tokens = 1.0 + offered * accepted[window]
            if best and not costs.forward.sure(window + 1):
                tokens *= CURIOSITY
            worth = tokens - pace * (drafts[window] + silence + offered * verifies[window]) / plain
            if worth > best_worth:
                best, best_worth = window, worth
                text.trusted = (1.0 + accepted[window], drafts[window] + verifies[window])
        return affordable, best

    def _wider(self, text: _Text, costs: StepCosts, length: int, window: int, affordable: int, ceiling: int) -> int:
        """The window, or now and then a wider one that is not measured: behind a step of the curve it may be flat again."""
        if text.acceptance.streak < window or self._journal.verifies < self._try_at:
            return window
        unmeasured = [w for w in range(window + 1, affordable + 1) if not costs.forward.sure(w + 1)]
        tokens, seconds = text.trusted
        most = 1.0 + expected(text.acceptance.rates(ceiling))[ceiling]
        if not unmeasured or most * seconds < PROMISE * tokens * costs.forward.widest(length):
            return window
        self._try_at, self._try_after = self._journal.verifies + self._try_after, min(2 * self._try_after, LAST_TRY)
        text.trying = True
        return unmeasured[0]

    @staticmethod
    def _widest(costs: StepCosts, length: int, most: int) -> int:
        """The widest window whose stake is allowed in proven text, 1 at least."""
        verifies, drafts = costs.verifies(most, length), costs.draft.prices(most, length)
        allowed = (1.0 + MOST_STAKE) * verifies[0]
        return max((w for w in range(1, most + 1) if verifies[w] + drafts[w] <= allowed), default=1)

    def _plain(self, reason: str) -> int:
        self._journal.idle = reason
        return 0

    # -- the lesson ----------------------------------------------------------------------------------------------------

    def record(self, sample: StepSample) -> None:
        """Learns from a step: its cost, what was accepted, and what it lost or won."""
        drafted = min(max(sample.drafted, 0), MAX_DRAFT)
        accepted = min(max(sample.accepted, 0), drafted)
        asked = sample.window > 0
        text, costs = self._text(sample.key, sample.length), self._kind(sample.sequences)
        proposed = max(drafted, text.proposed)
        costs.add(sample, drafted, proposed)
        self._unplain = 0 if not drafted and (sample.bare or not asked) else self._unplain + 1
        self._journal.step(asked, drafted, sample)
        text.wait = max(0, text.wait - accepted - 1)
        plain = costs.plain(sample.length)
        if plain:
            spent = self._settle(text, costs, plain, drafted, accepted, proposed, sample) if asked else 1.0
            text.went(accepted + 1, spent)
        if text.purse < PURSE:
            text.purse = min(PURSE, text.purse + REFILL * (accepted + 1))
        if drafted:
            # Drafts behind a stop or behind the first rejection were not judged.
            text.acceptance.judge(accepted if sample.finished else min(accepted + 1, drafted), accepted, text.pending)
            text.verified(accepted > 0)
        elif sample.foreseen is not None:
            text.acceptance.foresee(sample.foreseen, text.confidence)
            text.looked(sample.foreseen)
        elif asked and (text.asked or sample.bare):  # who reads rows has none in the first step behind a plain one
            text.looked(False)
        text.asked = asked
        if asked and not (text.looking and proposed):
            text.offered += (float(drafted > 0) - text.offered) / SILENCE_MEMORY

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
        """Plain steps won or lost, by the prices: what a stall costs is not the drafter's fault. Returns those it took."""
        length = sample.length
        seconds = costs.draft.at(proposed, length)
        if drafted:
            seconds += costs.paid(drafted, sample.forward_seconds, length)
            if not text.trying:
                self._journal.gain(text.trusted, (accepted + 1.0, seconds), plain)
        else:
            seconds += costs.of_silence(length)
        gain = accepted + 1 - seconds / plain
        if gain > 0:
            text.purse = max(text.purse, min(MOST_LOST, text.purse + gain))
        else:
            text.purse += gain
            text.lost -= gain
        return seconds / plain

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
        rates = text.acceptance.by_position()
        return self._journal.report(costs.plain(length), text.purse, costs.forward.measured(length), rates)
