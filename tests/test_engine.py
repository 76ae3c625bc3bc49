"""The engine: whoever shares it, a request gives the tokens that it gives alone; nobody is lost, delayed or left waiting."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine_requests import (
    DRAFTING,
    KINDS,
    PLAIN,
    CheckedEngine,
    Wish,
    alone,
    engine,
    standing,
    text,
    tokens_of,
    write,
)
from tests.test_exact_rows import CACHES
from tsgg.engine.stream import MOST_UNREAD, Stream
from tsgg.errors import ContextFullError, TsggError, UsageError
from tsgg.model import Model
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.speculative import SpeculationOptions

SHARED = text(150, 99)
WISHES = (
    Wish(SHARED + text(30, 1), 40, 1.0, 4, narrow=True),
    Wish(SHARED + text(61, 2), 31, 1.0, 5),
    Wish(text(7, 3), 25, 0.7, 6),
    Wish(text(300, 4), 12, 0.0),
    Wish(SHARED + text(30, 1) + text(9, 5), 30, 1.0, 7, narrow=True),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", CACHES[:1] + CACHES[3:5], ids="/".join)
def test_requests_side_by_side_give_what_each_gives_alone(tmp_path: Path, kind: str, types: tuple[str, str]) -> None:
    with Model(write(tmp_path, kind), n_ctx=700, n_threads=1, cache_type_k=types[0], cache_type_v=types[1]) as model:
        expected = [alone(model, wish) for wish in WISHES]
    with engine(tmp_path, kind, 3, types) as running:
        for options in (PLAIN, DRAFTING):
            streams = [wish.submit(running, options) for wish in WISHES]
            assert [tokens_of(stream) for stream in streams] == expected
        mixed = [wish.submit(running, (DRAFTING, PLAIN)[i % 2]) for i, wish in enumerate(WISHES)]
        assert [tokens_of(stream) for stream in mixed] == expected
        assert any(stream.outcome.speculation.accepted for stream in mixed), "nothing was drafted: no test of it"


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_that_goes_a_b_a_finds_a(tmp_path: Path, kind: str) -> None:
    """With one slot: what B pushes out goes into the tree."""
    first, other = Wish(text(400, 1), 20), Wish(text(390, 2), 20)
    with engine(tmp_path, kind, 1) as running:
        answer = tokens_of(first.submit(running))
        assert other.submit(running).wait().cached_tokens == 0
        second = Wish(first.prompt + answer + text(20, 3), 20)
        stream = second.submit(running)
        found = tokens_of(stream)
        assert stream.outcome.cached_tokens == 400 + 20 - 1, "all that had rows"
    with Model(write(tmp_path, kind), n_ctx=700, n_threads=1) as model:
        assert found == alone(model, second)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_many_share_is_computed_once(tmp_path: Path, kind: str) -> None:
    """They arrive together: one reads it, the others wait and copy its rows."""
    wishes = [Wish(SHARED + text(20, seed), 5) for seed in range(4)]
    with engine(tmp_path, kind, 4) as running:
        with standing(running):
            streams = [wish.submit(running, most_unread=None) for wish in wishes]
        cached = [stream.wait().cached_tokens for stream in streams]
        assert cached == [0, len(SHARED), len(SHARED), len(SHARED)]
        found = [tokens_of(stream) for stream in streams]
    with Model(write(tmp_path, kind), n_ctx=700, n_threads=1) as model:
        assert found == [alone(model, wish) for wish in wishes]


def test_a_prompt_that_comes_again_is_computed_but_for_its_last_row(tmp_path: Path) -> None:
    wish = Wish(text(200, 1))
    with engine(tmp_path) as running:
        first = wish.submit(running)
        tokens = tokens_of(first)
        again = wish.submit(running)
        assert tokens_of(again) == tokens
        assert (first.outcome.cached_tokens, again.outcome.cached_tokens) == (0, 199)
        running.forget()
        assert wish.submit(running).wait().cached_tokens == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_warmed_text_outlives_what_would_push_it_out(tmp_path: Path, kind: str) -> None:
    with engine(tmp_path, kind, 1, cache_bytes=1 << 10) as running:
        assert running.warm(SHARED) == len(SHARED)
        for seed in range(3):
            Wish(text(300, seed)).submit(running).wait()
        wish = Wish(SHARED + text(20, 7))
        assert wish.submit(running).wait().cached_tokens == len(SHARED)
        running.cool(SHARED)
        Wish(text(300, 4)).submit(running).wait()
        assert wish.submit(running).wait().cached_tokens == 0


def test_a_cancelled_request_ends_with_what_it_has_and_its_slot_goes_to_the_next(tmp_path: Path) -> None:
    long = Wish(text(20, 1), 600)
    with engine(tmp_path, slots=1) as running:
        stream, waiting, last = (
            long.submit(running),
            Wish(text(20, 2)).submit(running),
            Wish(text(20, 3)).submit(running),
        )
        head = stream.read()
        waiting.cancel()
        assert waiting.wait().finish_reason == "cancelled"
        stream.cancel()
        stream.cancel()
        rest = tokens_of(stream)
        assert head is not None and stream.outcome.finish_reason == "cancelled"
        assert last.wait().finish_reason == "length"
        stream.cancel()  # after its end: nothing
        running.call(running.check_integrity)
        assert not running.scheduler.running and not running.scheduler.waiting
    with Model(write(tmp_path, "llama"), n_ctx=700, n_threads=1) as model:
        given = head.tokens + rest
        assert given == alone(model, long)[: len(given)]


def test_a_deadline_ends_a_request_wherever_it_is(tmp_path: Path) -> None:
    with engine(tmp_path, slots=1) as running:
        decoding = Wish(text(20, 1), 600).submit(
            running, timeout=0.2
        )  # pauses at MOST_UNREAD: only the clock can end it
        waiting = Wish(text(600, 2)).submit(running, timeout=0.0, priority=-1)
        assert [decoding.wait(20).finish_reason, waiting.wait(20).finish_reason] == ["timeout", "timeout"]


def test_a_slow_reader_delays_nobody_and_loses_nothing(tmp_path: Path) -> None:
    slow, quick = Wish(text(20, 1), 200), Wish(text(20, 2), 200)
    with engine(tmp_path, slots=2) as running:
        sleeping = slow.submit(running)
        assert len(tokens_of(quick.submit(running))) == 200
        unread = running.call(lambda: len(running.scheduler.running[0].sampler.tokens))
        assert MOST_UNREAD <= unread <= MOST_UNREAD + 6
        found = tokens_of(sleeping)
    with Model(write(tmp_path, "llama"), n_ctx=700, n_threads=1) as model:
        assert found == alone(model, slow)


@pytest.mark.parametrize("kind", KINDS)
def test_an_urgent_request_takes_a_slot_and_the_other_loses_nothing(tmp_path: Path, kind: str) -> None:
    patient, urgent = Wish(text(100, 1), 60, 1.0, 3), Wish(text(120, 2), 10)
    with engine(tmp_path, kind, 1) as running:
        stream = patient.submit(running, DRAFTING)
        head = stream.read()
        assert len(tokens_of(urgent.submit(running, priority=1))) == 10
        assert head is not None and not stream.ended, "it waits for its reader, and gave its slot up meanwhile"
        found = head.tokens + tokens_of(stream)
    with Model(write(tmp_path, kind), n_ctx=700, n_threads=1) as model:
        assert found == alone(model, patient)


def test_a_sampler_that_raises_ends_its_own_request_alone(tmp_path: Path) -> None:
    class Broken(RowSampler):
        def sample(self, logits: object, position: int) -> int:
            if len(self.tokens) == fails_at:
                raise ZeroDivisionError("no such draw")
            return super().sample(logits, position)  # type: ignore[arg-type]

    with engine(tmp_path, slots=3) as running:
        for fails_at in (0, 1, 4):
            fine = [Wish(text(40, seed), 15).submit(running, DRAFTING) for seed in range(2)]
            sampler = Broken(SamplingParams(max_tokens=15, temperature=0.0), running.model.vocab_size)
            bad = running.submit(text(40, 5), sampler, DRAFTING)
            with pytest.raises(ZeroDivisionError):
                tokens_of(bad)
            assert isinstance(bad.error, ZeroDivisionError) and len(sampler.tokens) == fails_at
            assert [stream.wait().finish_reason for stream in fine] == ["length", "length"]
        running.call(running.check_integrity)


@pytest.mark.parametrize("options", [PLAIN, DRAFTING], ids=["plain", "drafting"])
def test_all_tokens_before_a_logits_processors_error_reach_the_reader(
    tmp_path: Path, options: SpeculationOptions
) -> None:
    wish = Wish(text(40, 1), 30, 0.0, narrow=True)

    def submit(running: CheckedEngine, good: int) -> Stream:
        calls = itertools.count()

        def processor(ids: object, logits: np.ndarray) -> np.ndarray:
            if next(calls) == good:
                raise ZeroDivisionError("no such row")
            return logits

        params = replace(wish.sampler(running.model).params, logits_processors=(processor,))
        return running.submit(wish.prompt, RowSampler(params, running.model.vocab_size), options)

    with engine(tmp_path) as running:
        whole = list(submit(running, wish.tokens))
        expected = tuple(token for event in whole for token in event.tokens)
        assert (max(len(event.tokens) for event in whole) > 2) == (options is DRAFTING), "no draft is accepted: no test"
        for good in range(wish.tokens):
            stream, found = submit(running, good), ()
            with pytest.raises(TsggError, match="no such row"):
                for event in stream:
                    found += event.tokens
                    assert event.finished is None
            assert found == expected[:good]
        running.call(running.check_integrity)
    with Model(write(tmp_path, "llama"), n_ctx=700, n_threads=1) as model:
        assert expected == alone(model, wish)


def test_a_forward_that_memory_is_refused_for_ends_the_request_at_fault_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, slots=2) as running:
        forward = running.model.forward

        def refuse(batch: object) -> object:
            if len(batch.tokens[0]) > 40:  # type: ignore[attr-defined]
                raise TsggError("the device refused the allocation")
            return forward(batch)  # type: ignore[arg-type]

        monkeypatch.setattr(running.model, "forward", refuse)
        large, small = Wish(text(300, 1)).submit(running), Wish(text(30, 2)).submit(running)
        assert small.wait().finish_reason == "length"
        with pytest.raises(TsggError, match="refused the allocation"):
            large.wait()
        monkeypatch.undo()
        assert Wish(text(300, 1)).submit(running).wait().finish_reason == "length"


def test_a_step_that_breaks_ends_its_requests_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, slots=2) as running:
        monkeypatch.setattr(running.scheduler, "turn", lambda now: 1 / 0)
        with pytest.raises(TsggError, match="ZeroDivisionError"):
            Wish(text(30, 1)).submit(running).wait(20)
        monkeypatch.undo()
        assert Wish(text(30, 1)).submit(running).wait().finish_reason == "length"


def test_the_context_ends_a_request(tmp_path: Path) -> None:
    with engine(tmp_path, n_ctx=256) as running:
        sampler = RowSampler(SamplingParams(max_tokens=None, temperature=0.0), running.model.vocab_size)
        stream = running.submit(text(250, 1), sampler, DRAFTING)
        assert len(tokens_of(stream)) == 7
        assert stream.outcome.finish_reason == "context"


@pytest.mark.parametrize(
    "prompt, error", [((), UsageError), ((1, -1), UsageError), ((10**6,), UsageError), (text(701, 1), ContextFullError)]
)
def test_a_prompt_that_cannot_run_is_refused_at_the_door(
    tmp_path: Path, prompt: tuple[int, ...], error: type[Exception]
) -> None:
    with engine(tmp_path, n_ctx=700) as running, pytest.raises(error):
        running.submit(prompt, Wish((1,)).sampler(running.model))


def test_options_that_cannot_be_had_are_refused_at_the_door(tmp_path: Path) -> None:
    missing = SpeculationOptions(enabled=True, type="draft-head", draft_model=str(tmp_path / "none.gguf"))
    with engine(tmp_path) as running:
        with pytest.raises(TsggError, match=r"none\.gguf"):
            Wish(text(5, 1)).submit(running, missing)
        assert Wish(text(5, 1)).submit(running).wait().finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_another_drafter_takes_over_between_two_steps(tmp_path: Path, kind: str) -> None:
    wish = Wish(text(200, 1), 60, 1.0, narrow=True)
    with engine(tmp_path, kind) as running:
        stream = wish.submit(running)
        head = stream.read()
        assert "ngram" in running.update_speculation(DRAFTING)
        found = (head.tokens if head else ()) + tokens_of(stream)
        counted = stream.outcome.speculation
        assert counted.drafted > 0 and counted.steps >= 60 / 6
        assert Wish(text(200, 1), 30).submit(running).wait().speculation.dropped is None
    with Model(write(tmp_path, kind), n_ctx=700, n_threads=1) as model:
        assert found == alone(model, wish)


# -- life ----------------------------------------------------------------------------------------------------------------


def test_closing_ends_every_stream_with_an_error_and_frees_the_model(tmp_path: Path) -> None:
    running = engine(tmp_path, slots=1)
    streams = [Wish(text(20, seed), 600).submit(running, most_unread=None) for seed in range(3)]
    running.close()
    running.close()
    for stream in streams:
        with pytest.raises(TsggError, match="closed"):
            stream.wait(20)
    for use in (lambda: Wish((1,)).submit(running), running.forget):
        with pytest.raises(TsggError, match="closed"):
            use()
    assert running.model.memory.closed


def test_a_close_just_before_an_idle_engine_falls_asleep_is_not_missed(tmp_path: Path) -> None:
    """As after the last answer: its reader closes while the engine looks whether there is more to do."""

    class Wake(threading.Event):
        def clear(self) -> None:
            running._closing = True  # what `close` does on another thread, at the worst moment
            self.set()
            super().clear()

    running = engine(tmp_path)
    before, running._wake = running._wake, Wake()
    before.set()
    running._thread.join(20)
    assert not running._thread.is_alive() and running.model.memory.closed


def test_a_request_whose_outcome_cannot_be_told_leaves_no_reader_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path) as running:
        monkeypatch.setattr("tsgg.engine.engine.Request.outcome", lambda *_: 1 / 0)
        with pytest.raises(TsggError, match="ZeroDivisionError"):
            Wish(text(5, 1)).submit(running).wait(20)
        monkeypatch.undo()
        assert Wish(text(5, 1)).submit(running).wait(20).finish_reason == "length"


def test_a_call_from_the_engines_own_thread_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path) as running, pytest.raises(UsageError, match="own thread"):
        running.call(running.forget)


EXIT = """
import sys
from pathlib import Path
from tests.engine_requests import Wish, engine, text
running = engine(Path(sys.argv[1]), slots=2)
streams = [Wish(text(300, seed), 300).submit(running, most_unread=None) for seed in range(4)]
streams[0].read()
print("leaving")
"""


def test_the_interpreter_can_end_while_requests_run(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    run = subprocess.run([sys.executable, "-c", EXIT, tmp_path], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "leaving\n", "")
