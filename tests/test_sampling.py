"""Drawing one token: filters against a float64 reference with full sorts, draws against their probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsgg.errors import TsggError
from tsgg.sampling import RowSampler, SamplingParams, uniform
from tsgg.sampling.chain import draw, greatest, locate, ranked_top, survivors

# --- the reference: float64, full stable sorts, one filter after the other -----------------------------------------


def reference_survivors(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    ranked = np.argsort(-logits.astype(np.float64), kind="stable")
    if top_k:
        ranked = ranked[:top_k]
    values = logits[ranked].astype(np.float64)
    probabilities = np.exp(values - values[0])
    probabilities /= probabilities.sum()
    if top_p < 1:
        count = int(np.sum(np.cumsum(probabilities) < top_p)) + 1
        ranked, probabilities = ranked[:count], probabilities[:count]
    if min_p > 0:
        ranked = ranked[probabilities >= min_p * probabilities[0]]
    return sorted(int(token) for token in ranked)


def reference_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    kept = reference_survivors(logits, params.top_k, params.top_p, params.min_p)
    scaled = np.full(logits.size, -np.inf)
    scaled[kept] = logits[kept].astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    probabilities: np.ndarray = weights / weights.sum()
    return probabilities


def rows(seed: int, size: int) -> dict[str, np.ndarray]:
    """Rows of every shape that chooses another path: peaked, wide, nearly flat, and full of ties."""
    generator = np.random.default_rng(seed)
    peaked = generator.standard_normal(size) * 2 - 5
    peaked[generator.choice(size, 50, replace=False)] += np.linspace(20, 8, 50)
    return {
        "peaked": peaked.astype(np.float32),
        "wide": (generator.standard_normal(size) * 3).astype(np.float32),
        "flat": (generator.standard_normal(size) * 0.3).astype(np.float32),
        "tied": generator.integers(-3, 3, size).astype(np.float32),
        "masked": np.where(generator.random(size) < 0.99, -np.inf, generator.standard_normal(size)).astype(np.float32),
    }


FILTERS = [
    (40, 1.0, 0.0),
    (1, 1.0, 0.0),
    (3000, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.37, 0.0),
    (0, 0.995, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (40, 0.95, 0.05),
    (200, 0.6, 0.001),
    (0, 0.8, 0.2),
    (0, 0.0, 0.0),
]


@pytest.mark.parametrize("size", [400, 5000, 40000])
@pytest.mark.parametrize("filters", FILTERS)
def test_the_filters_leave_what_a_full_sort_in_float64_leaves(size: int, filters: tuple[int, float, float]) -> None:
    top_k, top_p, min_p = filters
    for name, logits in rows(7, size).items():
        expected = reference_survivors(logits, top_k, top_p, min_p)
        got = survivors(logits, float(logits.max()), top_k, top_p, min_p)
        if got is None:  # every token
            got = np.arange(size)
        finite = [token for token in expected if logits[token] > -np.inf]
        # float32 sums may put the border of top_p one token to either side; ties there go by id in both.
        differing = {token for token in got.tolist() if logits[token] > -np.inf} ^ set(finite)
        assert len(differing) <= (1 if 0 < top_p < 1 and size > 400 else 0), name
        assert got.tolist() == sorted(got.tolist()), name


def test_no_filter_leaves_every_token() -> None:
    assert survivors(np.zeros(10, np.float32), 0.0, 0, 1.0, 0.0) is None
    assert survivors(np.zeros(10, np.float32), 0.0, 10, 1.0, 0.0) is None


def test_ties_at_the_border_keep_the_lowest_ids() -> None:
    logits = np.array([1, 5, 3, 3, 3, 0], np.float32)
    assert ranked_top(logits, 3).tolist() == [1, 2, 3]
    wide = np.zeros(50_000, np.float32)
    wide[49_999] = 1
    assert ranked_top(wide, 4).tolist() == [49_999, 0, 1, 2]
    assert survivors(wide, 1.0, 3, 1.0, 0.0).tolist() == [0, 1, 49_999]  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 1500), st.integers(17_000, 60_000), st.integers(2, 5000))
def test_the_top_of_a_wide_row_is_that_of_a_stable_sort(seed: int, count: int, size: int, levels: int) -> None:
    logits = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
    assert ranked_top(logits, count).tolist() == np.argsort(-logits, kind="stable")[:count].tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_the_draw_inverts_the_distribution_function(seed: int, size: int, fraction: float) -> None:
    weights = np.random.default_rng(seed).random(size).astype(np.float32)
    weights[np.random.default_rng(seed + 1).random(size) < 0.5] = 0
    weights[size // 2] = 1
    index = locate(weights, fraction)
    exact = np.cumsum(weights, dtype=np.float64)
    goal = fraction * exact[-1]
    slack = 1e-5 * exact[-1]
    assert weights[index] > 0
    assert exact[index] >= goal - slack
    assert exact[index] - weights[index] <= goal + slack


def test_the_greatest_fraction_never_draws_a_token_of_no_weight() -> None:
    for size in (3, 5000):
        weights = np.zeros(size, np.float32)
        weights[1] = 1e-30
        for fraction in (0.0, 0.5, 1 - 2**-53):
            assert locate(weights, fraction) == 1


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The statistic minus its mean, in its standard deviations; cells of small expectation are pooled."""
    small = expected < 8
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    used = expected > 0
    assert counts[~used].sum() == 0  # a token of probability zero was drawn
    freedom = max(1, int(used.sum()) - 1)
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "keywords",
    [
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.5, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    ],
)
def test_draws_follow_the_reference_distribution(keywords: dict[str, Any]) -> None:
    logits = (np.random.default_rng(5).standard_normal(200) * 2).astype(np.float32)
    params = SamplingParams(seed=11, **keywords)
    sampler = RowSampler(params, 200)
    n = 6000
    counts = np.bincount([sampler.sample(logits, position) for position in range(n)], minlength=200)
    assert abs(chi_square(counts, n * reference_probabilities(logits, params))) < 4


def test_draws_over_a_large_vocabulary_follow_the_softmax() -> None:
    logits = (np.random.default_rng(6).standard_normal(20_000) * 2).astype(np.float32)
    weights = np.exp(logits.astype(np.float64))
    shares = np.add.reduceat(weights / weights.sum(), np.arange(0, 20_000, 200))
    drawn = [draw(logits, 1.0, 0, 1.0, 0.0, uniform(3, 0, position)) for position in range(8000)]
    assert abs(chi_square(np.bincount(np.array(drawn) // 200, minlength=100), 8000 * shares)) < 4


def test_a_filter_that_removes_nothing_changes_no_draw() -> None:
    logits = (np.random.default_rng(8).standard_normal(3000) * 2).astype(np.float32)
    plain = [draw(logits, 0.9, 0, 1.0, 0.0, uniform(1, 0, position)) for position in range(50)]
    for filters in ((2999, 1.0, 0.0), (0, 1 - 1e-9, 0.0), (0, 1.0, 1e-30)):
        drawn = [draw(logits, 0.9, *filters, uniform(1, 0, position)) for position in range(50)]
        assert drawn == plain


# --- the random number ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_numbers_are_uniform_and_uncorrelated_along_every_argument(axis: int) -> None:
    arguments = [9, 2, 100]
    numbers = []
    for step in range(20_000):
        arguments[axis] = step
        numbers.append(uniform(*arguments))
    values = np.array(numbers)
    assert values.min() >= 0 and values.max() < 1
    assert abs(chi_square(np.bincount((values * 256).astype(int), minlength=256), np.full(256, 20_000 / 256))) < 4
    pairs = (values[:-1] * 16).astype(int) * 16 + (values[1:] * 16).astype(int)
    assert abs(chi_square(np.bincount(pairs, minlength=256), np.full(256, 19_999 / 256))) < 4
    low_bits = ((values * 2**53).astype(np.int64) & 255).astype(int)
    assert abs(chi_square(np.bincount(low_bits, minlength=256), np.full(256, 20_000 / 256))) < 4


def test_uniform_is_a_splitmix_stream_along_positions() -> None:
    """SplitMix64 from state 1234567, published first outputs (they pin the constants of the finalizer)."""
    from tsgg.sampling.uniform import _GOLDEN, _mix

    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [_mix(1234567 + (step + 1) * _GOLDEN) for step in range(3)] == published


def test_the_same_request_draws_the_same_tokens_and_another_seed_or_sample_does_not() -> None:
    logits = np.random.default_rng(1).standard_normal((30, 500)).astype(np.float32)

    def stream(seed: int, sample: int) -> list[int]:
        sampler = RowSampler(SamplingParams(seed=seed, temperature=1.5), 500, sample_index=sample)
        return [sampler.sample(row, 10 + place) for place, row in enumerate(logits)]

    assert stream(1, 0) == stream(1, 0)
    assert len({tuple(stream(seed, sample)) for seed in (1, 2) for sample in (0, 1)}) == 4


def test_a_draw_does_not_depend_on_how_many_draws_came_before() -> None:
    logits = np.random.default_rng(1).standard_normal((20, 500)).astype(np.float32)
    sampler = RowSampler(SamplingParams(seed=4, top_k=0), 500)
    forward = [sampler.sample(logits[place], place) for place in range(20)]
    for place in (19, 3, 11):  # a sampler that starts in the middle, as after a restart
        assert RowSampler(SamplingParams(seed=4, top_k=0), 500).sample(logits[place], place) == forward[place]


def test_a_request_without_a_seed_reports_the_one_it_got() -> None:
    logits = np.random.default_rng(1).standard_normal((20, 500)).astype(np.float32)
    first = RowSampler(SamplingParams(), 500)
    tokens = [first.sample(row, place) for place, row in enumerate(logits)]
    again = RowSampler(SamplingParams(seed=first.seed), 500)
    assert [again.sample(row, place) for place, row in enumerate(logits)] == tokens


# --- greedy -----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_first_maximum() -> None:
    sampler = RowSampler(SamplingParams(temperature=0), 5)
    assert sampler.sample(np.array([0, 2, 1, 2, 2], np.float32), 0) == 1
    assert not sampler.needs_logits


def test_the_row_is_only_read() -> None:
    logits = np.random.default_rng(2).standard_normal(300).astype(np.float32)
    logits.flags.writeable = False  # writing would raise
    before = logits.copy()
    params = SamplingParams(logit_bias={3: 5.0}, repetition_penalty=1.3, logprobs=4, top_p=0.9)
    sampler = RowSampler(params, 300, prompt=[1, 2, 3])
    for position in range(5):
        sampler.sample(logits, position)
    assert np.array_equal(before, logits)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_nothing_to_draw_from_is_an_error_not_a_token(bad: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[4] = bad
    with pytest.raises(TsggError, match="token 4"):
        greatest(logits)
    with pytest.raises(TsggError, match="forbids every token"):
        RowSampler(SamplingParams(), 3).sample(np.full(3, -np.inf, np.float32), 0)
    with pytest.raises(TsggError, match=r"\(3,\)"):
        RowSampler(SamplingParams(), 3).sample(np.zeros(4, np.float32), 0)
