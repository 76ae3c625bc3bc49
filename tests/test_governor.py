"""The cost governor with synthetic timings: what it may choose, what it may lose, what it must find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tsgg.speculative.governor import CostGovernor
from tsgg.speculative.protocol import WindowContext
from tsgg.speculative.stats import StepSample

PLAIN = 0.010  # seconds of a plain step


def sample(window: int, drafted: int, accepted: int, seconds: float, length: int, draft: float = 0.0) -> StepSample:
    return StepSample(
        key=0, window=window, drafted=drafted, accepted=accepted, emitted=accepted + 1, discarded=0, silence="",
        finished=False, length=length, sequences=1, draft_seconds=draft, forward_seconds=seconds,
    )  # fmt: skip


def play(governor: CostGovernor, tokens: int, right: bool, per_row: float, ceiling: int = 8) -> tuple[float, list[int]]:
    """Seconds and windows of decoding `tokens` with a drafter that is always right or always wrong."""
    seconds, length, windows = 0.0, 100, []
    while length < 100 + tokens:
        window = governor.choose(WindowContext(0, ceiling, length, 1))
        accepted = window if right else 0
        step = PLAIN * (1.0 + per_row * window)
        governor.record(sample(window, window, accepted, step, length))
        seconds, length = seconds + step, length + accepted + 1
        windows.append(window)
    return seconds, windows


def test_the_first_step_measures_plain_decoding() -> None:
    assert CostGovernor().choose(WindowContext(0, 8, 10, 1)) == 0


def test_a_drafter_that_always_loses_costs_at_most_three_plain_steps_in_64_tokens() -> None:
    for per_row in (0.2, 0.5, 1.0):
        seconds, _ = play(CostGovernor(), 64, right=False, per_row=per_row)
        assert seconds - 64 * PLAIN <= 3 * PLAIN + 1e-9


def test_a_drafter_that_always_wins_gets_the_whole_window() -> None:
    _, windows = play(CostGovernor(), 400, right=True, per_row=0.1)
    assert windows.count(8) > 0.6 * len(windows)


def test_a_winning_window_shrinks_within_a_few_steps_of_a_change() -> None:
    governor = CostGovernor()
    play(governor, 300, right=True, per_row=0.5)
    seconds, windows = play(governor, 64, right=False, per_row=0.5)
    assert seconds - 64 * PLAIN <= 9 * PLAIN
    assert sum(windows[8:]) <= 8


def test_drafts_that_cannot_pay_are_not_verified_for_long() -> None:
    _, windows = play(CostGovernor(), 400, right=True, per_row=1.5)  # a row costs more than the token that it may win
    assert sum(1 for window in windows if window) < 0.1 * len(windows)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 64),
            st.integers(0, 64),
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=60,
    )
)
def test_whatever_is_reported_the_window_stays_in_range(steps: list[tuple[int, int, float, float]]) -> None:
    governor, length = CostGovernor(), 0
    for ceiling, accepted, seconds, draft in steps:
        window = governor.choose(WindowContext(0, ceiling, length, 1))
        assert 0 <= window <= ceiling
        governor.record(sample(window, window, min(accepted, window), seconds, length, draft))
        length += min(accepted, window) + 1
    governor.report()
