"""Finding special tokens in a text: leftmost, the longest that starts there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class SpecialTokens:
    """Cuts a text at the texts of some tokens. Vocabularies have thousands of these: one regex of all would crawl."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        self._lengths: dict[str, list[int]] = {}  # by first character, longest first
        seconds: dict[str, set[str]] = {}
        for text in tokens:
            self._lengths.setdefault(text[0], []).append(len(text))
            seconds.setdefault(text[0], set()).add(text[1:2])
        for first, lengths in self._lengths.items():
            self._lengths[first] = sorted(set(lengths), reverse=True)
        starts = [_start(first, following) for first, following in seconds.items()]
        self._start = re.compile("|".join(starts)) if starts else None

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(plain text, None) and (special text, its id), in order; nothing is empty."""
        begin = at = 0
        while self._start is not None and (match := self._start.search(text, at)):
            at = match.start()
            token = self._longest(text, at)
            if token is None:
                at += 1
                continue
            if at > begin:
                yield text[begin:at], None
            yield token, self._tokens[token]
            begin = at = at + len(token)
        if begin < len(text):
            yield text[begin:], None

    def _longest(self, text: str, at: int) -> str | None:
        for length in self._lengths[text[at]]:
            piece = text[at : at + length]
            if piece in self._tokens:
                return piece
        return None


def _start(first: str, seconds: set[str]) -> str:
    """Regex of a first character and, unless it is a token by itself, of what can follow it."""
    if "" in seconds:
        return re.escape(first)
    return f"{re.escape(first)}(?=[{''.join(map(re.escape, sorted(seconds)))}])"
