"""What a generation hands back. Times in seconds, rates in tokens per second.

All frozen and plain data: `pickle`, `dataclasses.asdict` and `json.dumps` of that take every result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tsgg.speculative import GovernorReport, Origin, SpeculationStats


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt were in memory already."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one request: `prefill` ends with the first token drawn, `decode` is everything after it; `queue` is what it
    waited for a place among others before."""

    prefill: float
    decode: float
    prefill_rate: float  # uncached prompt tokens per second
    decode_rate: float  # tokens after the first per second
    queue: float = 0.0


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that a row could have given, and its natural log-probability."""

    token: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An emitted token's natural log-probability: softmax of the raw logits, before anything that sampling does to them.

    `text` is the token's own, marks like `<|im_end|>` included; bytes that are no whole character become U+FFFD.
    """

    token: int
    text: str
    logprob: float
    top: tuple[TopLogprob, ...]
    """As many of the most probable tokens as were asked for, greatest first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One streamed token. `text` is what became showable: empty while a character or a possible stop string is incomplete."""

    text: str
    token: int | None
    """None in a last chunk that brings an end without a token: "cancelled" or "timeout"."""
    logprob: TokenLogprob | None
    origin: Origin
    """"drawn" from the row before it, "drafted" by a drafter and accepted, or "forced": drafted because the constraint left no
    other choice."""
    finish_reason: str | None = None
    index: int = 0
    """Which of the `n` answers goes on with it."""

    @property
    def from_draft(self) -> bool:
        """It was drafted, and accepted: two or more tokens came of one forward."""
        return self.origin != "drawn"


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished answer, and with `n > 1` the others. `tokens` includes the token that ended it; `text` does not show it."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    """"stop", "length" (max_tokens), "context" (it is full), "repetition", "cancelled" or "timeout"."""
    stop_reason: str | int | None  # the stop string or end token behind "stop"
    seed: int
    usage: Usage
    timings: Timings
    speculation: SpeculationStats
    governor: GovernorReport | None = None  # of all requests that shared this drafter; None = the window was fixed
    index: int = 0
    others: tuple[GenerationResult, ...] = ()
    """Answers 1 to n - 1; of the first answer only."""

    @property
    def choices(self) -> tuple[GenerationResult, ...]:
        """All answers to the prompt, this one first; each has its own usage and timings."""
        return self, *self.others

    def statistics(self) -> str:
        """One line for people: tokens, rate, what speculation did."""
        spec = self.speculation
        line = (
            f"{self.usage.prompt_tokens} prompt tokens ({self.usage.cached_tokens} cached, "
            f"{self.timings.prefill_rate:.1f} tok/s), {self.usage.completion_tokens} tokens, "
            f"{self.timings.decode_rate:.1f} tok/s"
        )
        if spec.dropped:
            return f"{line}; no speculation: {spec.dropped}"
        line += f"; drafted {spec.drafted}, accepted {spec.accepted} ({100 * spec.acceptance:.0f} %)"
        line += f", {spec.tokens_per_verify:.2f} tokens per verify over {spec.verifies} verifies"
        if spec.again:
            line += f"; {spec.again} rows forwarded again: this device keeps no recurrent state per row"
        if not spec.drafted and spec.silence_reasons:
            reason = max(spec.silence_reasons, key=lambda name: spec.silence_reasons[name])
            line += f"; no drafts in {spec.steps} steps because {reason}"
        if (governor := self.governor) is not None and governor.plain_ms:
            line += f"; {governor.plain_ms:.1f} ms per plain token"
            line += f", {governor.speculative_ms:.1f} per speculative one" if governor.verifies else ""
        return line


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """What the assistant said, by the names that chat clients use."""

    role: str
    content: str
    reasoning_content: str | None
    tool_calls: tuple[dict[str, Any], ...] | None


@dataclass(frozen=True, slots=True)
class ChatResult:
    """An assistant's turn. `content` and `reasoning_content` are the parts of `generation.text`."""

    role: str
    content: str
    reasoning_content: str | None
    generation: GenerationResult
    tool_calls: tuple[dict[str, Any], ...] | None = None
    """None: calls in an answer are not parsed, they stand in `content` as the model wrote them."""
    others: tuple[ChatResult, ...] = ()
    """Answers 1 to n - 1; of the first answer only."""

    @property
    def choices(self) -> tuple[ChatResult, ...]:
        """All answers to the messages, this one first."""
        return self, *self.others

    @property
    def message(self) -> ChatMessage:
        return ChatMessage(self.role, self.content, self.reasoning_content, self.tool_calls)

    @property
    def index(self) -> int:
        return self.generation.index

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason

    @property
    def usage(self) -> Usage:
        return self.generation.usage


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """One streamed token of a turn: what it added to the answer and to the reasoning before it."""

    content: str
    reasoning_content: str
    chunk: Chunk

    @property
    def index(self) -> int:
        return self.chunk.index

    @property
    def finish_reason(self) -> str | None:
        return self.chunk.finish_reason
