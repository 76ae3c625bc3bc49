"""Streams that run side by side: what a client is, when each token came, and the figures made of these times."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from benchmarks.arrivals import Request

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Event:
    """One token as it reaches the reader."""

    token: int
    drafted: bool = False


class Client(Protocol):
    """A running engine. `stream` is called from as many threads as there are slots."""

    def stream(self, ids: Sequence[int], tokens: int, speculate: bool) -> Iterable[Event]:
        """Greedy, exactly `tokens` of them, past any end of generation."""

    def forget(self) -> None:
        """Drops what earlier requests left: the next prompt is computed as a whole."""

    def reusing(self) -> AbstractContextManager[None]:
        """Within it a prompt reuses what the requests before it left."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What one reader saw: the time of asking and of every token, in seconds of one clock."""

    start: float
    times: tuple[float, ...]
    tokens: tuple[int, ...]
    drafted: int = 0  # tokens that came from accepted drafts

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between a token and the one before it."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of some streams. Rates in tokens/s of all together, times in seconds."""

    decode_rate: float  # while all are past their first token and none has ended; NaN if there is no such time
    total_rate: float  # from the first asking to the last token
    ttft: float  # median over the streams
    ttft_worst: float
    gap_p50: float  # between two tokens of one stream, over all streams
    gap_p99: float
    drafted: int


def run_together(
    client: Client,
    requests: Sequence[Request],
    speculate: Sequence[bool],
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Stream]:
    """Each request in a thread of its own, in the order of `requests`. What a reader raises is raised here, when all ended."""
    streams: list[Stream | None] = [None] * len(requests)
    errors: list[BaseException] = []
    ready = threading.Barrier(len(requests))

    def read(number: int) -> None:
        try:
            ready.wait()
            request = requests[number]
            if request.delay:
                sleep(request.delay)
            streams[number] = _read(client, request, speculate[number], clock)
        except BaseException as error:  # raised again in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [stream for stream in streams if stream is not None]


def run_alone(client: Client, request: Request, speculate: bool = False, clock: Clock = time.perf_counter) -> Stream:
    """The same in this thread, without its delay."""
    return _read(client, request, speculate, clock)


def _read(client: Client, request: Request, speculate: bool, clock: Clock) -> Stream:
    times: list[float] = []
    events: list[Event] = []
    start = clock()
    for event in client.stream(request.ids, request.tokens, speculate):
        times.append(clock())
        events.append(event)
    if not events:
        raise RuntimeError("a stream ended without a token")
    drafted = sum(event.drafted for event in events)
    return Stream(start, tuple(times), tuple(event.token for event in events), drafted)


def figures(streams: Sequence[Stream]) -> Figures:
    """The figures of one run."""
    ttfts = [stream.ttft for stream in streams]
    gaps = [gap for stream in streams for gap in stream.gaps]
    start, end = min(stream.start for stream in streams), max(stream.times[-1] for stream in streams)
    return Figures(
        decode_rate=_decode_rate(streams),
        total_rate=sum(len(stream.tokens) for stream in streams) / (end - start),
        ttft=statistics.median(ttfts),
        ttft_worst=max(ttfts),
        gap_p50=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
        drafted=sum(stream.drafted for stream in streams),
    )


def shared_time(streams: Sequence[Stream]) -> tuple[float, float]:
    """(begin, end) of the time in which every stream has its first token and none has its last; begin >= end: none."""
    return max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)


def gaps_within(stream: Stream, begin: float, end: float) -> list[float]:
    """Seconds between neighbouring tokens that both came in [begin, end]."""
    inside = [at for at in stream.times if begin <= at <= end]
    return [after - before for before, after in pairwise(inside)]


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that `share` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def median(values: Iterable[float]) -> float:
    """NaN when any value is: a round without a figure is not dropped in silence."""
    known = list(values)
    return math.nan if any(math.isnan(value) for value in known) else statistics.median(known)


def spread(values: Sequence[float]) -> float:
    """(max - min) / median; NaN when any value is."""
    middle = median(values)
    return math.nan if math.isnan(middle) else (max(values) - min(values)) / middle


def _decode_rate(streams: Sequence[Stream]) -> float:
    begin, end = shared_time(streams)
    if end <= begin:
        return math.nan
    return sum(begin < at <= end for stream in streams for at in stream.times) / (end - begin)


class OurClient:
    """`tsgg.LLM` as a client. `speculation` is what a speculating request asks for."""

    def __init__(self, llm: Any, speculation: object) -> None:
        self.llm, self.speculation = llm, speculation

    def stream(self, ids: Sequence[int], tokens: int, speculate: bool) -> Iterator[Event]:
        how = self.speculation if speculate else None
        chunks = self.llm.stream(list(ids), max_tokens=tokens, temperature=0, ignore_eos=True, speculation=how)
        for chunk in chunks:
            if chunk.token is not None:
                yield Event(chunk.token, chunk.from_draft)

    def forget(self) -> None:
        self.llm.forget()

    def reusing(self) -> AbstractContextManager[None]:
        return nullcontext()  # it always does
