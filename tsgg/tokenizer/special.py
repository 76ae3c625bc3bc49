"""Finding special tokens in a text: the longest first, wherever it is; equally long ones from the left."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class SpecialTokens:
    """Cuts a text at the texts of some tokens. Vocabularies have thousands of these: one regex of all would crawl."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        lengths: dict[str, set[int]] = {}
        seconds: dict[str, set[str]] = {}
        for text in tokens:
            lengths.setdefault(text[0], set()).add(len(text))
            seconds.setdefault(text[0], set()).add(text[1:2])
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        starts = [_start(first, following) for first, following in seconds.items()]
        self._start = re.compile("|".join(starts)) if starts else None

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(plain text, None) and (special text, its id), in order; nothing is empty."""
        begin = 0
        for at, token in self._chosen(text):
            if at > begin:
                yield text[begin:at], None
            yield token, self._tokens[token]
            begin = at + len(token)
        if begin < len(text):
            yield text[begin:], None

    def _chosen(self, text: str) -> list[tuple[int, str]]:
        """Occurrences that keep clear of each other, by place. Groups that overlap are rare, and decided one by one."""
        chosen: list[tuple[int, str]] = []
        group: list[tuple[int, str]] = []
        end = 0
        for at, token in self.occurrences(text):
            if at >= end and group:
                chosen += _longest_first(group)
                group = []
            group.append((at, token))
            end = max(end, at + len(token))
        return chosen + _longest_first(group)

    def occurrences(self, text: str) -> Iterator[tuple[int, str]]:
        """Every token at every place, by place."""
        for match in self._start.finditer(text) if self._start is not None else ():
            at = match.start()
            for length in self._lengths[text[at]]:
                piece = text[at : at + length]
                if len(piece) == length and piece in self._tokens:
                    yield at, piece


def _longest_first(group: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """What remains of overlapping occurrences when the longest text (in bytes, as the file has it) is cut out first."""
    if len(group) < 2:
        return group
    first = group[0][0]
    taken = bytearray(max(at + len(token) for at, token in group) - first)
    chosen = []
    for at, token in sorted(group, key=lambda found: (-len(found[1].encode()), found[0])):
        low, high = at - first, at - first + len(token)
        if not taken[low] and not taken[high - 1]:  # what was taken is no shorter: it covers an end where it overlaps
            taken[low:high] = b"\1" * len(token)
            chosen.append((at, token))
    return sorted(chosen)


def _start(first: str, seconds: set[str]) -> str:
    """Regex of a first character and, unless it is a token by itself, of what can follow it."""
    if "" in seconds:
        return re.escape(first)
    return f"{re.escape(first)}(?=[{''.join(map(re.escape, sorted(seconds)))}])"
