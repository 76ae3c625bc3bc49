"""The name that was probably meant where an unknown one was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is near. `elsewhere`: what other programs call a known name."""
    found = (elsewhere or {}).get(name) or next(iter(get_close_matches(name, list(known), n=1, cutoff=0.6)), None)
    return f"; did you mean {found!r}?" if found else ""
