"""Cost curves and acceptance rates, against formulas and counts that are written out here."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsgg.speculative import StepSample
from tsgg.speculative import acceptance as acceptance_module
from tsgg.speculative.acceptance import Acceptance, expected
from tsgg.speculative.costs import FORGET, CostCurve, StepCosts


def taught(samples: dict[int, float], times: int = 3, context: int = 0, hopeful: bool = False) -> CostCurve:
    curve = CostCurve(hopeful)
    for _ in range(times):
        for size, seconds in samples.items():
            curve.add(size, seconds, context)
    return curve


# -- costs -----------------------------------------------------------------------------------------------------------------


def test_measured_sizes_keep_the_steps_of_the_curve() -> None:
    measured = {1: 0.022, 4: 0.038, 6: 0.044, 8: 0.051, 9: 0.089}
    prices = taught(measured).prices(9, 0)
    assert [prices[size] for size in measured] == pytest.approx(list(measured.values()))
    assert prices[7] == pytest.approx((0.044 + 0.051) / 2)  # on the line between its neighbours


def test_beyond_what_is_measured_the_line_through_all_of_it_goes_on() -> None:
    assert taught({1: 0.010, 3: 0.016}).at(5, 0) == pytest.approx(0.022)
    hopeful = CostCurve(hopeful=True)
    hopeful.add(1, 0.010, 0)
    assert hopeful.at(3, 0) == pytest.approx(0.020) and taught({1: 0.010}).at(3, 0) == pytest.approx(0.010)
    for _ in range(2):
        hopeful.add(2, 0.019, 0)
    assert hopeful.at(4, 0) == pytest.approx(0.029), "a second row that costs almost a step says nothing of the third"


def test_the_first_sample_of_a_size_does_not_count_beside_the_second() -> None:
    curve = taught({1: 0.010, 2: 0.012})
    curve.add(3, 0.500, 0)  # kernels were compiled
    assert not curve.sure(3)
    curve.add(3, 0.014, 0)
    assert curve.sure(3) and curve.at(3, 0) == pytest.approx(0.014)


def test_the_building_of_a_graph_is_told_from_a_step_of_the_curve() -> None:
    built, step = taught({1: 0.022, 4: 0.038, 8: 0.051}), taught({1: 0.022, 4: 0.038, 8: 0.051})
    built.add(9, 0.057, 0)
    step.add(9, 0.089, 0)
    assert built.at(9, 0) == pytest.approx(0.051 + (0.051 - 0.022) / 7)  # what its neighbours promise
    assert step.at(9, 0) == 0.089


def test_a_stall_changes_nothing_and_a_second_in_a_row_is_believed() -> None:
    curve = taught({8: 0.030}, times=20)
    curve.add(8, 3.0, 0)
    assert curve.at(8, 0) == 0.030
    curve.add(8, 0.031, 0)
    curve.add(8, 3.0, 0)
    assert curve.at(8, 0) == pytest.approx(0.030, rel=0.01)
    curve.add(8, 0.090, 0)
    assert curve.at(8, 0) == pytest.approx(0.090)


def test_a_price_is_a_ratio_of_sums_over_its_samples() -> None:
    rng, curve = random.Random(1), CostCurve()
    times = [0.010 * (1 + 0.2 * rng.random()) for _ in range(13)]
    for seconds in times:
        curve.add(1, seconds, 0)
    assert curve.at(1, 0) == pytest.approx(sum(times[1:]) / 12)


def test_the_slope_over_context_is_learned_per_size() -> None:
    curve = CostCurve()
    for start in (0, 3000, 1000, 7000):
        for context in range(start, start + 30):
            curve.add(1, 0.010 + 1e-6 * context, context)
            curve.add(8, 0.030 + 5e-6 * context, context)
    for context in (0, 2000, 8000):
        assert curve.at(1, context) == pytest.approx(0.010 + 1e-6 * context, rel=0.04)
        assert curve.at(8, context) == pytest.approx(0.030 + 5e-6 * context, rel=0.04)


def test_noise_makes_no_slope() -> None:
    rng, curve = random.Random(2), CostCurve()
    for context in range(100, 160):
        curve.add(1, 0.010 * (1 + 0.1 * rng.random()), context)
    assert curve.at(1, 8000) == pytest.approx(curve.at(1, 130), rel=0.25)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300])
def test_an_impossible_time_is_no_sample(seconds: float) -> None:
    curve = taught({1: 0.010})
    for _ in range(3):
        curve.add(1, seconds, 0)
        curve.add(2, seconds, 0)
    assert curve.measured(0) == ((1, 0.010),)


def test_a_size_that_is_not_seen_for_long_is_forgotten() -> None:
    curve = taught({1: 0.010, 8: 0.090})  # the machine was busy
    for _ in range(FORGET + 10):
        curve.add(1, 0.010, 0)
    assert [size for size, _ in curve.measured(0)] == [1]


@given(st.dictionaries(st.integers(1, 65), st.floats(1e-4, 10.0), min_size=1), st.integers(0, 70))
def test_every_size_has_a_price_and_single_prices_agree_with_lists(samples: dict[int, float], most: int) -> None:
    curve = taught(samples)
    prices = curve.prices(most, 0)
    assert len(prices) == most + 1 and all(price > 0.0 for price in prices)
    assert prices == [curve.at(size, 0) for size in range(most + 1)]


def step(window: int, drafted: int, forward: float, draft: float, bare: bool = True) -> StepSample:
    return StepSample(0, window, drafted, 0, 1, 0, "", False, 0, 1, draft, forward, bare)


def test_the_first_verify_of_all_is_taken_for_what_is_hoped_until_it_is_confirmed() -> None:
    """It holds the making of its graph; were it believed, a second one would never come."""
    costs = StepCosts()
    for _ in range(3):
        costs.add(step(0, 0, 0.010, 0.0), 0, 0)
    costs.add(step(2, 2, 0.500, 0.001), 2, 2)
    assert costs.verifies(2, 0)[2] == pytest.approx(0.020)
    assert costs.paid(2, 0.500, 0) == pytest.approx(0.030), "a row is charged a plain step at most until then"
    for _ in range(2):  # the first of them might be a stall
        costs.add(step(2, 2, 0.050, 0.001), 2, 2)
    assert costs.verifies(2, 0)[2] == costs.paid(2, 0.500, 0) == pytest.approx(0.050)


def test_a_step_that_asked_in_vain_is_the_plain_baseline_only_where_it_ran_the_same_graph() -> None:
    costs, lookup = StepCosts(), StepCosts()
    for _ in range(3):
        costs.add(step(0, 0, 0.010, 0.0), 0, 0)
        costs.add(step(1, 0, 0.013, 0.002, bare=False), 0, 0)
        lookup.add(step(1, 0, 0.010, 0.0001), 0, 0)
    assert costs.plain(0) == lookup.plain(0) == pytest.approx(0.010)
    assert costs.of_silence(0) == pytest.approx(0.013)
    assert costs.draft.at(0, 0) == pytest.approx(0.002)


# -- acceptance ------------------------------------------------------------------------------------------------------------

verify = st.integers(1, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


look = st.booleans()


@given(st.lists(st.one_of(verify, look), min_size=1, max_size=30))
def test_rates_are_conditional_on_what_was_judged(history: list[tuple[int, int] | bool]) -> None:
    """Against weights that are written out, draft by draft: one behind the first rejection appears nowhere."""
    acceptance, streak, verifies = Acceptance(), 0, 0
    places: dict[int, list[tuple[int, bool]]] = {i: [] for i in range(6)}  # (verify, right)
    behind, first = list[bool](), {i: list[bool]() for i in range(acceptance_module.STREAKS)}
    for event in history:
        drafted, accepted = (1, int(event)) if isinstance(event, bool) else event
        judged = min(accepted + 1, drafted)
        if isinstance(event, bool):
            acceptance.foresee(event, None)
        else:
            acceptance.judge(judged, accepted, ())
            verifies += 1
        for position in range(judged):
            right = position < accepted
            if position == 0:
                first[min(streak, acceptance_module.STREAKS - 1)].append(right)
            if not isinstance(event, bool):
                places[position].append((verifies, right))
            if position > 0 or (streak and isinstance(event, bool)):
                behind.append(right)
            streak = streak + 1 if right else 0

    def faded(rights: list[bool], memory: int) -> tuple[float, float]:
        weights = [(1 - 1 / memory) ** (len(rights) - 1 - i) for i in range(len(rights))]
        return sum(weights), sum(w for w, right in zip(weights, rights, strict=True) if right)

    judged_sum, right_sum = faded(behind, acceptance_module.MEMORY)
    pooled = (right_sum + 2 * 2 / 3) / (judged_sum + 2)
    expected_rates = []
    for trials in places.values():
        weights = [(1 - 1 / acceptance_module.MEMORY) ** (verifies - number) for number, _ in trials]
        won = sum(w for w, (_, right) in zip(weights, trials, strict=True) if right)
        expected_rates.append((won + acceptance_module.POOLED * pooled) / (sum(weights) + acceptance_module.POOLED))
    place = min(streak, acceptance_module.STREAKS - 1)
    judged_sum, right_sum = faded(first[place], acceptance_module.STREAK_MEMORY[place])
    expected_rates[0] = (right_sum + 2 * (streak + 1) / (streak + 2)) / (judged_sum + 2)
    assert acceptance.rates(6) == pytest.approx(expected_rates) and acceptance.streak == streak


def test_a_claim_is_replaced_by_what_came_of_it() -> None:
    acceptance = Acceptance()
    assert acceptance.rates_of([0.9, 0.1]) == pytest.approx([0.935, 0.125])
    for _ in range(60):
        acceptance.judge(2, 1, (0.1, 0.9))  # modest and right, boastful and wrong
    right, wrong = acceptance.rates_of([0.1, 0.9])
    assert right > 0.9 and wrong < 0.1


@pytest.mark.parametrize("confidence", [math.nan, math.inf, -1.0, 1e300])
def test_a_confidence_that_is_none_counts_as_the_lowest(confidence: float) -> None:
    assert Acceptance().rates_of([confidence]) == Acceptance().rates_of([0.0])


def test_a_new_request_keeps_a_little_of_the_counts() -> None:
    acceptance = Acceptance()
    for _ in range(40):
        acceptance.judge(3, 3, ())
    fresh = acceptance.restarted()
    for _ in range(20):
        acceptance.judge(1, 0, ())
        fresh.judge(1, 0, ())
    assert fresh.rates(3)[1] < acceptance.rates(3)[1]


@given(st.lists(st.floats(0.0, 1.0), max_size=8))
def test_expected_tokens_are_the_sum_over_all_outcomes(rates: list[float]) -> None:
    for count in range(len(rates) + 1):
        outcomes = [
            accepted * math.prod(rates[:accepted]) * ((1.0 - rates[accepted]) if accepted < count else 1.0)
            for accepted in range(count + 1)
        ]
        assert expected(rates)[count] == pytest.approx(sum(outcomes), abs=1e-12)
