"""`Engine`: one model, many requests, one thread that drives them."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from tsgg.engine import file, records
from tsgg.engine.cache import PrefixCache
from tsgg.engine.executor import Executor, Given
from tsgg.engine.planner import Planner
from tsgg.engine.request import Request
from tsgg.engine.scheduler import Scheduler
from tsgg.engine.stats import EngineStats, Tally
from tsgg.engine.stream import MOST_UNREAD, Event, Stream
from tsgg.errors import ContextFullError, Interrupted, TsggError, UsageError
from tsgg.fingerprint import fingerprint
from tsgg.model import Model
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.speculative import SpeculationOptions

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("tsgg.engine")

DEFAULT_CACHE = 1 << 30  # bytes of the prefix tree, at most a CACHE_SHARE-th of what is free
CACHE_SHARE = 8
T = TypeVar("T")


class Engine:
    """Owns a model from now on, and frees it. Every method may be called from any thread.

    Tokens of a request are what plain decoding of it alone gives, whoever runs beside it and whatever ran before.
    """

    def __init__(self, model: Model, options: SpeculationOptions | None = None, cache_bytes: int | None = None) -> None:
        """`options`: the speculation of requests that bring none. `cache_bytes`: of the prefix tree on the host, default
        1 GiB or an eighth of the free memory; 0 keeps only what idle slots hold.

        Raises what loading a drafter raises; the model is then left open.
        """
        if cache_bytes is None:
            cache_bytes = min(DEFAULT_CACHE, max(0, model.plan.free - model.plan.needed) // CACHE_SHARE)
        self.model, self.options = model, options or SpeculationOptions()
        self.planner = Planner(model)
        self.planner.execution(self.options)
        self.cache = PrefixCache(model, cache_bytes)
        self.scheduler = Scheduler(self.cache, model.memory)
        self.executor = Executor(model, self.planner)
        self.clock = time.perf_counter
        self._tally = Tally()
        self._numbers = itertools.count()
        self._inbox: deque[Request] = deque()
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._requests: dict[int, Request] = {}  # by id of their stream
        # Of the three above. Reentrant: a garbage collection, on any thread and at any allocation, may cancel a stream.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tsgg-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon's thread must not compute while the interpreter takes its memory away

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        sampler: RowSampler,
        options: SpeculationOptions | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        most_unread: int | None = MOST_UNREAD,
    ) -> Stream:
        """Takes a request in. Returns at once; nothing is computed on the caller's thread.

        prompt: token ids. sampler: a fresh one, the engine's until the stream ends. options: None follows the engine's,
        also when they change later. priority: greater ones run first, and take the slots of lesser ones. timeout: seconds
        until it ends with "timeout". most_unread: tokens that the reader may leave unread before the request pauses.

        Raises `UsageError`, `ContextFullError`, what loading a drafter raises, or `TsggError` on a closed engine.
        """
        prompt = list(prompt)
        self.check(prompt)
        if options is not None and not self.planner.knows(options):
            self.call(lambda: self.planner.execution(options))
        stream = Stream(self._cancel, self._wake.set, most_unread)
        now = self.clock()
        request = Request(
            number=next(self._numbers),
            prompt=prompt,
            sampler=sampler,
            options=self.options if options is None else options,
            stream=stream,
            follows_default=options is None,
            submitted=now,
            priority=priority,
            deadline=None if timeout is None else now + timeout,
        )
        with self._lock:
            self._check_open()
            self._inbox.append(request)
            self._requests[id(stream)] = request
        self._wake.set()
        return stream

    def check(self, prompt: Sequence[int]) -> None:
        """Raises `UsageError` or `ContextFullError` for a prompt that `submit` would refuse."""
        if not prompt:
            raise UsageError("the prompt is empty: give text or token ids")
        if len(prompt) > self.model.n_ctx:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.model.n_ctx}: "
                "load the model with a larger n_ctx or shorten the prompt"
            )
        if min(prompt) < 0 or max(prompt) >= self.model.vocab_size:
            raise UsageError(f"token ids must lie in 0..{self.model.vocab_size - 1}, got {min(prompt)}..{max(prompt)}")

    def update_speculation(self, options: SpeculationOptions) -> str:
        """Replaces the default options, between two steps: requests that follow them go on with the new drafter, which is
        told of all that memory holds. Returns what drafts now. Raises what loading it raises; then all stays as it was."""
        return self.call(lambda: self._update(options))

    def warm(self, prompt: Sequence[int]) -> int:
        """Computes the rows of a text that many prompts begin with, and keeps them until `cool`. Returns its tokens.

        Raises what `submit` raises, and `TsggError` where other requests took the slot before the rows could be kept.
        """
        prompt = list(prompt)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self.submit(prompt, RowSampler(params, self.model.vocab_size), SpeculationOptions(), most_unread=None).wait()
        if not self.call(lambda: self.cache.pin(prompt)):
            raise TsggError("the warmed text's slot was taken by another request at once: warm it again")
        return len(prompt)

    def cool(self, prompt: Sequence[int]) -> None:
        """What `warm` keeps of this text can be forgotten from now on."""
        self.call(lambda: self.cache.unpin(list(prompt)))

    def forget(self) -> None:
        """Empties idle slots and the prefix tree: what comes next is computed whole. Requests that run go on."""
        self.call(self.cache.forget)

    def stats(self) -> EngineStats:
        """Numbers for whoever watches. Never waits for a step. Raises `TsggError` on a closed engine."""
        self._check_open()
        scheduler, tally = self.scheduler, self._tally
        ended = dict(tally.ended)
        cancelled, timed_out = ended.pop("cancelled", 0), ended.pop("timeout", 0)
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox),
            slots=self.model.slots.count,
            steps=tally.steps,
            prompt_tokens=self.executor.prefilled,
            cached_tokens=scheduler.cached,
            generated_tokens=tally.generated,
            finished=sum(ended.values()),
            cancelled=cancelled,
            timed_out=timed_out,
            failed=tally.failed,
            tree_tokens=tally.tree_tokens,
            tree_bytes=tally.tree_bytes,
            tree_budget=self.cache.tree.budget,
        )

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes what slots and the prefix tree hold, as far as the tree's budget goes, to a file for `restore`. Returns its
        tokens. Requests run on while it is written. Raises `TsggError`; a file of that name then stays as it was."""
        binding, nodes = self.call(self._taken)
        file.write(path, binding, nodes)
        return sum(len(node.tokens) for node in nodes)

    def restore(self, path: str | os.PathLike[str]) -> int:
        """Puts what `save` wrote into the prefix tree, as far as its budget goes. Returns the tokens that came back.

        Raises `TsggError` for a file that is damaged, or of another model, cache, build or machine: nothing is used of it.
        """
        binding = self.call(lambda: fingerprint(self.model, self.cache.rows))
        tree = self.cache.tree
        nodes = file.read(path, binding, self.cache.rows, self.model.vocab_size, tree.budget)
        return self.call(lambda: records.put(tree, nodes))

    # -- life --------------------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread, between two steps, where everything may be read and changed.

        Raises what it raises, `UsageError` on the engine's own thread, `TsggError` on a closed engine.
        """
        if self.here:
            raise UsageError("this is called from the engine's own thread, which cannot wait for itself")
        future: Future[object] = Future()
        with self._lock:
            self._check_open()
            self._calls.append((function, future))
        self._wake.set()
        return future.result()  # type: ignore[return-value]

    def close(self) -> None:
        """Ends every request with a `TsggError`, waits for the step that runs, and frees the model. Again: nothing."""
        with self._lock:
            self._closing = True
        self._wake.set()
        self.model.interrupt()
        if not self.here:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def here(self) -> bool:
        """Whether the caller is the engine's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def check_integrity(self) -> None:
        """Raises `TsggError` where a slot is lost or the parts contradict each other. On the engine's thread: see `call`."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.cache.check_integrity([r.sequence for r in running if r.sequence], self.model.slots.count)
        for request in running:
            if request.sequence is None or request.phase not in ("prefill", "decode") or request.stream.ended:
                raise TsggError(f"request {request.number} runs as {request.phase}")
            whole = request.prompt + request.sampler.tokens
            if request.sequence.tokens != whole[: request.held]:
                raise TsggError(f"request {request.number}: its slot holds other tokens than its own")
            if request.phase == "decode" and request.held != len(whole) - 1:
                raise TsggError(f"request {request.number}: {request.held} rows for {len(whole)} tokens")
        for request in waiting:
            if request.sequence is not None or request.phase != "waiting" or request.stream.ended:
                raise TsggError(f"request {request.number} waits as {request.phase}")

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Schedules, forwards a chunk of a prompt, drafts, verifies, accepts, commits, reports. False: nothing to do."""
        turn = self.scheduler.turn(self.clock())
        self._tally.steps += not turn.idle
        for request, reason in turn.ended:
            request.sampler.finish(reason)
            self._retire(request)
        if turn.prefill is not None:
            for given in self.executor.prefill(turn.prefill, turn.chunk_end):
                self._report(given)
            self.scheduler.read_on(turn.prefill)
        if turn.decodes:
            for given in self.executor.decode(turn.decodes, turn.decoding):
                self._report(given)
        self._tally.see(self.cache.tree)
        return not turn.idle

    def _report(self, given: Given) -> None:
        """Hands tokens to the reader, and the request back where it has ended or failed."""
        request, sampler = given.request, given.request.sampler
        if given.sample is not None:
            self.scheduler.fairness.charge(request, given.sample)
        if given.finished is not None and sampler.finished is None:  # the loop's reason: the context is full
            sampler.finish(given.finished)
        if given.tokens:
            self._tally.generated += len(given.tokens)
            request.last_token = self.clock()
            if request.first_token is None:
                request.first_token = request.last_token
            ended = sampler.finished if given.error is None else None
            request.stream.push(Event(given.tokens, given.origins, ended))
        if given.error is not None:
            self._fail(request, given.error)
        elif sampler.finished is not None:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        outcome = request.outcome(self.clock())  # first: who was dropped could not be told of what this raises
        self._drop(request)
        self._tally.end(outcome.finish_reason)
        request.stream.end(outcome)

    def _fail(self, request: Request, error: BaseException) -> None:
        log.info("request %d failed: %s", request.number, error)
        self._drop(request)
        self._tally.failed += 1
        request.stream.end(None, error)

    def _drop(self, request: Request) -> None:
        self.scheduler.remove(request)
        with self._lock:
            self._requests.pop(id(request.stream), None)

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                if self._closing:  # asked behind `clear`: whoever closes sets it before he wakes
                    break
                self._take_in()
                try:
                    busy = self.step()
                except Interrupted:  # somebody was in a hurry to be heard: the step is run again without him
                    continue
                except Exception as error:
                    log.exception("a step failed")
                    self._fail_all(TsggError(f"the engine's step failed: {error!r}"))
                    continue
                if not busy:
                    self._sleep()
        finally:
            self._finish()

    def _take_in(self) -> None:
        """New requests, and functions that `call` has left."""
        while self._inbox:
            request = self._inbox.popleft()
            if request.follows_default:
                request.options = self.options
            self.scheduler.add(request)
        while self._calls:
            function, future = self._calls.popleft()
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
                continue
            self._tally.see(self.cache.tree)
            future.set_result(result)

    def _sleep(self) -> None:
        deadline = self.scheduler.next_deadline()
        self._wake.wait(None if deadline is None else max(0.0, deadline - self.clock()))

    def _fail_all(self, error: TsggError) -> None:
        """Ends every request; slots are emptied, since nobody knows what a failed step left in them."""
        for request in list(self.scheduler.requests()):
            self._fail(request, error)
        self.cache.forget()

    def _finish(self) -> None:
        """The last thing that the thread does: nobody is left waiting, and the model is freed."""
        error = TsggError("this model was closed while the request ran")
        with self._lock:
            self._closing = True
            requests, calls = list(self._requests.values()), list(self._calls)
            self._requests.clear()
            self._calls.clear()
        for request in requests:
            request.stream.end(None, error)
        for _, future in calls:
            future.set_exception(TsggError("this model was closed: load it again"))
        self.model.close()
        atexit.unregister(self.close)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closing:
            raise TsggError("this model was closed: load it again")

    def _cancel(self, stream: Stream) -> None:
        with self._lock:
            request = self._requests.get(id(stream))
        if request is None:
            return
        request.cancelled = True
        self.scheduler.disturbed = True
        serving = self.executor.serving
        if request in serving and all(other.cancelled for other in serving):
            self.model.interrupt()  # nobody wants what is being computed
        self._wake.set()

    def _taken(self) -> tuple[dict[str, str], list[records.Record]]:
        self.cache.save_slots([r.sequence for r in self.scheduler.running if r.sequence])
        return fingerprint(self.model, self.cache.rows), records.taken(self.cache.tree)

    def _update(self, options: SpeculationOptions) -> str:
        report = self.planner.describe(options)
        self.options = options
        for request in self.scheduler.requests():
            if request.follows_default:
                self.executor.switch(request, options)
        return report
