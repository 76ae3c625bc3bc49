"""Answers as their reader sees them: tokens of the engine become chunks of text and, at the end, results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from tsgg.engine import Engine, Event, Stream
from tsgg.errors import TsggError
from tsgg.progress import OnProgress, PrefillWatch
from tsgg.results import Chunk, GenerationResult, Timings, TokenLogprob, TopLogprob, Usage
from tsgg.sampling import RowSampler
from tsgg.speculative import SpeculationOptions


class Generation:
    """One answer: a request of the engine, from `start` on.

    Reads of the sampler, which is the engine's, only what belongs to tokens that the stream has given out.
    """

    def __init__(self, prompt: list[int], sampler: RowSampler, text_of: Callable[[int], str], index: int = 0) -> None:
        """`text_of`: of a lone token, for log-probabilities. `index`: of the answer, among those to the prompt."""
        self.prompt, self.sampler, self.index, self._text_of = prompt, sampler, index, text_of
        self._stream: Stream | None = None
        self._taken: int | None = None  # tokens that the reader has asked for; None: he only waits for the end
        self._shown = 0  # characters of the chunks so far
        self._told = False  # the reader knows why it ended

    def start(self, engine: Engine, options: SpeculationOptions | None, most_unread: int | None) -> None:
        """`most_unread`: see `Engine.submit`; None for a reader who only waits for the end."""
        self._taken = None if most_unread is None else 0
        self._stream = engine.submit(self.prompt, self.sampler, options, most_unread=most_unread)

    @property
    def started(self) -> bool:
        return self._stream is not None

    @property
    def succeeded(self) -> bool:
        """It has ended, and not with an error."""
        return self._stream is not None and self._stream.ended and self._stream.error is None

    @property
    def stream(self) -> Stream:
        assert self._stream is not None
        return self._stream

    def chunks(self, event: Event) -> Iterator[Chunk]:
        """One per token."""
        for i, (token, origin) in enumerate(zip(event.tokens, event.origins, strict=True), start=1):
            at = self._taken or 0
            self._taken = at + 1
            finished = event.finished if i == len(event.tokens) else None
            text = self.sampler.released[at] if finished is None else self._rest()
            self._shown += len(text)
            self._told = finished is not None
            yield Chunk(text, token, self._logprob(at), origin, finished, self.index)

    def ending(self) -> Iterator[Chunk]:
        """Of a stream that has ended: the chunk that says why, where the last token's did not."""
        if not self._told:
            self._told = True
            yield Chunk(self._rest(), None, None, "drawn", self.stream.outcome.finish_reason, self.index)

    def result(self) -> GenerationResult:
        """What the reader was given. Of a stream that he has left, that is less than was computed."""
        sampler, outcome = self.sampler, self.stream.outcome
        whole = len(sampler.tokens)
        count = whole if self._taken is None else self._taken
        left = count < whole
        prefill, decode = outcome.first_token - outcome.admitted, outcome.last_token - outcome.first_token
        fresh = len(self.prompt) - outcome.cached_tokens
        return GenerationResult(
            text="".join(sampler.released[:count]) if left else sampler.visible_text(),
            tokens=tuple(sampler.tokens[:count]),
            logprobs=tuple(entry for at in range(count) if (entry := self._logprob(at)) is not None),
            finish_reason="cancelled" if left else outcome.finish_reason,
            stop_reason=None if left else sampler.stop_reason,
            seed=sampler.seed,
            usage=Usage(len(self.prompt), count, outcome.cached_tokens),
            timings=Timings(
                prefill,
                decode,
                _rate(fresh, prefill),
                _rate(max(0, whole - 1), decode),
                outcome.admitted - outcome.submitted,
            ),
            speculation=outcome.speculation,
            governor=outcome.governor,
            index=self.index,
        )

    def _rest(self) -> str:
        """Of an answer that has ended: the text that no chunk has shown, with what was held back for a stop string."""
        return self.sampler.visible_text()[self._shown :]

    def _logprob(self, at: int) -> TokenLogprob | None:
        if not self.sampler.logprobs:
            return None
        row, text = self.sampler.logprobs[at], self._text_of
        top = tuple(TopLogprob(token, text(token), logprob) for token, logprob in row.top)
        return TokenLogprob(row.token, text(row.token), row.logprob, top)


def run(
    generations: Sequence[Generation],
    engine: Engine,
    options: SpeculationOptions | None,
    on_progress: OnProgress | None = None,
) -> None:
    """All side by side, waited for. Where one fails, all end at once, and its error is raised."""
    ended: SimpleQueue[Generation] = SimpleQueue()
    watch = PrefillWatch(engine, generations, on_progress)

    def look(generation: Generation) -> None:
        if generation.stream.ended:  # not at every token
            ended.put(generation)

    try:
        for generation in generations:
            generation.start(engine, options, None)
            generation.stream.listen(partial(look, generation))
        going = set(generations)
        while going:
            generation = watch.get(ended)
            if generation.stream.error is not None:
                raise generation.stream.error
            going.discard(generation)
    finally:
        _leave(generations, engine)


def stream(
    generations: Sequence[Generation],
    engine: Engine,
    options: SpeculationOptions | None,
    most_unread: int,
    on_progress: OnProgress | None = None,
) -> Generator[Chunk]:
    """Chunks of all answers, as they come. Raises the error that ends one; when the reader leaves, all end."""
    ready: SimpleQueue[Generation] = SimpleQueue()  # told of by the engine's thread
    watch = PrefillWatch(engine, generations, on_progress)
    try:
        for generation in generations:
            generation.start(engine, options, most_unread)
            generation.stream.listen(partial(ready.put, generation))
        going = set(generations)
        while going:
            generation = watch.get(ready)
            ended = generation.stream.ended  # asked first: then all that it gave is there to be read
            while (event := generation.stream.poll()) is not None:
                yield from generation.chunks(event)
            if ended and generation in going:
                if generation.stream.error is not None:
                    raise generation.stream.error
                yield from generation.ending()
                going.remove(generation)
    finally:
        _leave(generations, engine)


def result(answers: Sequence[Generation]) -> GenerationResult:
    """Of all answers to one prompt, which have ended."""
    first, *others = (generation.result() for generation in answers)
    return replace(first, others=tuple(others))


def _leave(generations: Sequence[Generation], engine: Engine) -> None:
    """Ends what still runs, and waits until it has ended."""
    streams = [generation.stream for generation in generations if generation.started]
    for stream in streams:
        stream.cancel()
        stream.listen(_deaf)  # a listener and its stream would keep each other in memory
    if engine.here:  # a garbage collection found the reader's loop
        return
    for stream in streams:
        with suppress(TsggError):  # it was raised in the loop, or nobody reads any more
            stream.wait()


def _deaf() -> None:
    """The listener of a stream that nobody reads any more."""


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
