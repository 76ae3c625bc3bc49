"""The split of an answer into reasoning and content, as it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks reasoning in an answer. Line breaks next to a tag belong to it."""

    open: str
    close: str
    header: str = ""  # what may stand behind `open` and belongs to it
    anywhere: bool = False  # tags are tokens that no answer contains: reasoning may come again, a stray tag is dropped


THINK = Tags("<think>", "</think>")  # only where an answer begins with it
CHANNEL = Tags("<|channel>", "<channel|>", "thought", anywhere=True)  # Gemma 4


class ReasoningSplitter:
    """Splits streamed text at reasoning tags. A tag that may still be coming is held back until it is decided.

    `prompt` is the rendered prompt: a template that ends with an open tag has begun the reasoning already.
    """

    def __init__(self, prompt: str = "", tags: Tags = THINK) -> None:
        self._tags = tags
        self._thinking = prompt.rstrip().endswith((tags.open, tags.open + tags.header))
        self._started = self._thinking  # something has been said
        # What is still expected behind an open tag.
        self._header = tags.header if prompt.rstrip().endswith(tags.open) else ""
        self._strip = self._thinking
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What became decided: (content, reasoning)."""
        self._held += text
        content: list[str] = []
        reasoning: list[str] = []
        while self._held and self._skip():
            advance = self._think(reasoning) if self._thinking else self._answer(content)
            if not advance:
                break
        return "".join(content), "".join(reasoning)

    def flush(self) -> tuple[str, str]:
        """What is still held back, at the end."""
        held, self._held = self._held, ""
        if self._header.startswith(held):
            held = ""  # an answer that ends within a tag's header
        return ("", held) if self._thinking else (held, "")

    def _skip(self) -> bool:
        """Drops what belongs to a tag; False while more of it may come."""
        if self._header:
            if self._header.startswith(self._held) and self._held != self._header:
                return False
            self._held = self._held.removeprefix(self._header)
            self._header = ""
        if self._strip:
            self._held = self._held.lstrip("\n")
            self._strip = not self._held
        return bool(self._held)

    def _think(self, reasoning: list[str]) -> bool:
        """Takes reasoning up to its end; True when that was found."""
        at = self._held.find(self._tags.close)
        if at >= 0:
            reasoning.append(self._held[:at].rstrip("\n"))
            self._cross(at + len(self._tags.close), thinking=False)
            return True
        size = _possible_end(self._held, self._tags.close)
        keep = len(self._held) - size
        breaks = keep - len(self._held[:keep].rstrip("\n"))
        self._release(reasoning, keep - breaks)
        return False

    def _answer(self, content: list[str]) -> bool:
        """Takes content up to a tag; True when one was found."""
        tags = self._tags
        if self._started and not tags.anywhere:
            self._release(content, len(self._held))
            return False
        found = {self._held.find(tag): tag for tag in (tags.open, tags.close) if tag in self._held}
        if not tags.anywhere:  # an answer that begins with other text has no reasoning
            begins = self._held.lstrip()
            found = {at: tag for at, tag in found.items() if tag == tags.open and begins.startswith(tag)}
            if not found and not tags.open.startswith(begins):
                self._started = True
                return True
        if found:
            at = min(found)
            if self._started or self._held[:at].strip():
                content.append(self._held[:at])
                self._started = True
            self._cross(at + len(found[at]), thinking=found[at] == tags.open)
            return True
        if tags.anywhere:
            size = len(self._held) - max(_possible_end(self._held, tag) for tag in (tags.open, tags.close))
            if self._started or self._held[:size].strip():
                self._release(content, size)
        return False

    def _cross(self, size: int, thinking: bool) -> None:
        """Goes on behind a tag."""
        self._held = self._held[size:]
        self._thinking, self._strip = thinking, True
        self._started = self._started or not self._tags.anywhere
        self._header = self._tags.header if thinking else ""

    def _release(self, into: list[str], size: int) -> None:
        into.append(self._held[:size])
        self._held = self._held[size:]
        self._started = True


def _possible_end(text: str, tag: str) -> int:
    """Characters at the end that may turn out to be the beginning of a tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)
