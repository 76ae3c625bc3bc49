"""Text of a model on a stream: as it is into a file or a pipe, safe and styled on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tsgg.results import Chunk

# A model's text is not trusted: an escape sequence in it could retitle the window or move what was said before.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_RESET = "\x1b[0m"


class Writer:
    """Flushes what it writes, so that streams that share a terminal keep their order."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.terminal: bool = stream.isatty()
        self.open = False  # whether a line has begun
        self._styled = self.terminal and os.environ.get("TERM") != "dumb"
        # NO_COLOR speaks of colours only: then drafts are underlined.
        self._codes = {"dim": "\x1b[2m", "draft": "\x1b[4m" if os.environ.get("NO_COLOR") else "\x1b[36m"}

    def write(self, text: str, style: str = "") -> None:
        """style: "dim", "draft" or none."""
        if not text:
            return
        self.open = not text.endswith("\n")
        if self.terminal:
            text = text.translate(_CONTROLS)
        if style and self._styled:
            text = f"{self._codes[style]}{text}{_RESET}"
        self._stream.write(text)
        self._stream.flush()

    def line(self, text: str = "", style: str = "") -> None:
        self.write(text, style)
        self.open = False
        self._stream.write("\n")
        self._stream.flush()


def write_chunks(chunks: Iterable[Chunk], out: Writer, show_drafts: bool) -> None:
    """Streams an answer, and ends its line even where it is left in the middle."""
    try:
        for chunk in chunks:
            out.write(chunk.text, "draft" if show_drafts and chunk.from_draft else "")
    finally:
        out.line()
