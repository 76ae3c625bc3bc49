"""Every environment variable that tsgg reads, in one place.

`TS_*` names are A/B switches and debug aids: each says what it reverts. They are read once, at import; tests replace
`settings` fields through `dataclasses.replace`. Options of speculation (`TS_SPEC_*`) are kept as text here and parsed by
`tsgg.speculative.options`, which validates flags, environment and API alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tsgg.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """What the environment says. Defaults are what an empty environment gives."""

    # TS_ATTENTION=flash: flash attention for float caches on the CPU too (not exact); soft is what auto does.
    attention: str = "auto"
    repack: bool = True  # TS_REPACK=0: weights of all types stay as the file has them, see tsgg.weights
    mmap: bool | None = None  # TS_MMAP=0: weights are read into memory; 1: they stay mapped; not set: see tsgg.weights
    cpu: str = "auto"  # TS_CPU=haswell: that build of the CPU backend, not the best one for this processor
    pair_rows: bool = True  # TS_PAIR_ROWS=0: lone rows of float weights take the one-row kernel (not exact)
    yield_cores: bool = True  # TS_YIELD_CORES=0: all threads compute even beside busy processes
    graph_budget: int = 256 << 20  # TS_GRAPH_BUDGET_MB: bytes of compute buffers that cached graphs may hold
    ngram_debug: bool = False  # TS_NGRAM_DEBUG=1: the n-gram drafter logs why it is silent
    cache_dir: str | None = None  # TSGG_CACHE: folder of pulled models instead of the platform's cache folder
    history: str | None = None  # TSGG_HISTORY: file of what was typed in a chat; empty: it is not kept
    spec: Mapping[str, str] = field(default_factory=dict)  # TS_SPEC_*: speculation options as text

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Parses the known names; a malformed value is a `UsageError`, an unknown `TS_*` name is left alone."""
        attention = environment.get("TS_ATTENTION", "auto")
        if attention not in ("auto", "soft", "flash"):
            raise UsageError(f"TS_ATTENTION is {attention!r}, expected auto, soft or flash")
        return cls(
            attention=attention,
            repack=_flag(environment, "TS_REPACK", True),
            mmap=_flag(environment, "TS_MMAP", True) if "TS_MMAP" in environment else None,
            cpu=environment.get("TS_CPU") or "auto",
            pair_rows=_flag(environment, "TS_PAIR_ROWS", True),
            yield_cores=_flag(environment, "TS_YIELD_CORES", True),
            graph_budget=_megabytes(environment, "TS_GRAPH_BUDGET_MB", 256),
            ngram_debug=_flag(environment, "TS_NGRAM_DEBUG", False),
            cache_dir=environment.get("TSGG_CACHE") or None,
            history=environment.get("TSGG_HISTORY"),
            spec={name: value for name, value in environment.items() if name.startswith("TS_SPEC")},
        )


def _flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = environment.get(name)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise UsageError(f"{name} is {text!r}, expected 0 or 1")
    return text == "1"


def _megabytes(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} is {text!r}, expected a positive number of megabytes")
    return int(text) << 20


settings = Settings.from_environment(os.environ)
