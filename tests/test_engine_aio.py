"""The engine in event loops: the same tokens, and a reader who leaves, sleeps or dies with his loop harms no other request."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterable, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.engine_requests import DRAFTING, PLAIN, CheckedEngine, Wish, alone, engine, text, tokens_of, write
from tests.test_engine_machine import BrokenSampler
from tsgg.engine import MOST_UNREAD, AsyncEngine, AsyncStream, Event
from tsgg.errors import TsggError, UsageError
from tsgg.model import Model
from tsgg.speculative import SpeculationOptions

SHARED = text(150, 99)
WISHES = (
    Wish(SHARED + text(30, 1), 40, 1.0, 4, narrow=True),
    Wish(SHARED + text(61, 2), 31, 1.0, 5),
    Wish(text(7, 3), 25, 0.7, 6),
    Wish(text(300, 4), 12, 0.0),
)
LONG = Wish(text(20, 1), 120)
ENDLESS = Wish(text(20, 1), 600)  # somebody ends it


async def read(events: AsyncIterable[Event]) -> tuple[int, ...]:
    return tuple([token async for event in events for token in event.tokens])


async def submit(running: CheckedEngine, wish: Wish, **keywords: Any) -> AsyncStream:
    return await AsyncEngine(running).submit(wish.prompt, wish.sampler(running.model), **keywords)


def expected(folder: Path, *wishes: Wish) -> list[tuple[int, ...]]:
    with Model(write(folder, "llama"), n_ctx=700, n_threads=1) as model:
        return [alone(model, wish) for wish in wishes]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.001)


def none_runs(running: CheckedEngine) -> bool:
    return running.call(lambda: not running.scheduler.running and not running.scheduler.waiting)


def in_thread(main: Coroutine[Any, Any, object]) -> threading.Thread:
    thread = threading.Thread(target=lambda: asyncio.run(main))
    thread.start()
    return thread


def test_requests_side_by_side_give_what_each_gives_alone_and_have_no_threads(tmp_path: Path) -> None:
    async def main(running: CheckedEngine) -> list[tuple[int, ...]]:
        face, before = AsyncEngine(running), threading.active_count()
        tasks = [
            asyncio.create_task(read(face.generate(wish.prompt, wish.sampler(running.model), options)))
            for options in (None, DRAFTING)
            for wish in WISHES
        ]
        await asyncio.wait(tasks[:1])
        assert threading.active_count() == before
        return [await task for task in tasks]

    with engine(tmp_path) as running:
        running.call(lambda: running.planner.execution(DRAFTING))
        found = asyncio.run(main(running))
    assert found == 2 * expected(tmp_path, *WISHES)


def test_the_outcome_is_there_at_the_end_and_not_before(tmp_path: Path) -> None:
    async def main(running: CheckedEngine) -> None:
        stream = await submit(running, LONG)
        with pytest.raises(TsggError, match="not ended"):
            _ = stream.outcome
        assert len(await read(stream)) == LONG.tokens
        assert stream.ended and stream.outcome.finish_reason == "length"
        again = await submit(running, LONG, most_unread=None)
        assert (await again.wait()).cached_tokens == 19
        late = await submit(running, LONG, timeout=0.0)
        assert (await late.wait()).finish_reason == "timeout"

    with engine(tmp_path) as running:
        asyncio.run(main(running))


@pytest.mark.parametrize("way", ["break", "close", "cancelled task", "async with", "dropped"])
def test_a_reader_who_leaves_cancels_his_request(tmp_path: Path, way: str) -> None:
    async def main(running: CheckedEngine) -> None:
        face, sampler = AsyncEngine(running), ENDLESS.sampler(running.model)
        if way == "break":
            async for _ in face.generate(ENDLESS.prompt, sampler):
                break
        elif way == "close":
            async with aclosing(face.generate(ENDLESS.prompt, sampler)) as events:
                await anext(events)
        elif way == "cancelled task":
            task = asyncio.create_task(read(await face.submit(ENDLESS.prompt, sampler)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "async with":
            async with await face.submit(ENDLESS.prompt, sampler) as stream:
                await stream.read()
            assert (await stream.wait()).finish_reason == "cancelled"
        else:
            await face.submit(ENDLESS.prompt, sampler)
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.to_thread(wait_until, lambda: none_runs(running))

    with engine(tmp_path, slots=1) as running:
        asyncio.run(main(running))
        assert running.call(lambda: len(running.cache.idle)) == 1
        held = running.call(lambda: running.cache.idle[0].length)
        assert held < len(ENDLESS.prompt) + ENDLESS.tokens - 1, "it ran to its end: nothing was cancelled"


def test_what_was_given_before_a_cancel_can_still_be_read(tmp_path: Path) -> None:
    async def main(running: CheckedEngine) -> tuple[int, ...]:
        stream = await submit(running, LONG)
        first = await stream.read()
        assert first is not None
        stream.cancel()
        return first.tokens + await read(stream)

    with engine(tmp_path) as running:
        found = asyncio.run(main(running))
    assert found == expected(tmp_path, LONG)[0][: len(found)]


def test_an_error_is_raised_after_the_tokens_before_it(tmp_path: Path) -> None:
    async def main(running: CheckedEngine) -> list[int]:
        sampler = BrokenSampler(LONG.sampler(running.model).params, running.model.vocab_size, prompt=LONG.prompt)
        sampler.fails_at = 3
        got: list[int] = []
        with pytest.raises(ZeroDivisionError):
            async for event in AsyncEngine(running).generate(LONG.prompt, sampler):
                got += event.tokens
        return got

    with engine(tmp_path) as running:
        assert tuple(asyncio.run(main(running))) == expected(tmp_path, LONG)[0][:3]


def test_what_submit_refuses_is_raised_by_the_first_step(tmp_path: Path) -> None:
    async def main(running: CheckedEngine) -> None:
        face, sampler = AsyncEngine(running), LONG.sampler(running.model)
        with pytest.raises(UsageError, match="empty"):
            await anext(face.generate((), sampler))
        unknown = SpeculationOptions(enabled=True, type="draft-head", draft_model=str(tmp_path / "none.gguf"))
        with pytest.raises(TsggError, match=r"none\.gguf"):
            await anext(face.generate(LONG.prompt, sampler, unknown))
        running.close()
        with pytest.raises(TsggError, match="closed"):
            await anext(face.generate(LONG.prompt, sampler, PLAIN))

    with engine(tmp_path) as running:
        asyncio.run(main(running))


def test_a_closed_engine_wakes_who_waits_for_it(tmp_path: Path) -> None:
    async def main(running: CheckedEngine) -> None:
        stream = await submit(running, ENDLESS)
        await asyncio.to_thread(running.close)
        with pytest.raises(TsggError, match="closed"):
            await read(stream)

    with engine(tmp_path) as running:
        asyncio.run(main(running))


def test_a_slow_reader_pauses_his_request_alone(tmp_path: Path) -> None:
    quick = Wish(text(20, 2), 100)

    async def main(running: CheckedEngine) -> list[tuple[int, ...]]:
        slow = await submit(running, LONG)
        first = await slow.read()
        assert first is not None
        found = await read(await submit(running, quick))
        drawn = await asyncio.to_thread(running.call, lambda: len(running.scheduler.running[0].sampler.tokens))
        assert MOST_UNREAD <= drawn <= MOST_UNREAD + 6
        return [first.tokens + await read(slow), found]

    with engine(tmp_path) as running:
        assert asyncio.run(main(running)) == expected(tmp_path, LONG, quick)


def test_loops_of_two_threads_share_an_engine(tmp_path: Path) -> None:
    found: dict[Wish, tuple[int, ...]] = {}

    async def main(running: CheckedEngine, wishes: tuple[Wish, ...]) -> None:
        streams = [await submit(running, wish) for wish in wishes]
        found.update(zip(wishes, await asyncio.gather(*map(read, streams)), strict=True))

    with engine(tmp_path) as running:
        threads = [in_thread(main(running, WISHES[:2])), in_thread(main(running, WISHES[2:]))]
        for thread in threads:
            thread.join()
    assert [found[wish] for wish in WISHES] == expected(tmp_path, *WISHES)


@pytest.mark.parametrize("paused", [False, True])
def test_a_loop_that_was_closed_ends_its_request_and_leaves_the_engine_alive(tmp_path: Path, paused: bool) -> None:
    """Closed while tokens come, or while the queue is full and none comes any more."""
    other = Wish(text(20, 3), 5)
    with engine(tmp_path) as running:
        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(submit(running, ENDLESS, most_unread=4 if paused else None))
        loop.run_until_complete(stream.read())
        if paused:
            wait_until(lambda: running.call(lambda: running.scheduler.running[0].paused))
        loop.close()
        if paused:
            del stream  # whoever holds it may still mean to read it
        wait_until(lambda: none_runs(running))
        assert paused or stream.outcome.finish_reason == "cancelled"
        assert tokens_of(other.submit(running)) == expected(tmp_path, other)[0]
