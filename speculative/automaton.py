"""A suffix automaton that counts: for every context that occurred, how often, and what followed most.

Built online, one token at a time, in amortised constant time (Blumer et al., 1985). Its states are the classes of substrings
that end at the same places; `link` leads to the class of their longest suffixes with more occurrences. Most states have one
successor only: it lies in an array, and the dictionaries of the branching states are all that grows faster than that.
"""

from __future__ import annotations

from array import array

# Suffixes of the text whose counts one token may change. Prose has about five that matter; a text of one repeated token has
# as many as it has tokens, and would make every token cost its position.
MOST_COUNTED = 32

ROOT = 0
NONE = 0  # no successor: the root follows nothing


class SuffixAutomaton:
    """Substrings of a text of integers >= 0; a negative integer is a border that nothing reaches across.

    A text of n tokens has less than 2n states of 20 bytes, and about 100 bytes per token of a text that repeats itself as
    prose does, dictionaries included.
    """

    __slots__ = ("_best", "_count", "_last", "_length", "_link", "_more", "_token", "size")

    def __init__(self) -> None:
        self.size = 0  # tokens
        self._last = ROOT  # state of the whole text
        self._length = array("i", [0])  # longest substring of the state
        self._link = array("i", [-1])
        self._token = array("i", [-1])  # last token of its substrings
        self._count = array("i", [0])  # occurrences
        self._best = array("i", [NONE])  # successor with the most occurrences, among equals the latest
        self._more: dict[int, dict[int, int]] = {}  # of states with more than one successor: token -> state

    def append(self, token: int) -> None:
        """One more token of the text."""
        last, length, link = self._last, self._length, self._link
        new = self._add(length[last] + 1, token, 0)
        at = last
        while at != -1 and not self.after(at, token):
            self._set(at, token, new)
            at = link[at]
        if at == -1:
            link[new] = ROOT
        else:
            found = self.after(at, token)
            link[new] = found if length[at] + 1 == length[found] else self._split(at, token, found)
        self._last = new
        self.size += 1
        self._raise_counts(last, new, token)

    def after(self, state: int, token: int) -> int:
        """State of the state's substrings followed by `token`; NONE if that never occurred."""
        best = self._best[state]
        if best and self._token[best] == token:
            return best
        more = self._more.get(state)
        return more.get(token, NONE) if more is not None else NONE

    def best(self, state: int) -> tuple[int, int, int, int]:
        """(successor, its token, its occurrences, occurrences of the state); the successor is NONE where nothing follows."""
        successor = self._best[state]
        return successor, self._token[successor], self._count[successor], self._count[state]

    def shorter(self, state: int) -> tuple[int, int]:
        """The class of the longest suffixes that occur more often, and their length."""
        state = max(self._link[state], ROOT)
        return state, self._length[state]

    def repeated(self, token: int) -> tuple[int, int]:
        """State and length of the longest suffix of (text, token) that occurs in the text; (ROOT, 0) for none."""
        at = self._last
        while at != -1:
            found = self.after(at, token)
            if found:
                return found, self._length[at] + 1
            at = self._link[at]
        return ROOT, 0

    def find(self, tail: list[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `tail` that occurs in the text."""
        state, matched = ROOT, 0
        for token in tail:
            found = self.after(state, token)
            while not found and state:
                state = self._link[state]
                matched = self._length[state]
                found = self.after(state, token)
            if found:
                state, matched = found, matched + 1
        return state, matched

    def _add(self, length: int, token: int, count: int) -> int:
        self._length.append(length)
        self._link.append(ROOT)
        self._token.append(token)
        self._count.append(count)
        self._best.append(NONE)
        return len(self._length) - 1

    def _set(self, state: int, token: int, successor: int) -> None:
        best, more = self._best[state], self._more.get(state)
        if more is not None:
            more[token] = successor
        elif best and self._token[best] != token:
            self._more[state] = {self._token[best]: best, token: successor}
        else:
            self._best[state] = successor

    def _split(self, at: int, token: int, found: int) -> int:
        """Gives the shorter substrings of `found`, which now occur more often than its longer ones, a state of their own."""
        link = self._link
        copy = self._add(self._length[at] + 1, token, self._count[found])
        self._best[copy] = self._best[found]
        if found in self._more:
            self._more[copy] = dict(self._more[found])
        link[copy], link[found] = link[found], copy
        while at != -1 and self.after(at, token) == found:
            if self._best[at] == found:
                self._best[at] = copy
            if at in self._more:
                self._more[at][token] = copy
            at = link[at]
        return copy

    def _raise_counts(self, last: int, new: int, token: int) -> None:
        """Every suffix of the text occurred once more; every suffix of the text before was followed by `token`."""
        count, link, best = self._count, self._link, self._best
        state, left = new, MOST_COUNTED
        while state > ROOT and left:
            count[state] += 1
            state, left = link[state], left - 1
        state, left = last, MOST_COUNTED
        while state >= ROOT and left:
            successor = self.after(state, token)
            if count[successor] >= count[best[state]]:
                best[state] = successor
            state, left = link[state], left - 1
