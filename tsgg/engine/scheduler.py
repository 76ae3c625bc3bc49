"""Which requests run in the next step: who gets a slot, whose prompt is read on, who decodes.

Waiting requests are admitted by priority, then in order of arrival, as long as there are slots. A step forwards one chunk of one
prompt and one row or verify of every request that decodes, so that a long prompt delays its neighbours by a chunk at a time.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tsgg.engine.cache import PrefixCache
from tsgg.engine.fairness import Fairness
from tsgg.engine.request import Request
from tsgg.engine.tree import common_prefix
from tsgg.memory import Memory, Sequence
from tsgg.memory.memory import LARGEST_RUN

# Rows of a prompt that are read beside decoding requests: what those wait longer for their next tokens. A forward of 64 rows is
# as efficient per row as one of 512 (measured on two cores with a model of 135M).
ROWS_BESIDE = 64
# Tokens of a prompt that another request is about to have computed, above what is found already: worth waiting for it.
WORTH_WAITING = 64
LOOK_AHEAD = 64  # waiting requests that are looked at in a step, while the first of them wait for a prefix


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step runs."""

    ended: tuple[tuple[Request, str], ...]  # cancelled, or past their deadline, with the reason
    prefill: Request | None = None
    chunk_end: int = 0  # it forwards its target up to here
    decodes: tuple[Request, ...] = ()
    decoding: int = 0  # requests that decode side by side, those that sit this step out included

    @property
    def idle(self) -> bool:
        return not (self.ended or self.prefill or self.decodes)


class Scheduler:
    """Owns every request from `add` to `remove`. For the engine's thread."""

    def __init__(self, cache: PrefixCache, memory: Memory) -> None:
        self.cache, self.fairness = cache, Fairness()
        self._memory = memory
        self.waiting: list[Request] = []  # in the order of admission
        self.running: list[Request] = []  # with a slot
        self.cached = 0  # tokens of prompts that were in memory when their requests were first admitted, so far
        self._odd = False
        self.disturbed = False  # a request may have been cancelled: set by any thread
        self._earliest: float | None = None  # no deadline of any request comes before it; None: there is none

    def add(self, request: Request) -> None:
        if request.deadline is not None and (self._earliest is None or request.deadline < self._earliest):
            self._earliest = request.deadline
        if request.cancelled:  # before it was here: the turn that it disturbed has not seen it
            self.disturbed = True
        bisect.insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        """The request has ended: its slot is idle, with all that was committed."""
        self._leave(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.phase = "done"

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def turn(self, now: float) -> Turn:
        """Decides the next step. Requests move from `waiting` to `running`, or back where they are preempted."""
        ended = tuple(self._ended(now))
        gone = {id(request) for request, _ in ended}
        self._admit(now, gone)
        running = [request for request in self.running if id(request) not in gone]
        decoding = [request for request in running if request.phase == "decode" and not request.paused]
        decodes = tuple(self.fairness.choose(decoding))
        prefill = self._next_prefill([request for request in running if request.phase == "prefill"])
        end = 0 if prefill is None else self._chunk_end(prefill, ROWS_BESIDE if decoding else LARGEST_RUN)
        return Turn(ended, prefill, end, decodes, len(decoding))

    def read_on(self, request: Request) -> None:
        """A chunk of the request's prompt was forwarded: where texts part the rows go into the tree, for others to go on from."""
        if request.sequence is not None and request.held in request.splits:
            request.splits.remove(request.held)
            self.cache.capture(request.sequence)

    def next_deadline(self) -> float | None:
        """A moment at which `turn` may have something to end though nothing runs."""
        return self._earliest

    # -- parts -----------------------------------------------------------------------------------------------------------

    def _ended(self, now: float) -> Iterator[tuple[Request, str]]:
        if not self.disturbed and (self._earliest is None or now < self._earliest):
            return  # not every step looks at all who wait
        self.disturbed = False
        for request in self.requests():
            if request.cancelled:
                yield request, "cancelled"
            elif request.deadline is not None and now >= request.deadline:
                yield request, "timeout"
        later = (request.deadline for request in self.requests())
        self._earliest = min((deadline for deadline in later if deadline is not None and deadline > now), default=None)

    def _admit(self, now: float, gone: set[int]) -> None:
        """Gives slots to those who wait, as far as there are any."""
        ready = (request for request in self.waiting if not request.paused and id(request) not in gone)
        for request in list(itertools.islice(ready, LOOK_AHEAD)):
            victim = None if self.cache.idle else self._less_urgent(request, gone)
            if victim is None and not self.cache.idle:
                return
            if self._worth_waiting(request):
                continue
            if victim is not None:
                self._preempt(victim)
            self._start(request, now)

    def _start(self, request: Request, now: float) -> None:
        """Gives the request a slot with as much of its target as could be found."""
        fresh = not request.sampler.tokens  # its prompt's last row is still needed, for the first token
        limit = len(request.target) - fresh
        busy = self._sequences()
        known = self.cache.known(request.target, limit, busy) if self.cache.rows.needs_state else 0
        self.waiting.remove(request)
        request.sequence = self.cache.place(request.target, limit, busy)
        self.running.append(request)
        request.phase = "prefill"
        request.start = request.held
        if known >= request.held + WORTH_WAITING:  # texts part there: a state makes it a place to go on from
            request.splits.add(known)
        if request.cached is None:
            request.cached, request.admitted = request.held, now
            self.cached += request.held

    def _worth_waiting(self, request: Request) -> bool:
        """Whether a prompt that is being read begins like this one, further than what can be found now."""
        limit = len(request.target) - 1
        reading = [(common_prefix(other.target, request.target[:limit]), other) for other in self.running]
        ahead = [(shared, other) for shared, other in reading if other.phase == "prefill" and other.held < shared]
        if not ahead:
            return False
        shared, other = max(ahead, key=lambda item: item[0])
        if shared < WORTH_WAITING + self.cache.found(request.target, limit, self._sequences()):
            return False
        if self.cache.rows.needs_state:
            other.splits.add(shared)
        return True

    def _less_urgent(self, request: Request, gone: set[int]) -> Request | None:
        """Whose slot the request may take: of one with less priority, or of one whose reader is behind."""
        candidates = [
            other
            for other in self.running
            if id(other) not in gone
            and (other.priority < request.priority or (other.paused and other.priority == request.priority))
        ]
        return min(candidates, key=lambda other: (other.priority, not other.paused, -other.number), default=None)

    def _preempt(self, victim: Request) -> None:
        """The request waits again. What it has computed stays findable."""
        self._leave(victim)
        victim.phase = "waiting"
        self.add(victim)

    def _leave(self, request: Request) -> None:
        """The request gives up its slot; it could go on with another one that holds `target`."""
        if request.speculative is not None and request.execution is not None:
            request.execution.disarm(request.speculative)
            request.counters, request.speculative = request.speculative.counters, None
        if request.sampler.tokens:
            request.target = request.prompt + request.sampler.tokens[:-1]
        if request.sequence is not None:
            request.sequence.truncate(request.sequence.length)  # rows of a step that failed
            self.running.remove(request)
            self.cache.release(request.sequence)
            request.sequence = None

    def _next_prefill(self, reading: list[Request]) -> Request | None:
        """By turns the one that has waited longest and the one that has least to read: short prompts overtake long ones, and
        none waits for ever. Greater priorities before all others."""
        if not reading:
            return None
        urgent = max(request.priority for request in reading)
        reading = [request for request in reading if request.priority == urgent]
        self._odd = not self._odd
        return min(reading, key=lambda request: (self._odd and request.to_prefill, request.number))

    def _chunk_end(self, request: Request, rows: int) -> int:
        held = request.held
        end = self._memory.chunk_end(request.start, held, len(request.target), rows)
        return min([end, *(split for split in request.splits if split > held)])

    def _sequences(self) -> list[Sequence]:
        return [request.sequence for request in self.running if request.sequence is not None]


def _order(request: Request) -> tuple[int, int]:
    return -request.priority, request.number
