"""The cost governor on synthetic, noise-free timings: what it may choose, what it may lose, what it must find."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import simulation
from tsgg.speculative import Draft, StepSample, WindowContext
from tsgg.speculative.governor import (
    MEASURING,
    CostGovernor,
)

PLAIN = 0.010  # seconds of a plain step
Taken = tuple[int, int, int, float]  # length, tokens verified, accepted, seconds


def steep(slope: float) -> Callable[[int], float]:
    """Seconds by rows; a row costs `slope` plain steps."""
    return lambda rows: PLAIN * (1.0 + slope * (rows - 1))


SLOPE = steep(0.3)


class Play:
    """One governor, one request after the other; drafts are as long as the window unless `drafts` says otherwise."""

    def __init__(
        self, seconds: Callable[[int], float] = SLOPE, draft_seconds: float = 0.0, ceiling: int = 8, bare: bool = True
    ) -> None:
        self.governor, self.bare = CostGovernor(), bare
        self.seconds, self.draft_seconds, self.ceiling = seconds, draft_seconds, ceiling
        self.key, self.length = 0, 100

    def request(self) -> None:
        self.key, self.length = self.key + 1, 100

    def step(
        self,
        accepts: Callable[[int], int],
        drafts: Callable[[int], int] = lambda window: window,
        foreseen: bool | None = None,
    ) -> Taken:
        context = WindowContext(self.key, self.ceiling, self.length, 1)
        window = self.governor.choose(context)
        assert 0 <= window <= self.ceiling
        drafted = proposed = drafts(window) if window else 0
        if drafted:
            drafted = self.governor.keep(dataclasses.replace(context, ceiling=window), Draft((0,) * drafted))
        looked = proposed and not drafted
        foreseen = None if not looked else accepts(1) > 0 if foreseen is None else foreseen
        accepted, asked = min(accepts(drafted), drafted), self.draft_seconds if window else 0.0
        seconds = self.seconds(drafted + 1)
        self.record(window, drafted, accepted, seconds, asked, foreseen=foreseen)
        self.length += accepted + 1
        return self.length - accepted - 1, drafted, accepted, seconds + asked

    def record(
        self,
        window: int,
        drafted: int,
        accepted: int,
        seconds: float,
        asked: float,
        stop: bool = False,
        foreseen: bool | None = None,
    ) -> None:
        self.governor.record(
            StepSample(
                key=self.key, window=window, drafted=drafted, accepted=accepted, emitted=accepted + 1, discarded=0,
                silence="", finished=stop, length=self.length, sequences=1, draft_seconds=asked, forward_seconds=seconds,
                foreseen=foreseen, bare=self.bare,
            )
        )  # fmt: skip

    def tokens(
        self, count: int, accepts: Callable[[int], int], drafts: Callable[[int], int] = lambda w: w
    ) -> list[Taken]:
        steps, end = [], self.length + count
        while self.length < end:
            steps.append(self.step(accepts, drafts))
        return steps


def all_of(drafted: int) -> int:
    return drafted


def none_of(drafted: int) -> int:
    return 0


def coin(share: float, seed: int = 0) -> Callable[[int], int]:
    """Accepts each draft whose predecessors were accepted with this probability."""
    rng = random.Random(seed)
    return lambda drafted: next((i for i in range(drafted) if rng.random() >= share), drafted)


def lost(steps: list[Taken]) -> float:
    """Plain steps that these steps took beyond their tokens."""
    return sum(seconds for *_, seconds in steps) / PLAIN - sum(accepted + 1 for _, _, accepted, _ in steps)


def worst_stretch(steps: list[Taken], tokens: int = 64) -> float:
    """Most plain steps lost in any stretch of whole steps of at most so many tokens."""
    worst = 0.0
    for first in range(len(steps)):
        for last in range(first, len(steps)):
            if steps[last][0] + steps[last][2] + 1 - steps[first][0] > tokens:
                break
            worst = max(worst, lost(steps[first : last + 1]))
    return worst


# -- which window ----------------------------------------------------------------------------------------------------------


def test_it_asks_for_nothing_before_two_plain_steps_are_measured() -> None:
    play = Play()
    play.tokens(3, all_of)
    assert play.governor.report().windows == ((0, 2), (1, 1))
    assert CostGovernor().report().idle == MEASURING


def test_growth_is_by_one_draft_per_success() -> None:
    play = Play(steep(0.1))
    assert [play.step(all_of)[1] for _ in range(11)] == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8], "the third step looks"


def test_a_bump_of_the_curve_does_not_hide_what_lies_behind_it() -> None:
    """A second row costs almost a plain step, the six behind it hardly anything."""
    play = Play(lambda rows: PLAIN * (1.0 if rows == 1 else 1.9 if rows == 2 else 3.4 if rows <= 4 else 3.5))
    play.tokens(400, all_of)
    assert [play.step(all_of)[1] for _ in range(4)] == [8] * 4


def test_after_a_rejection_it_verifies_nothing_until_a_look_was_right() -> None:
    play = Play(steep(0.45))
    play.tokens(300, all_of)
    assert play.step(none_of)[1] == 8
    assert [play.step(none_of)[1] for _ in range(5)] == [0] * 5
    assert play.step(all_of)[1] == 0 and play.step(all_of)[1] > 4


def test_looks_that_led_to_rejections_are_believed_less_each_time() -> None:
    """Right where it is looked at and wrong where it is verified: no drafter is, but one that was would cost little."""
    play = Play(steep(0.3))
    play.tokens(300, all_of)
    steps = [play.step(none_of, foreseen=True) for _ in range(300)]
    assert sum(drafted > 0 for _, drafted, *_ in steps) <= 10


@pytest.mark.parametrize(
    ("curve", "share"),
    [
        ({1: 22, 4: 38, 6: 44, 8: 51, 9: 89, 17: 97}, 0.95),
        ({1: 22, 4: 38, 6: 44, 8: 51, 9: 89, 17: 97}, 0.6),
        ({1: 10, 2: 11, 3: 20, 4: 21, 9: 22, 17: 23}, 0.9),
        ({1: 10, 17: 12}, 0.5),
        ({1: 10, 2: 16, 17: 106}, 0.95),
        ({1: 10, 2: 21, 17: 300}, 0.99),
    ],
)
def test_the_window_is_about_as_good_as_the_best_one(curve: dict[int, float], share: float) -> None:
    """Tokens per second of the windows that it settles on, by the formula of a geometric run of acceptances."""
    times = simulation.curve({rows: float(ms) for rows, ms in curve.items()})
    rate = [(1 - share ** (w + 1)) / (1 - share) / times[w + 1] for w in range(17)]
    play = Play(lambda rows: times[rows] / 1e3, ceiling=16)
    accepts = coin(share, seed=3)
    play.tokens(4000, accepts)
    windows = [window for _, window, *_ in play.tokens(3000, accepts)]
    seconds = sum(times[w + 1] for w in windows)
    assert sum(rate[w] * times[w + 1] for w in windows) / seconds > 0.95 * max(rate)


def test_a_drafter_that_cannot_pay_is_left_alone_even_when_it_is_right() -> None:
    windows = [window for _, window, *_ in Play(steep(1.2)).tokens(400, all_of)]
    assert sum(window > 0 for window in windows) < 0.05 * len(windows)


def test_the_ceiling_is_obeyed() -> None:
    play = Play(steep(0.01))
    play.tokens(200, all_of)
    for ceiling in (3, 1, 8):
        assert play.governor.choose(WindowContext(0, ceiling, play.length, 1)) <= ceiling
    assert play.governor.choose(WindowContext(0, 0, play.length, 1)) == 0


def test_one_stall_does_not_change_the_choice() -> None:
    play = Play(steep(0.1))
    play.tokens(300, all_of)
    play.record(8, 8, 8, 50 * PLAIN, 0.0)
    assert play.step(all_of)[1] == 8
    play.record(0, 0, 0, 50 * PLAIN, 0.0)
    assert play.step(all_of)[1] == 8


def test_a_price_from_a_busy_moment_is_measured_again_where_drafts_are_right() -> None:
    play = Play(lambda rows: PLAIN * (1.0 if rows == 1 else 5.0))
    play.tokens(40, all_of)
    play.seconds = steep(0.1)
    play.tokens(300, all_of)
    assert play.step(all_of)[1] == 8


def test_so_it_is_with_a_drafter_that_says_how_sure_it_is() -> None:
    governor, length, kept = CostGovernor(), 100, list[int]()
    for i in range(300):
        context = WindowContext(0, 8, length, 1)
        window = governor.choose(context)
        drafted = (
            governor.keep(dataclasses.replace(context, ceiling=window), Draft((0,) * window, (0.99,) * window))
            if window
            else 0
        )
        seconds = PLAIN * (1.0 if not drafted else 5.0 if i < 40 else 1.0 + 0.1 * drafted)
        governor.record(
            StepSample(
                key=0, window=window, drafted=drafted, accepted=drafted, emitted=drafted + 1, discarded=0, silence="",
                finished=False, length=length, sequences=1, draft_seconds=0.0, forward_seconds=seconds,
                foreseen=True if window and not drafted else None,
            )
        )  # fmt: skip
        length += drafted + 1
        kept.append(drafted)
    assert kept[-1] == 8


def test_a_verify_that_became_dear_is_given_up() -> None:
    play = Play(steep(0.1))
    play.tokens(300, all_of)
    play.seconds = lambda rows: PLAIN if rows == 1 else 12 * PLAIN
    windows = [window for _, window, *_ in play.tokens(300, all_of)]
    assert sum(window > 0 for window in windows[20:]) < 0.1 * len(windows)


# -- what may be lost ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=8, max_size=8),
    st.floats(0.0, 0.4),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 1000),
)
def test_a_drafter_that_always_loses_costs_three_plain_steps_in_64_tokens_at_most(
    slopes: list[float], draft: float, speaks: float, seed: int
) -> None:
    """Whatever the curve (a row costs a plain step at most), the drafter's own time, and how often it is silent."""
    rng = random.Random(seed)
    times = [PLAIN * (1.0 + sum(slopes[:k])) for k in range(9)]
    play = Play(lambda rows: times[rows - 1], draft * PLAIN)
    steps = play.tokens(200, none_of, lambda window: window if rng.random() < speaks else 0)
    assert worst_stretch(steps) <= 3.0 + 1e-6


def test_short_requests_do_not_lose_more() -> None:
    play, steps = Play(steep(0.5)), list[Taken]()
    for _ in range(30):
        play.request()
        steps += [(len(steps) + i, *taken[1:]) for i, taken in enumerate(play.tokens(10, none_of))]
    assert worst_stretch(steps) <= 3.0 + 1e-6


@pytest.mark.parametrize("slope", [0.05, 0.1, 0.2, 0.3, 0.45])
def test_a_text_that_turns_costs_one_verify_and_what_a_losing_drafter_may(slope: float) -> None:
    play = Play(steep(slope))
    play.tokens(300, all_of)
    play.tokens(20, all_of)
    steps = play.tokens(64, none_of)
    assert lost(steps) <= max(3.0, 8 * slope) + 1e-6
    assert slope < 0.3 or sum(drafted > 1 for _, drafted, *_ in steps) == 1


def test_a_win_that_ends_shrinks_within_a_few_steps() -> None:
    play = Play(steep(0.3))
    play.tokens(300, all_of)
    assert [play.step(none_of)[1] for _ in range(4)][-1] <= 1


def test_looks_at_a_dear_drafter_come_ever_more_rarely() -> None:
    play = Play(steep(0.2), draft_seconds=0.1 * PLAIN)
    looked = [length for length, _, _, seconds in play.tokens(700, none_of) if seconds > PLAIN]
    gaps = [b - a for a, b in pairwise(looked)]
    assert gaps == sorted(gaps) and 120 < gaps[-1] <= 129


def test_a_drafter_that_fails_its_looks_is_not_verified() -> None:
    assert not any(drafted for _, drafted, *_ in Play(steep(0.2)).tokens(700, none_of))


def test_a_text_that_turns_good_is_noticed() -> None:
    play = Play(steep(0.2))
    play.tokens(500, none_of)
    steps = play.tokens(300, all_of)
    assert sum(accepted + 1 for *_, accepted, _ in steps) / len(steps) > 3


def test_a_lookup_that_finds_nothing_goes_on_asking() -> None:
    play = Play(steep(0.5), draft_seconds=0.001 * PLAIN)
    play.tokens(600, none_of, none_of)
    assert play.governor.report().asked_steps > 0.97 * 600


def test_a_head_that_runs_and_proposes_nothing_is_stood_down() -> None:
    play = Play(steep(0.2), draft_seconds=0.5 * PLAIN)
    steps = play.tokens(600, none_of, none_of)
    assert lost(steps) < 0.012 * 600 and play.governor.report().asked_steps < 0.1 * 600


def test_a_drafter_that_wants_rows_of_every_step_has_a_plain_baseline_too() -> None:
    """Steps that ask for nothing count as plain, though the trunk hands out hidden rows in them."""
    play = Play(steep(0.1), bare=False)
    play.tokens(300, all_of)
    assert play.step(all_of)[1] == 8


def test_the_drafters_own_time_is_part_of_the_price() -> None:
    cheap, dear = Play(steep(0.05)), Play(steep(0.05), draft_seconds=8 * PLAIN)
    assert max(window for _, window, *_ in cheap.tokens(300, all_of)) == 8
    assert sum(window > 0 for _, window, *_ in dear.tokens(300, all_of)) <= 2


def test_the_plain_baseline_is_refreshed_in_a_long_win() -> None:
    play = Play(steep(0.05))
    steps = play.tokens(4000, all_of)
    plain = [i for i, (_, window, *_) in enumerate(steps) if not window]
    assert plain[2:] and all(b - a <= 129 for a, b in pairwise(plain[1:]))


# -- drafts that are known ---------------------------------------------------------------------------------------------------


def confident(governor: CostGovernor, steps: int, text: Callable[[int], tuple[float, bool]]) -> list[tuple[float, int]]:
    """(confidence, verified) of every draft of eight; all its tokens share one confidence and one fate."""
    length, kept = 100, []
    for i in range(steps):
        confidence, good = text(i)
        context = WindowContext(0, 8, length, 1)
        window = governor.choose(context)
        draft = Draft((0,) * window, (confidence,) * window)
        drafted = governor.keep(context, draft) if window else 0
        foreseen = good if window and not drafted else None
        accepted = drafted if good else 0
        if window:
            kept.append((confidence, drafted))
        governor.record(
            StepSample(
                key=0, window=window, drafted=drafted, accepted=accepted, emitted=accepted + 1, discarded=0, silence="",
                finished=False, length=length, sequences=1, draft_seconds=0.0, forward_seconds=steep(0.4)(drafted + 1),
                foreseen=foreseen,
            )
        )  # fmt: skip
        length += accepted + 1
    return kept


def test_doubtful_drafts_are_not_verified_and_trusted_ones_are() -> None:
    kept = confident(CostGovernor(), 600, lambda i: (0.9, True) if i % 3 == 0 else (0.1, False))[200:]
    trusted = [count for confidence, count in kept if confidence == 0.9]
    doubtful = [count for confidence, count in kept if confidence == 0.1]
    assert sum(trusted) / len(trusted) > 6 and sum(count > 0 for count in doubtful) < 0.1 * len(doubtful)
    assert len(kept) > 350, "asking is free: only what is known of the draft decides"


def test_confidences_are_calibrated_by_what_comes_of_them() -> None:
    kept = confident(CostGovernor(), 900, lambda i: (0.1, True) if i % 3 == 0 else (0.9, False))[600:]
    assert sum(count for confidence, count in kept if confidence == 0.1) > 4 * sum(
        count for confidence, count in kept if confidence == 0.9
    )


def test_a_draft_is_measured_by_the_pace_of_its_text() -> None:
    """The same drafts, right three times in four, between good ones and between bad ones: there they are what delays."""

    def verified(others: tuple[float, bool]) -> float:
        kept = confident(CostGovernor(), 900, lambda i: others if i % 5 else (0.6, i // 5 % 4 > 0))[300:]
        counts = [count for confidence, count in kept if confidence == 0.6]
        return sum(counts) / len(counts)

    assert verified((0.99, True)) < 1 < 3 < verified((0.1, False))


# -- requests ----------------------------------------------------------------------------------------------------------------


def test_a_new_request_knows_the_costs_but_grows_anew() -> None:
    play = Play(steep(0.6))
    play.tokens(400, all_of)
    play.request()
    first = [play.step(all_of)[1] for _ in range(4)]
    assert 0 < first[0] <= 2 and first == sorted(first), "no measuring, no winnings from before"
    assert play.tokens(60, all_of)[-1][1] >= 6


def test_a_wait_is_not_handed_on_to_the_next_request() -> None:
    play = Play(steep(0.2), draft_seconds=0.1 * PLAIN)
    play.tokens(600, none_of)
    play.request()
    assert any(seconds > PLAIN for *_, seconds in play.tokens(8, none_of))


def test_requests_side_by_side_keep_their_own_counts() -> None:
    governor, windows = CostGovernor(), {0: list[int](), 1: list[int]()}
    lengths = {0: 10, 1: 10}
    for _ in range(150):
        for key in (0, 1):
            context = WindowContext(key, 8, lengths[key], 2)
            asked = governor.choose(context)
            window = governor.keep(dataclasses.replace(context, ceiling=asked), Draft((0,) * asked)) if asked else 0
            accepted = window if key == 0 else 0
            governor.record(
                StepSample(
                    key=key, window=asked, drafted=window, accepted=accepted, emitted=accepted + 1, discarded=0,
                    silence="", finished=False, length=lengths[key], sequences=2, draft_seconds=0.0,
                    forward_seconds=steep(0.3)(window + 1), foreseen=key == 0 if asked and not window else None,
                )
            )  # fmt: skip
            lengths[key] += accepted + 1
            windows[key].append(window)
    assert sum(windows[0][30:]) > 7 * len(windows[0][30:]) and sum(windows[1][30:]) < 0.1 * len(windows[1][30:])


def test_drafts_behind_a_stop_are_no_rejections() -> None:
    play = Play(steep(0.1))
    for _ in range(20):
        play.request()
        play.tokens(60, all_of)
        play.record(8, 8, 0, steep(0.1)(9), 0.0, stop=True)
    assert play.governor.report().acceptance[0] > 0.98
