"""One request as its reader sees it: tokens of the engine become chunks of text and, at the end, a result."""

from __future__ import annotations

from collections.abc import Iterator

from tsgg.engine import Stream
from tsgg.results import Chunk, GenerationResult, Timings, Usage
from tsgg.sampling import RowSampler


class Generation:
    """Iterate over it for chunks; `result` is there once the stream has ended.

    Reads of the sampler, which is the engine's, only what belongs to tokens that the stream has given out.
    """

    def __init__(self, stream: Stream, sampler: RowSampler, prompt_tokens: int) -> None:
        self.stream, self.sampler, self.prompt_tokens = stream, sampler, prompt_tokens
        self.taken: int | None = None  # chunks that the reader has asked for; None: he only waits for the end

    def __iter__(self) -> Iterator[Chunk]:
        self.taken = 0
        sampler = self.sampler
        for event in self.stream:
            for i, (token, drafted) in enumerate(zip(event.tokens, event.from_draft, strict=True), start=1):
                index, self.taken = self.taken, self.taken + 1
                logprob = sampler.logprobs[index] if sampler.logprobs else None
                finished = event.finished if i == len(event.tokens) else None
                yield Chunk(sampler.released[index], token, logprob, drafted, finished)

    def result(self) -> GenerationResult:
        """What the reader was given. Of a stream that he has left, that is less than was computed."""
        sampler, outcome = self.sampler, self.stream.outcome
        whole = len(sampler.tokens)
        count = whole if self.taken is None else self.taken
        left = count < whole
        prefill, decode = outcome.first_token - outcome.admitted, outcome.last_token - outcome.first_token
        fresh = self.prompt_tokens - outcome.cached_tokens
        return GenerationResult(
            text="".join(sampler.released[:count]) if left else sampler.visible_text(),
            tokens=tuple(sampler.tokens[:count]),
            logprobs=tuple(sampler.logprobs[:count]),
            finish_reason="cancelled" if left else outcome.finish_reason,
            stop_reason=None if left else sampler.stop_reason,
            seed=sampler.seed,
            usage=Usage(self.prompt_tokens, count, outcome.cached_tokens),
            timings=Timings(
                prefill,
                decode,
                _rate(fresh, prefill),
                _rate(max(0, whole - 1), decode),
                outcome.admitted - outcome.submitted,
            ),
            speculation=outcome.speculation,
            governor=outcome.governor,
        )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
