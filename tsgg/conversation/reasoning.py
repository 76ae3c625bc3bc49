"""The split of an answer into reasoning and content, as it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks reasoning in an answer. Line breaks next to a tag belong to it."""

    open: str
    close: str
    header: str = ""  # what may stand behind `open` and belongs to it
    anywhere: bool = False  # tags are tokens that no answer contains: they count in the middle of a line too


THINK = Tags("<think>", "</think>")
CHANNEL = Tags("<|channel>", "<channel|>", "thought", anywhere=True)  # Gemma 4


class ReasoningSplitter:
    """Splits streamed text at reasoning tags, of which there may be several pairs. A tag that may still be coming is held
    back until it is decided.

    An answer may speak of tags: those of `THINK` open reasoning at the beginning of a line only, and close what nothing has
    opened only where their line begins or ends. Of a closing tag alone `whole` makes reasoning of all before it; in a stream
    that was shown already, and only the tag is left out.
    """

    def __init__(self, prompt: str = "", tags: Tags = THINK, begun: str = "") -> None:
        """`prompt`: the rendered text; one that ends with an open tag has begun the reasoning already. `begun`: the part of
        the answer that stands in the prompt, behind `prompt`."""
        self._tags = tags
        self._thinking = prompt.rstrip().endswith((tags.open, tags.open + tags.header))
        self._thought = self._thinking  # there has been reasoning
        self._reasoned = self._new_block = False  # some of it was given out; what comes is of a further pair of tags
        self._started = self._thinking  # something has been said
        # What is still expected behind an open tag.
        self._header = tags.header if prompt.rstrip().endswith(tags.open) else ""
        self._strip = self._thinking
        self._blank = True  # nothing but space stands on the line so far
        self._inline = 0  # open tags that do not count: closing ones belong to them
        self._held = ""
        self._ended = self._whole = False
        if begun:
            self.push(begun)
            self._held, self._reasoned = "", False

    def push(self, text: str) -> tuple[str, str]:
        """What became decided: (content, reasoning)."""
        self._held += text
        content: list[str] = []
        reasoning: list[str] = []
        while self._held and self._skip():
            if not (self._think(reasoning) if self._thinking else self._answer(content, reasoning)):
                break
        return "".join(content), "".join(reasoning)

    def flush(self) -> tuple[str, str]:
        """What is still held back, at the end."""
        self._ended = True
        content, reasoning = self.push("")
        held, self._held = self._held, ""
        if self._header.startswith(held):
            held = ""  # an answer that ends within a tag's header
        if self._thinking:
            return content, reasoning + self._more(held)
        return content + held, reasoning

    def whole(self, text: str) -> tuple[str, str]:
        """(content, reasoning) of an answer that has ended."""
        self._ended = self._whole = True
        parts = self.push(text), self.flush()
        content, reasoning = ("".join(part) for part in zip(*parts, strict=True))
        return content, reasoning

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
        self._started = True
        at = self._held.find(self._tags.close)
        if at >= 0:
            reasoning.append(self._more(self._held[:at].rstrip("\n")))
            self._cross(at + len(self._tags.close), thinking=False)
            return True
        size = _possible_end(self._held, self._tags.close)
        keep = len(self._held) - size
        keep = len(self._held[:keep].rstrip("\n"))
        reasoning.append(self._more(self._held[:keep]))
        self._held = self._held[keep:]
        return False

    def _more(self, text: str) -> str:
        """Reasoning to be given out. That of a further pair of tags begins a line."""
        if not text:
            return ""
        parted = self._reasoned and self._new_block
        self._reasoned, self._new_block = True, False
        return "\n" + text if parted else text

    def _answer(self, content: list[str], reasoning: list[str]) -> bool:
        """Takes content up to and with a tag; True when one was found."""
        tags, held = self._tags, self._held
        at, tag = min(((at, tag) for tag in (tags.open, tags.close) if (at := held.find(tag)) >= 0), default=(0, ""))
        counts = self._counts(at, tag) if tag else None
        if counts:
            self._say(content, held[:at])
            if tag == tags.close and self._whole and not self._thought:
                reasoning.append(self._more("".join(content).rstrip("\n")))
                content.clear()
            self._cross(at + len(tag), thinking=tag == tags.open)
            return True
        if counts is False:  # the answer speaks of it
            self._inline += 1 if tag == tags.open else -1 if self._inline else 0
            self._say(content, held[: at + len(tag)])
            self._held = held[at + len(tag) :]
            return True
        size = at if tag else len(held) - max(_possible_end(held, tag) for tag in (tags.open, tags.close))
        if self._started or held[:size].strip():
            self._say(content, held[:size])
            self._held = held[size:]
        return False

    def _counts(self, at: int, tag: str) -> bool | None:
        """Whether the tag at a place of what is held marks reasoning; None while that depends on what comes."""
        if self._tags.anywhere:
            return True
        line = self._held[:at].rpartition("\n")
        if not line[2].strip() and (line[1] or self._blank):
            return True
        if tag == self._tags.open or self._inline:
            return False
        after = self._held[at + len(tag) :][:1]
        return after == "\n" if after else self._ended or None

    def _say(self, content: list[str], text: str) -> None:
        """Gives content out: none that is blank before anything was said."""
        if not self._started and not text.strip():
            return
        content.append(text)
        self._started = True
        line = text.rpartition("\n")
        self._blank = not line[2].strip() and (bool(line[1]) or self._blank)

    def _cross(self, size: int, thinking: bool) -> None:
        """Goes on behind a tag."""
        self._held = self._held[size:]
        self._thinking, self._strip = thinking, True
        self._blank, self._inline = True, 0
        self._started = self._started or not self._tags.anywhere
        self._thought = self._new_block = True
        self._header = self._tags.header if thinking else ""


def _possible_end(text: str, tag: str) -> int:
    """Characters at the end that may turn out to be the beginning of a tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)
