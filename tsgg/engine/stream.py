"""The way from the engine to one reader: a queue that says when it is full, and how the request ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tsgg.errors import TsggError
from tsgg.speculative import GovernorReport, Origin, SpeculationStats

MOST_UNREAD = 32  # tokens: then the request pauses, so that a reader who has gone to sleep holds up nobody


@dataclass(frozen=True, slots=True)
class Event:
    """Tokens that one step gave."""

    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]  # per token
    finished: str | None = None  # why the answer ends with these tokens

    @property
    def from_draft(self) -> tuple[bool, ...]:
        """Per token: drafted, and accepted."""
        return tuple(origin != "drawn" for origin in self.origins)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, and what it took. Times are seconds of the engine's clock."""

    finish_reason: str  # what the sampler said, or "cancelled" or "timeout"
    cached_tokens: int  # of the prompt, found in memory when it was first admitted
    submitted: float
    admitted: float  # got its place; equal to `submitted` where it never did
    first_token: float  # equal to `admitted` where there was none
    last_token: float
    speculation: SpeculationStats
    governor: GovernorReport | None = None  # of all requests that shared this drafter; None: the window was fixed


class Stream:
    """What `Engine.submit` returns. One reader at a time, from any thread; `cancel` may come from another one."""

    def __init__(
        self, cancel: Callable[[Stream], None], drained: Callable[[], None], most_unread: int | None = MOST_UNREAD
    ) -> None:
        """`most_unread`: None never pauses, for a reader who only waits for the end. `drained`: called once there is room."""
        self._cancel, self._drained, self._most_unread = cancel, drained, most_unread
        self._condition = threading.Condition()
        self._events: deque[Event] = deque()
        self._unread = 0
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._listener: Callable[[], None] | None = None

    # -- the reader's side -----------------------------------------------------------------------------------------------

    def read(self, timeout: float | None = None) -> Event | None:
        """The next event, waited for; None once all were read and the request has ended.

        Raises the error that ended the request, after the events before it, and `TimeoutError` after `timeout` seconds.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._events or self.ended, timeout):
                raise TimeoutError(f"no token came within {timeout} s")
            event = self._take()
        if event is None and self._error is not None:
            raise self._error
        return event

    def poll(self) -> Event | None:
        """The next event if one is there. With a listener; `ended` tells whether another may come."""
        with self._condition:
            return self._take()

    def wait(self, timeout: float | None = None) -> Outcome:
        """Waits for the end. Raises the error that ended the request, or `TimeoutError`."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.ended, timeout):
                raise TimeoutError(f"the request did not end within {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def __iter__(self) -> Iterator[Event]:
        while (event := self.read()) is not None:
            yield event

    def cancel(self) -> None:
        """Ends the request with "cancelled" before its next step; what it has given stays. After its end: nothing."""
        self._cancel(self)

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called, on the engine's thread, whenever there is something to `poll`, and at the end."""
        with self._condition:
            self._listener = listener
            ready = bool(self._events) or self.ended
        if ready:
            listener()

    @property
    def ended(self) -> bool:
        return self._outcome is not None or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """What ended the request, if it was an error."""
        return self._error

    @property
    def outcome(self) -> Outcome:
        """Raises `TsggError` while the request runs, or where an error ended it."""
        if self._outcome is None:
            raise TsggError("this request has not ended" if self._error is None else "this request failed")
        return self._outcome

    # -- the engine's side -----------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        return self._most_unread is not None and self._unread >= self._most_unread

    def push(self, event: Event) -> None:
        with self._condition:
            self._events.append(event)
            self._unread += len(event.tokens)
            if self._most_unread is not None:  # who only waits for the end is not woken for every token
                self._condition.notify_all()
            listener = self._listener
        if listener is not None:
            listener()

    def end(self, outcome: Outcome | None, error: BaseException | None = None) -> None:
        with self._condition:
            if self.ended:
                return
            self._outcome, self._error = outcome, error
            self._condition.notify_all()
            listener = self._listener
        if listener is not None:
            listener()

    def _take(self) -> Event | None:
        if not self._events:
            return None
        event, full = self._events.popleft(), self.full
        self._unread -= len(event.tokens)
        if full and not self.full:
            self._drained()
        return event
