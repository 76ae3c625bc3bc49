"""The cost governor's report, whatever it is told, in the loop, on simulated machines, and with many requests side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import simulation
from tests.scripted import ScriptedDrafter, ScriptedTrunk, mixed, plain_stream, right, wrong
from tests.scripted_loop import LIMIT, PROMPT, begin, finish, options
from tests.test_governor import PLAIN, Play, all_of, none_of, steep
from tsgg.speculative import CostGovernor, Draft, DraftContext, SpeculativeExecution, StepSample, WindowContext
from tsgg.speculative.governor import LOOKING, MOST_KINDS, MOST_REQUESTS
from tsgg.speculative.journal import RUNS

# -- the report ----------------------------------------------------------------------------------------------------------------


def test_the_report_tells_costs_windows_and_gains() -> None:
    play = Play(steep(0.1))
    steps = play.tokens(400, all_of)
    report = play.governor.report()
    assert sum(count for _, count in report.windows) == len(steps) == report.plain_steps + report.asked_steps
    assert report.windows[:4] == ((0, 2), (1, 2), (2, 1), (3, 1))
    assert report.plain_ms == pytest.approx(1e3 * PLAIN)
    assert dict(report.forward_ms)[9] == pytest.approx(1e3 * steep(0.1)(9))
    asked = [step for i, step in enumerate(steps) if step[1] or i == 2]  # the third step looks
    assert report.speculative_ms == pytest.approx(
        1e3 * sum(seconds for *_, seconds in asked) / sum(accepted + 1 for _, _, accepted, _ in asked)
    )
    assert report.expected_gain == pytest.approx(report.realised_gain, rel=0.1)
    assert report.realised_gain > 4 and report.idle == ""


def test_the_report_says_why_nothing_is_drafted() -> None:
    play = Play(steep(0.9))
    assert play.governor.report().idle
    play.tokens(100, none_of)
    report = play.governor.report()
    assert report.idle == LOOKING and report.looks == report.asked_steps > 90 and report.verifies == 0


# -- whatever is reported ----------------------------------------------------------------------------------------------------

times = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, -1.0, 0.01, 1e300]))
count = st.integers(-3, 70)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 64), count, count, times, times, st.integers(0, 200), st.integers(1, 20), st.booleans()
        ),
        max_size=80,
    ),
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=70),
)
def test_whatever_is_reported_the_window_stays_in_range_and_the_state_bounded(
    steps: list[tuple[int, int, int, float, float, int, int, bool]], sure: list[float]
) -> None:
    governor = CostGovernor()
    for number, (ceiling, drafted, accepted, forward, draft, key, sequences, stop) in enumerate(steps):
        context = WindowContext(key, ceiling, number, sequences)
        window = governor.choose(context)
        assert 0 <= window <= ceiling
        kept = governor.keep(context, Draft((0,) * len(sure), tuple(sure)))
        assert 0 <= kept <= len(sure)
        governor.record(
            StepSample(key, window, drafted, accepted, accepted + 1, 0, "", stop, number, sequences, draft, forward)
        )
    report = governor.report()
    assert len(governor._texts) <= MOST_REQUESTS and len(governor._costs) <= MOST_KINDS
    assert len(report.windows) <= RUNS and len(report.acceptance) <= 64 and len(report.forward_ms) <= 65
    assert math.isfinite(report.purse) and math.isfinite(report.plain_ms) and math.isfinite(report.realised_gain)


# -- in the loop and in the simulator ------------------------------------------------------------------------------------------


class Sure(ScriptedDrafter):
    """Says how sure it is: of everything, whatever it guesses."""

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        return [dataclasses.replace(d, confidences=(0.9,) * len(d.tokens)) for d in super().propose(contexts)]


@pytest.mark.parametrize("guess", [right, wrong, mixed])
@pytest.mark.parametrize("drafter", [ScriptedDrafter, Sure])
def test_the_stream_is_the_plain_one_whatever_it_chooses(guess: Callable[..., list[int]], drafter: type) -> None:
    trunk = ScriptedTrunk()

    def clock() -> float:  # a forward takes as long as the rows that it had, and nothing else takes any time
        return sum(0.001 * (1 + 0.2 * forward[1]) for forward in trunk.forwards)

    governor = CostGovernor()
    execution = SpeculativeExecution(trunk, drafter(guess), options(8), governor, clock)
    request, _, sampler = begin(execution, PROMPT, LIMIT)
    steps = finish(execution, request)
    assert sampler.tokens == plain_stream(PROMPT, LIMIT)
    report, samples = governor.report(), [step.sample for step in steps if step.sample is not None]
    assert sum(n for _, n in report.windows) == len(samples)
    assert report.verifies == sum(sample.drafted > 0 for sample in samples)
    assert report.verifies > 0 or guess is wrong


@pytest.mark.parametrize("machine", list(simulation.MACHINES))
@pytest.mark.parametrize("kind", list(simulation.TEXTS))
def test_regret_against_the_best_fixed_window_is_small(machine: str, kind: str) -> None:
    """Fewer texts than the benchmark has (`python -m benchmarks regret --simulate`)."""
    row = simulation.regret(simulation.MACHINES[machine], kind, "blind", seeds=10)
    assert row["regret"] < 0.04 and row["regret_first"] < 0.08
    assert row["governor_over_plain"] > 0.985


@pytest.mark.parametrize("machine", list(simulation.MACHINES))
def test_a_text_that_turns_costs_few_plain_steps_on_every_machine(machine: str) -> None:
    assert simulation.loss_of_a_change(simulation.MACHINES[machine], seeds=10) <= 3.6


# -- side by side ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 33, 256])
def test_a_hopeless_drafter_costs_little_however_many_sequences_there_are(count: int) -> None:
    """All of a step choose, then all draft, then all are recorded: none may be forgotten between."""
    governor, lengths = CostGovernor(), [10] * count
    verified = 0
    for _ in range(40):
        asked, drafted = [], []
        for key in range(count):
            asked.append(governor.choose(WindowContext(key, 8, lengths[key], count)))
        for key, window in enumerate(asked):
            context = WindowContext(key, max(window, 1), lengths[key], count)
            drafted.append(governor.keep(context, Draft((0,) * window)) if window else 0)
        for key, (window, rows) in enumerate(zip(asked, drafted, strict=True)):
            governor.record(
                StepSample(
                    key=key, window=window, drafted=rows, accepted=0, emitted=1, discarded=0, silence="", finished=False,
                    length=lengths[key], sequences=count, draft_seconds=0.0, forward_seconds=steep(0.3)(rows + 1),
                    foreseen=False if window and not rows else None,
                )
            )  # fmt: skip
            lengths[key] += 1
            verified += rows > 0
    assert verified <= 2 * count


def test_drafts_of_unequal_length_are_priced_where_they_are_looked_up() -> None:
    """A step's sequences verify in several forwards; policy and sample name the step by the same number."""
    trunk, governor = ScriptedTrunk(), CostGovernor()
    execution = SpeculativeExecution(
        trunk, ScriptedDrafter(mixed), options(8), governor, lambda: float(len(trunk.forwards))
    )
    requests = [begin(execution, PROMPT[: 5 + i], LIMIT, slot=i)[0] for i in range(3)]
    groups = set()
    while unfinished := [request for request in requests if request.finished is None]:
        steps = list(execution.step(unfinished))
        groups.add(len({step.sample.drafted for step in steps if step.sample}))
        assert {step.sample.sequences for step in steps if step.sample} == {len(unfinished)}
    assert max(groups) > 1, "some steps had drafts of different lengths"
    assert len(governor._costs) <= 3
