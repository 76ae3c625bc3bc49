"""Stop strings across token borders, and which text may be shown while more is to come."""

from __future__ import annotations

from collections.abc import Iterable


class StopText:
    """Finds the first stop string in text that arrives piece by piece.

    Text that may still turn out to be the beginning of a stop string is held back, the stop string and what follows it
    are never released.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing is released after it."""

    def push(self, piece: str) -> str:
        """Add `piece`; returns the text that is now certain to precede any stop string."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        self._held = ""
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.matched = min(found, key=lambda match: match[0])  # the first in the text, then in the list
            return text[:place]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                self._held = text[start:]
                return text[:start]
        return text

    def flush(self) -> str:
        """No more text will come: returns what was held back."""
        held, self._held = self._held, ""
        return held
