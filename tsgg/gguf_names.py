"""What file names say: which of them are language models, and which are parts of one."""

from __future__ import annotations

import re
from collections.abc import Iterable

PART = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_NO_MODEL = re.compile(r"(^|[-._/])(mmproj|imatrix)", re.IGNORECASE)  # GGUF files that hold no language model


def group_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """What the user would call one file -> its parts in order, of those names that are language models."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(name):
            part = PART.fullmatch(name)
            models.setdefault(f"{part['base']}.gguf" if part else name, []).append(name)
    return models
