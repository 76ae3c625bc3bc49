"""Draft by lookup: find where the last few tokens occurred before, propose what followed. Needs no weights.

Strong where the answer quotes its input (summaries, edits, code, tool loops); on free prose it finds nothing and says
so. Source of the idea: prompt lookup decoding. Here with a hash index per n-gram order, and a bar on the evidence for a
draft.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from tsgg.settings import settings
from tsgg.speculative.protocol import CommittedRows, Draft, DraftContext, DraftHead, Sequence, Speculator, Trunk

if TYPE_CHECKING:
    from tsgg.speculative.options import SpeculationOptions

log = logging.getLogger("tsgg.ngram")

MIN_ORDER = 2  # one token alone recurs everywhere: what followed it last says nothing
MAX_ORDER = 8  # a longer context than this hardly ever picks a better occurrence
# A 2-token context matches somewhere in a few thousand tokens almost always, and almost always in the wrong place: on
# prose each such draft is a verify that accepts nothing. Three tokens are evidence.
TRUSTED_LENGTH = 3
# One token less will do where its last two occurrences went on alike; without this a text of short repeated keys
# (tables, JSON) would hardly ever be drafted.
SECOND_OPINION_SHORTER_BY = TRUSTED_LENGTH - MIN_ORDER

# A match of m tokens is right about once in 1 + DOUBT / m^2 times: 3 tokens a bit over half the time, 8 nine times in ten; each
# drafted token that is right makes it longer by one.
DOUBT = 8.0
SECOND_OPINION_WORTH = 2  # tokens of match

# Polynomial hash of the last k tokens. 30 bits fit one digit of a Python int; a collision costs one comparison.
_MULTIPLIER = 0x2545F49
_MASK = (1 << 30) - 1

NO_MATCH = "no match"
WEAK_MATCH = "match too weak"
GAP = "gap in the history"


class _History:
    """The committed tokens of one sequence and, per order, where each n-gram of them ended last. O(1) per token."""

    __slots__ = ("before", "gap", "hashes", "index", "lowest", "tokens")

    def __init__(self, lowest: int) -> None:
        self.lowest = lowest  # shortest match that can lead to a draft; shorter n-grams are not indexed
        self.tokens: list[int] = []
        self.hashes = [0] * (MAX_ORDER + 1)  # [k]: hash of the last k tokens
        self.index: list[dict[int, int]] = [{} for _ in range(MAX_ORDER + 1)]  # [k]: hash -> end of its last occurrence
        self.before = [0]  # [end]: end of the previous n-gram of the lowest order with the same hash, 0 = none
        self.gap = False  # tokens are missing: whatever stands here is not what the trunk holds

    def extend(self, tokens: list[int]) -> None:
        hashes, index, lowest = self.hashes, self.index, self.lowest
        end = len(self.tokens)
        for token in tokens:
            end += 1
            for k in range(MAX_ORDER, 1, -1):  # downwards: order k is made of what order k-1 was one token ago
                hashes[k] = h = (hashes[k - 1] * _MULTIPLIER + token) & _MASK
                if k > lowest:
                    index[k][h] = end
            hashes[1] = token
            self.before.append(index[lowest].get(hashes[lowest], 0))
            index[lowest][hashes[lowest]] = end
        self.tokens += tokens

    def find(self, last: int) -> tuple[int, int]:
        """End and length of the best earlier occurrence of the text's tail, `last` included; (0, 0) for none.

        Longest order first, then the most recent. An end equal to `len(tokens)` means that `last` itself followed.
        """
        for k in range(MAX_ORDER, self.lowest - 1, -1):
            end = self.index[k].get((self.hashes[k - 1] * _MULTIPLIER + last) & _MASK, 0)
            if end:
                length = self.match_length(end, last)
                if length >= k:
                    return end, length
        return 0, 0

    def match_length(self, end: int, last: int) -> int:
        """Tokens, at most MAX_ORDER, by which the text up to `end` agrees with the text's tail, counted backwards."""
        tokens, n = self.tokens, len(self.tokens)
        if tokens[end - 1] != last:
            return 0
        length, most = 1, min(MAX_ORDER, end)
        while length < most and tokens[end - 1 - length] == tokens[n - length]:
            length += 1
        return length

    def continuation(self, end: int, last: int, count: int) -> list[int]:
        """What followed `end`, `count` tokens; where the text runs out it is taken to repeat from `end` on."""
        found = self.tokens[end : end + count]
        if len(found) < count:
            found.append(last)
            found = (found * math.ceil(count / len(found)))[:count]
        return found


class NgramSpeculator(Speculator):
    """Drafts the continuation of the longest, then most recent, earlier occurrence of the last tokens.

    `pmin` scales the match that a draft needs, from 3 tokens at 0 to 8 at 1.
    """

    name = "ngram"
    can_arm_after_prefix_reuse = True  # a history of tokens is complete, whatever rows the trunk handed back
    default_min_draft_prob = 0.0

    def __init__(self, pmin: float = default_min_draft_prob) -> None:
        self._required = TRUSTED_LENGTH + math.ceil(pmin * (MAX_ORDER - TRUSTED_LENGTH))
        self._histories: dict[int, _History] = {}

    def open(self, key: int, sequence: Sequence) -> None:
        history = self._histories[key] = _History(self._required - SECOND_OPINION_SHORTER_BY)
        history.extend(sequence.tokens)

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        drafts = [self._propose(context) for context in contexts]
        if settings.ngram_debug:
            for context, draft in zip(contexts, drafts, strict=True):
                said = draft.silence or f"drafts {draft.tokens}"
                log.info("sequence %d at %d: %s", context.key, context.position, said)
        return drafts

    def commit(self, key: int, tokens: list[int], start_position: int, rows: CommittedRows | None) -> None:
        history = self._histories[key]
        if start_position != len(history.tokens) and not history.gap:
            history.gap = True
            if settings.ngram_debug:
                log.info("sequence %d: commit at %d, history ends at %d", key, start_position, len(history.tokens))
        if not history.gap:
            history.extend(tokens)

    def close(self, key: int) -> None:
        self._histories.pop(key, None)

    def _propose(self, context: DraftContext) -> Draft:
        history, last = self._histories[context.key], context.last
        if history.gap:
            return Draft(silence=GAP)
        end, length = history.find(last)
        if not end:
            return Draft(silence=NO_MATCH)
        tokens = history.continuation(end, last, context.window)
        if length < self._required:
            tokens = tokens[: self._agreed(history, end, length, last, tokens)]
            length += SECOND_OPINION_WORTH
        if not tokens:
            return Draft(silence=WEAK_MATCH)
        return Draft(tuple(tokens), tuple(1.0 / (1.0 + DOUBT / (length + i) ** 2) for i in range(len(tokens))))

    @staticmethod
    def _agreed(history: _History, end: int, length: int, last: int, tokens: list[int]) -> int:
        """How many of `tokens` followed the occurrence before `end` as well."""
        earlier = history.before[end]
        if not earlier or history.match_length(earlier, last) < length:
            return 0
        other = history.continuation(earlier, last, len(tokens))
        return next((i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), len(tokens))


def make_ngram(trunk: Trunk, options: SpeculationOptions, head: DraftHead | None) -> Speculator | None:
    """Factory for the registry: serves every trunk."""
    return NgramSpeculator(NgramSpeculator.default_min_draft_prob if options.pmin is None else options.pmin)
