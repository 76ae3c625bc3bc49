"""Draft what usually followed: the longest context that occurred before, and its most frequent continuation, token by token.

Counts come from a suffix automaton over the sequence and, where that is asked for, from what earlier requests were answered.
Each token carries a confidence, so that a policy can weigh the draft; it ends where it is no longer likely.
Source of the idea: SuffixDecoding (arXiv 2411.04975), there with suffix trees. `ngram` looks up the latest occurrence instead:
better where a text changes its mind, worse where contexts are short and common.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tsgg.settings import settings
from tsgg.speculative.automaton import NONE, SuffixAutomaton
from tsgg.speculative.ngram import GAP, NO_MATCH, WEAK_MATCH
from tsgg.speculative.protocol import CommittedRows, Draft, DraftContext, DraftHead, Sequence, Speculator, Trunk

if TYPE_CHECKING:
    from tsgg.speculative.options import SpeculationOptions

log = logging.getLogger("tsgg.suffix")

SHORTEST = 2  # one token alone recurs everywhere: what followed it says nothing
LONGEST = 16  # tokens of context looked up in the answers to earlier requests
# Occurrences that a context of one token would need before its counts are believed; a context of m needs this over m squared.
# So 2 tokens seen once promise 1/3, 3 a bit over a half, 8 nine tenths: about what comes true on code and quotations.
DOUBT = 8.0
CORPUS = 1 << 17  # tokens of earlier answers that are kept, the latest half at least: 15 MB
BORDER = -1


class _History:
    """The committed tokens of one sequence."""

    __slots__ = ("answer", "automaton", "gap", "tail")

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.tail: list[int] = []  # the last LONGEST tokens
        self.answer: list[int] | None = None  # tokens committed since it first drafted
        self.gap = False  # tokens are missing: whatever stands here is not what the trunk holds

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.automaton.append(token)
        self.tail = (self.tail + tokens[-LONGEST:])[-LONGEST:]
        if self.answer is not None:
            self.answer += tokens


class AnswerCorpus:
    """Answers to earlier requests, in two generations: when the younger is half of what is allowed, the older is dropped."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._generations = [SuffixAutomaton()]

    def add(self, answer: list[int]) -> None:
        """An answer longer than half the bound keeps its end."""
        answer = answer[-max(1, self._most // 2 - 1) :]
        if self._generations[-1].size + len(answer) + 1 > self._most // 2:
            self._generations = [self._generations[-1], SuffixAutomaton()]
        for token in (*answer, BORDER):
            self._generations[-1].append(token)

    @property
    def size(self) -> int:
        """Tokens held."""
        return sum(generation.size for generation in self._generations)

    def matches(self, tail: list[int]) -> list[tuple[SuffixAutomaton, int, int]]:
        """(automaton, state, length) of the longest suffix of `tail` in each generation."""
        return [(generation, *generation.find(tail)) for generation in self._generations if generation.size]


class SuffixSpeculator(Speculator):
    """Drafts as far as frequencies support it: while the tokens so far, taken together, are likelier than `pmin`.

    corpus: tokens of other requests' answers that it may draft from; 0 = none, so that nobody's answers show in the speed of
    another's.
    """

    name = "suffix"
    can_arm_after_prefix_reuse = True  # a history of tokens is complete, whatever rows the trunk handed back
    default_min_draft_prob = 0.2  # of survival: where rows cost least, one costs about that much of a plain step

    def __init__(self, pmin: float = default_min_draft_prob, corpus: int = CORPUS) -> None:
        self._pmin = pmin
        self._histories: dict[int, _History] = {}
        self.corpus = AnswerCorpus(corpus) if corpus else None

    def open(self, key: int, sequence: Sequence) -> None:
        self.close(key)
        history = self._histories[key] = _History()
        history.extend(list(sequence.tokens))

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        drafts = [self._propose(context) for context in contexts]
        if settings.ngram_debug:
            for context, draft in zip(contexts, drafts, strict=True):
                said = draft.silence or f"drafts {draft.tokens}"
                log.info("sequence %d at %d: %s", context.key, context.position, said)
        return drafts

    def commit(self, key: int, tokens: list[int], start_position: int, rows: CommittedRows | None) -> None:
        history = self._histories[key]
        if start_position != history.automaton.size and not history.gap:
            history.gap = True
            if settings.ngram_debug:
                log.info("sequence %d: commit at %d, history ends at %d", key, start_position, history.automaton.size)
        if not history.gap:
            history.extend(tokens)

    def close(self, key: int) -> None:
        history = self._histories.pop(key, None)
        if history is not None and history.answer and self.corpus is not None:
            self.corpus.add(history.answer)

    def _propose(self, context: DraftContext) -> Draft:
        history, last = self._histories[context.key], context.last
        if history.gap:
            return Draft(silence=GAP)
        if history.answer is None:
            history.answer = []
        matches = [(history.automaton, *history.automaton.repeated(last))]
        if self.corpus is not None:
            matches += self.corpus.matches([*history.tail[1 - LONGEST :], last])
        drafts = [self._follow(*match, context.window) for match in matches if match[2] >= SHORTEST]
        if not drafts:
            return Draft(silence=NO_MATCH)
        tokens, confidences, _ = max(drafts, key=lambda draft: draft[2])
        return Draft(tuple(tokens), tuple(confidences)) if tokens else Draft(silence=WEAK_MATCH)

    def _follow(
        self, automaton: SuffixAutomaton, state: int, length: int, window: int
    ) -> tuple[list[int], list[float], float]:
        """Tokens, their confidences, and how many of them are expected to be right.

        A context that nothing ever followed (the text's own end) gives way to the next shorter one.
        """
        tokens: list[int] = []
        confidences: list[float] = []
        survival, expected = 1.0, 0.0
        while len(tokens) < window and length >= SHORTEST:
            successor, token, follows, occurs = automaton.best(state)
            if successor == NONE:
                state, length = automaton.shorter(state)
                continue
            confidence = follows / (occurs + DOUBT / (length * length))
            survival *= confidence
            if survival < self._pmin or token < 0:
                break
            tokens.append(token)
            confidences.append(confidence)
            expected += survival
            state, length = successor, length + 1
        return tokens, confidences, expected


def make_suffix(trunk: Trunk, options: SpeculationOptions, head: DraftHead | None) -> Speculator | None:
    """Factory for the registry: serves every trunk."""
    pmin = SuffixSpeculator.default_min_draft_prob if options.pmin is None else options.pmin
    return SuffixSpeculator(pmin, CORPUS if options.shared_corpus else 0)
