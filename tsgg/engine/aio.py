"""The engine for asyncio: requests are read in event loops, any number of them, and no request has a thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from tsgg.engine.engine import Engine
from tsgg.engine.stream import MOST_UNREAD, Event, Outcome, Stream
from tsgg.sampling import RowSampler
from tsgg.speculative import SpeculationOptions

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncEngine:
    """A face of an engine, which stays its owner's: several faces, in several loops, are as good as one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def submit(
        self,
        prompt: Sequence[int],
        sampler: RowSampler,
        options: SpeculationOptions | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        most_unread: int | None = MOST_UNREAD,
    ) -> AsyncStream:
        """`Engine.submit`, with what it raises; the loop goes on while a drafter is loaded."""
        engine = self.engine
        if options is not None and not engine.planner.knows(options):
            await asyncio.to_thread(engine.call, lambda: engine.planner.execution(options))
        return AsyncStream(
            engine.submit(prompt, sampler, options, priority=priority, timeout=timeout, most_unread=most_unread)
        )

    async def generate(
        self,
        prompt: Sequence[int],
        sampler: RowSampler,
        options: SpeculationOptions | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        most_unread: int | None = MOST_UNREAD,
    ) -> AsyncGenerator[Event]:
        """Submits at the first step and yields what comes. Who wants to know the outcome too calls `submit`.

        Leaving the loop, closing the generator or cancelling the task cancels the request. Raises what `submit` raises, and
        after its events the error that ended the request.
        """
        stream = await self.submit(
            prompt, sampler, options, priority=priority, timeout=timeout, most_unread=most_unread
        )
        async with aclosing(stream.__aiter__()) as events:
            async for event in events:
                yield event


class AsyncStream:
    """One request, read in the loop that it was made in, by one task at a time.

    Events are taken from the engine's queue as they are asked for: a slow reader pauses his request and no other. A stream that
    is not read to its end and that nobody holds any more cancels its request; `async with` does so at once.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._news = asyncio.Event()
        stream.listen(_bell(asyncio.get_running_loop(), self._news, stream))
        self._finalizer = weakref.finalize(self, stream.cancel)
        self._finalizer.atexit = False

    async def read(self) -> Event | None:
        """The next event, waited for; None once all were read and the request has ended, or the error that ended it."""
        while True:
            self._news.clear()  # first: what comes from now on rings again
            if (event := self._stream.poll()) is not None:
                return event
            if self._stream.ended:
                return self._stream.read()  # need not wait
            await self._news.wait()

    async def wait(self) -> Outcome:
        """Waits for the end. Raises the error that ended the request. Of a queue that fills up somebody has to `read`."""
        while not self._stream.ended:
            self._news.clear()
            if not self._stream.ended:
                await self._news.wait()
        return self._stream.wait()

    async def __aiter__(self) -> AsyncGenerator[Event]:
        """Leaving the loop before its end cancels the request."""
        try:
            while (event := await self.read()) is not None:
                yield event
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the request with "cancelled" before its next step; what it has given can be read. After its end: nothing."""
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    @property
    def ended(self) -> bool:
        return self._stream.ended

    @property
    def outcome(self) -> Outcome:
        """Raises `TsggError` while the request runs, or where an error ended it."""
        return self._stream.outcome


def _bell(loop: asyncio.AbstractEventLoop, news: asyncio.Event, stream: Stream) -> Callable[[], None]:
    """Wakes the reader, from the engine's thread. Holds neither the stream, which holds it, nor the `AsyncStream`."""
    rung = weakref.ref(stream)

    def ring() -> None:
        try:
            loop.call_soon_threadsafe(news.set)
        except RuntimeError:  # the loop is closed: nobody will ever read this
            if (found := rung()) is not None:
                found.cancel()

    return ring
