"""Any order of arrivals, steps, cancels, faults and changes of options: every stream is that of its request alone.

Requests begin like others, or go on from an earlier answer, so that slots are taken over, copied, saved and brought back. After
every step the engine looks at itself; in the end memory holds what a fresh model computes, and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.engine_cases import Bench, Case
from tests.engine_requests import KINDS, Wish, text
from tests.stepped_engine import SteppedEngine
from tests.test_exact_rows import CACHES
from tsgg.engine import Stream
from tsgg.errors import TsggError
from tsgg.sampling import RowSampler
from tsgg.speculative import SpeculationOptions

CASES = (
    *(Case("llama", types, 1 + i % 3) for i, types in enumerate(CACHES)),
    *(Case(kind, ("f16", "f16"), slots) for kind in KINDS[1:] for slots in (1, 3)),
    *(Case(kind, ("q8_0", "f16")) for kind in KINDS[1:]),
    *(Case(kind) for kind in ("experts", "nextn", "assistant")),
)
MOST = 40  # tokens of an answer
LONGEST = 260  # tokens that a prompt begins with, where no window asks for more
BEGINNINGS = (text(150, 99), text(150, 99)[:70] + text(190, 98), text(790, 97))
TAILS = tuple(text(length, seed) for seed, length in enumerate((1, 5, 23, 80)))
STYLES = ((0.0, 0, False), (1.0, 3, True), (0.8, 7, False))  # temperature, seed, narrow
ENDS = {"cancelled", "timeout"}


@dataclass(frozen=True)
class Arrival:
    """A request before its prompt is known: numbers choose among what the case has."""

    begin: int = 0
    tail: tuple[int, ...] = TAILS[2]
    style: tuple[float, int, bool] = STYLES[0]
    tokens: int = MOST
    options: int = -1  # follows the default
    priority: int = 0
    slow: bool = False
    trouble: str = ""


ARRIVALS = st.builds(
    Arrival,
    begin=st.integers(0, 8),
    tail=st.sampled_from(TAILS),
    style=st.sampled_from(STYLES),
    tokens=st.sampled_from((1, 2, 13, MOST, MOST)),
    options=st.integers(-1, 9),
    priority=st.sampled_from((0, 0, 0, 1)),
    slow=st.booleans(),
    trouble=st.sampled_from((*[""] * 8, "timeout", "timeout", "fails at 0", "fails at 3")),
)


@dataclass(eq=False)
class Reader:
    """Who reads one stream: at once, or when his rule says so."""

    wish: Wish
    stream: Stream
    slow: bool
    fails_at: int | None = None
    expected_ends: set[str] = field(default_factory=set)
    got: list[int] = field(default_factory=list)

    def read(self, events: int = 1000) -> None:
        while events and (event := self.stream.poll()) is not None:
            self.got += event.tokens
            events -= 1


class BrokenSampler(RowSampler):
    """Raises instead of drawing the token with this index."""

    fails_at = 0

    def sample(self, logits: object, position: int) -> int:
        if len(self.tokens) == self.fails_at:
            raise ZeroDivisionError("no such draw")
        return super().sample(logits, position)  # type: ignore[arg-type]


class EngineMachine(RuleBasedStateMachine):
    bench: Bench  # of the subclass

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Reader] = []
        self.done: list[Reader] = []
        self.warming: dict[Stream, tuple[int, ...]] = {}
        self.pinned: set[tuple[int, ...]] = set()
        self.refused = 0  # forwards that were refused memory, each of which may cost one request
        beginnings = [base if self.bench.case.n_ctx > len(base) else base[:LONGEST] for base in BEGINNINGS]
        self.beginnings = [base[:cut] for base in beginnings for cut in (0, 35, len(base))]

    @initialize(budget=st.sampled_from((0, 60_000, 400_000, 64 << 20)), default=st.integers(0, 9))
    def begin(self, budget: int, default: int) -> None:
        self.engine = SteppedEngine(self.bench.model, self._options(default), budget)
        self.budget, self.saved = budget, False

    # -- what the world does -----------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=4))
    def requests_arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            wish = Wish(self.beginnings[arrival.begin] + arrival.tail, arrival.tokens, *arrival.style)
            self._submit(wish, arrival)

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=2), keep=st.sampled_from((1, 10, MOST)))
    def chats_go_on(self, arrivals: list[Arrival], keep: int) -> None:
        """From an earlier answer, or from a part of it."""
        for arrival in arrivals[: len(self.done)]:
            earlier = self.done[-1 - arrival.begin % len(self.done)]
            prompt = earlier.wish.prompt + tuple(earlier.got[:keep]) + arrival.tail
            self._submit(Wish(prompt[: self.bench.case.n_ctx], arrival.tokens, *arrival.style), arrival)

    @rule(which=st.integers(0, 99))
    def a_request_is_cancelled(self, which: int) -> None:
        if self.readers:
            reader = self.readers[which % len(self.readers)]
            reader.expected_ends.add("cancelled")
            reader.stream.cancel()

    @rule(which=st.integers(0, 99), events=st.integers(1, 5))
    def a_slow_reader_reads(self, which: int, events: int) -> None:
        slow = [reader for reader in self.readers if reader.slow]
        if slow:
            slow[which % len(slow)].read(events)

    @rule(count=st.sampled_from((1, 2, 5, 20, 60)))
    def steps_are_made(self, count: int) -> None:
        for _ in range(count):
            if not self._step():
                return

    @rule(seconds=st.sampled_from((0.1, 5.0)))
    def time_passes(self, seconds: float) -> None:
        self.engine.clock.now += seconds

    @rule(options=st.integers(0, 9))
    def the_default_changes(self, options: int) -> None:
        self.engine.update_speculation(self._options(options))

    @rule(begin=st.integers(0, 8))
    def a_beginning_is_warmed(self, begin: int) -> None:
        """What `warm` does; where others come in between it need not succeed."""
        if beginning := self.beginnings[begin]:
            reader = self._submit(Wish(beginning, 1, 0.0), Arrival(options=0))
            self.warming[reader.stream] = beginning

    @rule(begin=st.integers(0, 8))
    def a_beginning_is_cooled(self, begin: int) -> None:
        self.engine.cool(self.beginnings[begin])
        self.pinned.discard(self.beginnings[begin])

    @rule()
    def all_is_forgotten(self) -> None:
        self.engine.forget()
        self.pinned.clear()

    @rule()
    def what_memory_holds_is_saved(self) -> None:
        self.engine.save(self.bench.saved)
        self.saved = True

    @rule(anew=st.booleans())
    def what_was_saved_comes_back(self, anew: bool) -> None:
        """Into the tree as it is now, or in another process: all that run end, and nothing is pinned."""
        if not self.saved:
            return
        if anew:
            options = self.engine.options
            self.engine.close()
            for reader in self.readers:
                reader.read()
                assert reader.stream.ended and self._begins(reader)
            self.readers.clear()
            self.warming.clear()
            self.pinned.clear()
            self.engine = SteppedEngine(self.engine.model, options, self.budget)
        self.engine.restore(self.bench.saved)
        self.engine.check_integrity()

    @rule()
    def another_engine_goes_on(self) -> None:
        """Over the same file loaded again, with all that the last one held once nobody waited for it."""
        self._wait_for_all()
        last, bench = self.engine, self.bench
        saved = last.save(bench.saved)
        self.saved = True
        last.close()
        self.pinned.clear()
        other = bench.second if last.model is bench.model else bench.model
        self.engine = SteppedEngine(other, last.options, self.budget)
        restored = self.engine.restore(bench.saved)
        if last.cache.tree.nbytes <= self.budget:  # what was pinned may be more
            assert restored == saved == len(self.engine.cache.tree)
        self.engine.check_integrity()

    @rule(after=st.integers(0, 40))
    def a_forward_is_interrupted(self, after: int) -> None:
        self.engine.model._interrupt.request(after)
        self._step()
        self.engine.model.clear_interrupt()

    @rule(after=st.integers(0, 2))
    def a_forward_is_refused_memory(self, after: int) -> None:
        model, counted = self.engine.model, [0]
        forward = model.forward

        def refuse(batch: object) -> object:
            counted[0] += 1
            if counted[0] == after + 1:
                self.refused += 1
                raise TsggError("the device refused the allocation")
            return forward(batch)  # type: ignore[arg-type]

        model.forward = refuse  # type: ignore[method-assign, assignment]
        try:
            self._step()
        finally:
            del model.forward

    # -- what must hold ----------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        try:
            self._wait_for_all()
            assert not engine._requests and not engine.scheduler.running and not engine.scheduler.waiting
            assert len(engine.cache.idle) == self.bench.case.slots
            longest = max(engine.cache.idle, key=lambda sequence: sequence.length)
            assert not self.bench.differences(engine.model, longest)
            for beginning in list(self.pinned):
                engine.cool(beginning)
            assert engine.cache.tree.nbytes <= self.budget
            engine.forget()
            assert engine.cache.tree.nbytes == len(engine.cache.tree) == 0
        finally:
            engine.close()

    def _wait_for_all(self) -> None:
        for _ in range(10_000):
            for reader in self.readers:
                reader.slow = False
            if not self._step() and not self.readers:
                break
        assert not self.readers, "somebody waits for ever"

    def _step(self) -> bool:
        busy = self.engine.turn_once()
        for reader in list(self.readers):
            if not reader.slow:
                reader.read()
            self._check(reader)
        for beginning in self.pinned:
            found = self.engine.cache.tree.match(list(beginning), len(beginning))
            assert found.resumable == len(beginning), "a warmed text is there until it is cooled"
        return busy

    def _check(self, reader: Reader) -> None:
        stream, expected = reader.stream, self.bench.expected(reader.wish, MOST)
        assert self._begins(reader)
        if not stream.ended:
            return
        reader.read()
        got = tuple(reader.got)
        self.readers.remove(reader)
        if isinstance(stream.error, ZeroDivisionError):
            assert len(got) <= reader.fails_at, "those of the verify that failed are lost"
        elif stream.error is not None:
            assert "refused the allocation" in str(stream.error)
            self.refused -= 1
            assert self.refused >= 0
        elif (reason := stream.outcome.finish_reason) in ENDS:
            assert reason in reader.expected_ends
        else:
            full = len(expected) < reader.wish.tokens
            assert (reason, len(got)) == ("context" if full else "length", len(expected))
        assert self._begins(reader)
        if got:
            self.done.append(reader)
        if stream in self.warming:
            self._pin(self.warming.pop(stream))

    def _begins(self, reader: Reader) -> bool:
        """Whether what was read so far is the beginning of what the request gives alone."""
        return tuple(reader.got) == self.bench.expected(reader.wish, MOST)[: len(reader.got)]

    # -- parts -------------------------------------------------------------------------------------------------------

    def _options(self, number: int) -> SpeculationOptions | None:
        """Some of the case's, drafters twice as often as none; None for those that follow the default."""
        options = (*self.bench.options, *self.bench.options[1:])
        return None if number < 0 else options[number % len(options)]

    def _submit(self, wish: Wish, arrival: Arrival) -> Reader:
        sampler, trouble = wish.sampler(self.engine.model), arrival.trouble
        fails_at = int(trouble[-1]) if trouble.startswith("fails") else None
        if fails_at is not None:
            sampler = BrokenSampler(sampler.params, self.engine.model.vocab_size, prompt=wish.prompt)
            sampler.fails_at = fails_at
        stream = self.engine.submit(
            wish.prompt, sampler, self._options(arrival.options), priority=arrival.priority,
            timeout=1.0 if trouble == "timeout" else None, most_unread=4 if arrival.slow else None,
        )  # fmt: skip
        reader = Reader(wish, stream, arrival.slow, fails_at, {trouble})
        self.readers.append(reader)
        return reader

    def _pin(self, beginning: tuple[int, ...]) -> None:
        if self.engine.cache.pin(list(beginning)):
            self.pinned.add(beginning)


@pytest.fixture(scope="module", params=CASES, ids=str)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path_factory.mktemp("machine"))
    yield bench
    bench.close()


def test_whatever_happens_every_stream_is_that_of_its_request_alone(bench: Bench) -> None:
    machine = seed(CASES.index(bench.case))(type("Machine", (EngineMachine,), {"bench": bench}))
    every = list(HealthCheck)
    once = settings(
        max_examples=5, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=every
    )
    run_state_machine_as_test(machine, settings=once)
