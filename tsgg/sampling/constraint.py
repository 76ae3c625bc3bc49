"""Constrained answers: which tokens may come next, by llguidance.

Constraints  of one model: its vocabulary as llguidance reads it, and the grammars that were compiled for it
Matcher      of one answer: where in its grammar the answer stands
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from tsgg.errors import TsggError, UsageError
from tsgg.sampling import conflicts
from tsgg.sampling.constraint_fields import ConstraintText
from tsgg.sampling.grammar import shown, source
from tsgg.sampling.params import SamplingParams
from tsgg.tokenizer import Tokenizer

MOST_GRAMMARS = 64  # compiled ones that are kept: the latest used


class Matcher:
    """The state of one answer: told of every emitted token, it says which may be the next. One thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def complete(self) -> bool:
        """Whether the answer is whole, and nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def accepting(self) -> bool:
        """Whether the answer is whole as it stands; more may follow."""
        return bool(self._matcher.is_accepting())

    def forced(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that must come next, one after the other; none where there is a choice."""
        return tuple(self._matcher.compute_ff_tokens()[:most])

    def permitted(self, tokens: Sequence[int]) -> int:
        """How many of these, from the first on, may come next one after the other."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def allowed(self) -> NDArray[np.bool_]:
        """`[vocab]`, whether a token may be the next. Raises `TsggError` where the grammar is too complex to tell."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(words, count=self._vocab_size, bitorder="little").view(np.bool_)

    def restrict(self, row: NDArray[np.float32]) -> None:
        """Sets the logits of tokens that may not be the next to -inf. `row` [vocab] f32 is changed in place."""
        if forced := self.forced(1):
            logit = row[forced[0]]
            row.fill(-np.inf)
            row[forced[0]] = logit
            return
        banned = self.allowed()
        np.logical_not(banned, out=banned)
        np.copyto(row, np.float32(-np.inf), where=banned)

    def consume(self, token: int) -> None:
        """`token` was emitted. Raises `TsggError` for one that the grammar does not have here."""
        if not self._matcher.consume_token(token):
            error = shown(self._matcher.get_error())
            raise TsggError(f"token {token} does not follow in the answer's grammar: {error}")

    def copy(self) -> Matcher:
        """Another answer that goes on from the same state."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TsggError(f"the answer's constraint failed: {shown(self._matcher.get_error())}")


class Constraints:
    """Compiles constraints for the vocabulary of one model. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Nothing is built before a first constraint asks for it: that takes a quarter of a second for 49,152 tokens."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._grammars: OrderedDict[ConstraintText, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, params: SamplingParams) -> Matcher | None:
        """The constraint of a new answer; None where `params` have none.

        Raises UsageError for one that cannot be read, that no answer can meet, or that contradicts other parameters.
        """
        text = params.constraint
        if text is None:
            return None
        if not self._tokenizer.has_text:
            raise UsageError(f"{text.kind} needs the text of tokens, and the model's file has no tokenizer")
        with self._lock:
            matcher = self._compiled(text).copy()
        conflicts.check(params, text, matcher, self._tokenizer, self._matches_some)
        return matcher

    def _compiled(self, text: ConstraintText) -> Matcher:
        if text not in self._grammars:
            self._grammars[text] = self._compile(text)
            while len(self._grammars) > MOST_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(text)
        return self._grammars[text]

    def _compile(self, text: ConstraintText) -> Matcher:
        compiled = self._matcher(source(text))
        if error := compiled.get_error():
            raise UsageError(f"{text.kind} cannot be used: {shown(error)}")
        matcher = Matcher(compiled, self._vocab_size)
        if not self._can_begin(matcher.copy()):
            raise UsageError(
                f"{text.kind} cannot be met: no text but the empty one matches it, with the model's tokens"
            )
        return matcher

    def _matcher(self, grammar: str) -> LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size)
        return LLMatcher(self._vocabulary, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))

    def _can_begin(self, matcher: Matcher) -> bool:
        """Whether there is a token that is no end. Where nothing can come llguidance allows the ends."""
        try:
            allowed = matcher.allowed()
        except TsggError:
            return False
        allowed[list(self._tokenizer.end_of_generation)] = False
        return bool(allowed.any())

    def _matches_some(self, grammar: str) -> bool:
        """Whether any text matches a grammar. One that cannot be compiled is taken to match some."""
        with self._lock:
            compiled = self._matcher(grammar)
        return bool(compiled.get_error()) or self._can_begin(Matcher(compiled, self._vocab_size))


class _Vocabulary:
    """A tokenizer as `TokenizerWrapper` asks for one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        ends = sorted(tokenizer.end_of_generation)
        eos = tokenizer.eos if tokenizer.eos is not None else tokenizer.eot
        self.eos_token_id = eos if eos is not None else (ends or [0])[0]
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = sorted(tokenizer.marks)
        unusable = tokenizer.unusable
        self.tokens = [b"" if token in unusable else tokenizer.token_bytes(token) for token in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):  # asked once, whether it takes bytes
            raise TypeError("expected str")
        return self._tokenizer.encode_inside(text)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    wrapped = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
    ends = sorted(tokenizer.end_of_generation) or None
    try:
        return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=ends)
    except Exception as error:  # bare exceptions of the library
        raise UsageError(f"the model's vocabulary cannot be constrained: {shown(str(error))}") from error
