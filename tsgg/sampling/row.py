"""RowSampler: draws and records the tokens of one request, row by row, and says when the answer has ended."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import TsggError, UsageError
from tsgg.sampling import chain
from tsgg.sampling.constraint import Matcher
from tsgg.sampling.memory import LoopWatch, Penalties
from tsgg.sampling.params import RepetitionGuard, SamplingParams
from tsgg.sampling.processors import Processors
from tsgg.sampling.stopping import StopText
from tsgg.sampling.uniform import uniform


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural log-probabilities of one row: softmax of the raw logits, before bias, penalties and temperature."""

    token: int
    """The emitted token."""
    logprob: float
    """Its log-probability."""
    top: tuple[tuple[int, float], ...]
    """The most probable (token, log-probability) pairs, greatest first, the lower id first among equals."""


class RowSampler:
    """The sampler of one request. `sample` is called once per emitted token, in order, until `finished` is set.

    A draw is a pure function of the row, the tokens emitted before it and (seed, sample index, position): the window of
    the verify that a row came from cannot change it. Not for use by two threads at once.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        prompt: Sequence[int] = (),
        end_of_generation: Iterable[int] = (),
        suppressed: Iterable[int] = (),
        stop_tokens: Mapping[int, str] | None = None,
        decode_step: Callable[[int], str] | None = None,
        decode_end: Callable[[], str] | None = None,
        token_limit: int | None = None,
        sample_index: int = 0,
        constraint: Matcher | None = None,
    ) -> None:
        """`prompt`: token ids that penalties and processors see. `end_of_generation`: tokens that end the answer.
        `suppressed`: tokens that the model's file forbids. `stop_tokens`: those whose text is a stop string of `params`, and
        which have no text in an answer. `decode_step(token)`: the text that the token completed; `decode_end()`: what
        the detokenizer still holds. `token_limit`: tokens that the context has room for. `sample_index`: which of several
        answers to the request this is. `constraint`: of `Constraints.start(params)`, this sampler's from now on; when the
        answer is complete it ends with "stop", without a token for it.

        Raises UsageError where `params` name a token outside the vocabulary, stop strings without `decode_step`, or a
        constraint that was not given here.
        """
        params.check_vocab(vocab_size)
        stops = tuple(params.stop or ())
        if stops and decode_step is None:
            raise UsageError("stop strings need text, and this request has no tokenizer; use stop_token_ids")
        if (wanted := params.constraint) is not None and constraint is None:
            raise UsageError(f"{wanted.kind} needs the model's vocabulary: give what Constraints.start makes of it")
        self.params, self.constraint = params, constraint
        self.seed: int = secrets.randbits(32) if params.seed is None else params.seed
        """The seed in use: that of the parameters, or the one chosen for this request."""
        self.finished: str | None = None
        """Why the answer ended: "stop", "length" (max_tokens), "context" (token_limit), "repetition" (or what `finish` was
        given); None while it goes on."""
        self.stop_reason: str | int | None = None
        """The stop string or the token id behind "stop"; None where an answer ended because its constraint is met."""
        self.tokens: list[int] = []
        """Every emitted token, the one that ended the answer included."""
        self.texts: list[str] = []
        """For each of `tokens` the text that it completed, before stop strings are cut."""
        self.released: list[str] = []
        """For each of `tokens` the text that became showable with it: `texts` without stop strings, held back meanwhile."""
        self.logprobs: list[RowLogprobs] = []
        """For each of `tokens`, where the parameters ask for them."""

        self._most = math.inf if params.max_tokens is None else params.max_tokens
        self._room = math.inf if token_limit is None else token_limit
        self._stop_tokens = dict(stop_tokens or {})
        explicit = frozenset(params.stop_token_ids or ()) | self._stop_tokens.keys()
        ends = frozenset(end_of_generation)
        self._ends = explicit | ends
        biases = dict(params.logit_bias or {})
        biases.update(dict.fromkeys((*suppressed, *(ends - explicit if params.ignore_eos else ())), -math.inf))
        self._bias_ids = np.fromiter(biases.keys(), np.intp, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        processors = params.logits_processors
        self._processors = Processors(processors, prompt) if isinstance(processors, tuple) and processors else None
        self._penalties = Penalties(params, prompt) if params.has_penalties else None
        guard = params.repetition_guard
        self._loop = LoopWatch(guard) if isinstance(guard, RepetitionGuard) else None
        self._decode_step, self._decode_end = decode_step, decode_end
        if constraint is not None:  # what remains of them are texts of control tokens, and those are meant
            stops = tuple(stop for stop in stops if stop not in self._stop_tokens.values())
        self._stop_text = StopText(stops)
        self._visible: list[str] = []
        self._taken = 0  # pieces of _visible already given out by take_text
        self._vocab_size = vocab_size
        self._sample_index = sample_index
        self._row: NDArray[np.float32] | None = (
            None  # private copy for processors, bias and penalties, made when first needed
        )

    @property
    def needs_logits(self) -> bool:
        """False where a token is the first maximum of the raw row: a device may take it and call `accept`."""
        return (
            not self.params.is_greedy
            or self._bias_ids.size > 0
            or self._processors is not None
            or self._penalties is not None
            or self.constraint is not None
            or self.params.logprobs is not None
        )

    def sample(self, logits: NDArray[np.float32], position: int) -> int:
        """Draw the next token from `logits` [vocab] f32 (read only), record it and return it.

        `position` is the place the token takes in the sequence. Raises TsggError where the answer has already ended,
        the row has another size than the vocabulary, or nothing can be drawn from it.
        """
        if logits.shape != (self._vocab_size,):
            raise TsggError(f"the row of logits has shape {logits.shape}; expected ({self._vocab_size},)")
        self._check_open()
        params = self.params
        row = self._adjusted(logits)
        if params.is_greedy:
            token = chain.greatest(row)
        else:
            fraction = uniform(self.seed, self._sample_index, position)
            token = chain.draw(row, params.temperature, params.top_k, params.top_p, params.min_p, fraction)
        if params.logprobs is not None:
            self.logprobs.append(_logprobs(logits, token, params.logprobs))
        return self._record(token)

    def accept(self, token: int) -> int:
        """Record a token that the device took as the first maximum of its row; only where `needs_logits` is False."""
        if self.needs_logits:
            raise TsggError("these sampling parameters need the row of logits; call sample()")
        self._check_open()
        return self._record(token)

    def finish(self, reason: str) -> None:
        """End the answer from outside (context full, cancelled): releases held-back text. Nothing is drawn after it."""
        self._check_open()
        self._end(reason)

    def visible_text(self) -> str:
        """The text so far without a stop string, and without text that may yet become one."""
        return "".join(self._visible)

    def take_text(self) -> str:
        """The part of `visible_text` that was not taken before, for streaming."""
        text = "".join(self._visible[self._taken :])
        self._taken = len(self._visible)
        return text

    def _check_open(self) -> None:
        if self.finished is not None:
            raise TsggError(f"the answer has ended ({self.finished!r}); nothing may be drawn or recorded after that")

    def _adjusted(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """`logits`, or a private copy of it as the request wants it: the row itself belongs to the trunk."""
        changed = self._penalties, self._processors, self.constraint
        if not self._bias_ids.size and all(part is None for part in changed):
            return logits
        if self._row is None:
            self._row = np.empty(self._vocab_size, np.float32)
        if self._processors is None:
            np.copyto(self._row, logits)
        else:
            self._processors.apply(logits, self._row)
        self._row[self._bias_ids] += self._biases
        if self._penalties is not None:
            self._penalties.apply(self._row)
        if self.constraint is not None:
            self.constraint.restrict(self._row)
        return self._row

    def _record(self, token: int) -> int:
        shown = len(self._visible)
        self._judge(token)
        self.released.append("".join(self._visible[shown:]))
        return token

    def _judge(self, token: int) -> None:
        """Counts the token, extends the text and decides whether the answer ends with it."""
        self.tokens.append(token)
        for seen in (self._penalties, self._processors):
            if seen is not None:
                seen.push(token)
        loops = self._loop is not None and self._loop.push(token)
        if token in self._ends:
            self.texts.append("")  # an end-of-generation token is not part of the text
            self.stop_reason = self._stop_tokens.get(token, token)
            self._end("stop")
            return
        if self.constraint is not None:
            self.constraint.consume(token)
        piece = self._decode_step(token) if self._decode_step is not None else ""
        self.texts.append(piece)
        self._show(self._stop_text.push(piece))
        if self._stop_text.matched is not None:
            self.stop_reason = self._stop_text.matched
            self._end("stop")
        elif self.constraint is not None and self.constraint.complete:
            self._end("stop")
        elif loops:
            self._end("repetition")
        elif len(self.tokens) >= self._most:
            self._end("length")
        elif len(self.tokens) >= self._room:
            self._end("context")

    def _end(self, reason: str) -> None:
        self.finished = reason
        if self._decode_end is not None:
            self._show(self._stop_text.push(self._decode_end()))  # releases nothing behind a stop string
        self._show(self._stop_text.flush())

    def _show(self, text: str) -> None:
        if text:
            self._visible.append(text)


def _logprobs(logits: NDArray[np.float32], token: int, count: int) -> RowLogprobs:
    """Log-softmax of the raw row `logits` [vocab] at `token` and at the `count` greatest."""
    offset = chain.log_sum_exp(logits)
    top = chain.ranked_top(logits, count) if count else ()
    pairs = tuple((int(best), float(logits[best]) - offset) for best in top)
    return RowLogprobs(token, float(logits[token]) - offset, pairs)
