"""A security boundary: what stands in a message never becomes a control token, only the template's own text does.

A rendered prompt is one text, in which nobody could tell a `<|im_end|>` of the template from one that a user typed. So where
a message holds the text of a control token a *seam* is put into it: a character that stands nowhere else. The tokenizer cuts
no special token out across a seam, and drops it before merging. Messages without such a text reach the template as they are.

A template may also put a control token's text together: of parts of messages, or of theirs and its own. So it renders once
more with a seam around every sign of which those texts are made. If other control tokens come out, that rendering is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from tsgg.tokenizer.special import SpecialTokens

Change = Callable[[str], str]

# Hieroglyphs and rare ideographs: `repr` shows them as they are, and they have no case.
_RARE = (*range(0x13000, 0x1342F), *range(0x20000, 0x2A6D7))
_PLAIN = re.compile(r"[\w\s.,:;-]")  # no sign: texts and names are full of them


class Marks:
    """Texts of control tokens, to be found in messages and in prompts."""

    def __init__(self, texts: Collection[str]) -> None:
        known = [text for text in texts if len(text) > 1]  # a single character is the text itself
        self._found = SpecialTokens({text: i for i, text in enumerate(known)})
        signs = {sign for text in known for sign in text if not _PLAIN.match(sign)}
        self._signs = re.compile(f"([{''.join(map(re.escape, sorted(signs)))}])" if signs else "((?!))")

    def may_come_of(self, texts: Iterable[str]) -> bool:
        """Whether any of `texts` has a sign of which marks are made."""
        return any(self._signs.search(text) for text in texts)

    def of(self, text: str) -> list[int]:
        """Which marks a text holds, in order."""
        return [mark for _, mark in self._found.split(text) if mark is not None]

    def with_seams(self, text: str, seam: str) -> str:
        """A seam in every mark."""
        cuts = sorted({at + 1 for at, _ in self._found.occurrences(text)})
        return seam.join(text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def with_all_seams(self, text: str, seam: str) -> str:
        """A seam around every character of which a mark is made, but for letters, digits and common punctuation."""
        return self._signs.sub(rf"{seam}\1{seam}", text)


def unused_character(texts: Iterable[str]) -> str:
    """A character that stands in none of `texts`."""
    used = set(chain.from_iterable(texts))
    return next(chr(code) for code in _RARE if chr(code) not in used)


def texts_of(value: object) -> Iterator[str]:
    """Every text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_of(item)


def changed(value: Any, change: Change) -> Any:
    """A copy in which every text, keys included, is `change`d. Texts that this leaves alone stay what they are."""
    if isinstance(value, str):
        guarded = change(value)
        return value if guarded == value else Guarded(guarded, change)
    if isinstance(value, Mapping):
        return {changed(key, change): changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [changed(item, change) for item in value]
    return value


class Guarded(str):
    """A text with seams, in which a template still finds what it looks for: `text.split("</think>")` and the like.

    Nothing depends on it but that: what is made of such a text otherwise is a plain one, and its seams stay in it.
    """

    _change: Change

    def __new__(cls, text: str, change: Change = str) -> Guarded:
        self = super().__new__(cls, text)
        self._change = change
        return self

    def __str__(self) -> str:
        return self

    def _asked(self, value: Any) -> Any:
        """What a template asks for, as it would stand in here."""
        if isinstance(value, tuple):
            return tuple(self._asked(item) for item in value)
        return self._change(value) if type(value) is str else value

    def _again(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._again(item) for item in value)
        return Guarded(value, self._change) if isinstance(value, str) else value


def _asking(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def ask(self: Guarded, *values: Any, **named: Any) -> Any:
        asked = [self._asked(value) for value in values]
        return self._again(method(self, *asked, **{key: self._asked(value) for key, value in named.items()}))

    ask.__name__ = name
    return ask


for _name in (
    "split", "rsplit", "partition", "rpartition", "splitlines", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix",
    "replace", "find", "rfind", "index", "rindex", "count", "startswith", "endswith",
    "__contains__", "__eq__", "__ne__", "__getitem__",
):  # fmt: skip
    setattr(Guarded, _name, _asking(_name))
