"""The model that the flags name."""

from __future__ import annotations

import argparse
import sys

from tsgg.cli.bars import Bars
from tsgg.errors import UsageError
from tsgg.llm import LLM
from tsgg.pull import resolve_model

_OPTIONS = {  # of speculation -> flag
    "enabled": "spec",
    "type": "spec_type",
    "draft": "spec_draft",
    "pmin": "spec_pmin",
    "draft_model": "draft_model",
}


def load(arguments: argparse.Namespace, bars: Bars, n_seq: int | None = 1) -> LLM:
    """Loads the model that the arguments name. Speculation is on unless --no-spec (or TS_SPEC=0) says otherwise."""
    spec = {
        option: getattr(arguments, flag) for option, flag in _OPTIONS.items() if getattr(arguments, flag) is not None
    }
    llm = LLM(
        resolve_model(arguments.model, say, bars),
        device=arguments.device,
        n_gpu_layers=_layers(arguments.gpu_layers),
        n_ctx=arguments.n_ctx,
        n_threads=arguments.threads,
        cache_type_k=arguments.cache_type_k,
        cache_type_v=arguments.cache_type_v,
        speculation=spec or "auto",
        n_seq=n_seq,
        on_progress=bars if bars.wanted else None,
    )
    if sys.stderr.isatty():
        say(f"using {llm.model.file.paths[0]} ({llm.model.n_ctx} tokens of context, {llm.model.device.name})")
    return llm


def say(line: str) -> None:
    """A line for the user, on stderr."""
    print(line, file=sys.stderr)


def _layers(text: str | None) -> int | None:
    """What -ngl says, as `LLM` takes it."""
    if text is None or text in ("auto", "all"):
        return None if text is None else -1
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"-ngl is {text!r}, expected a number of layers, auto or all") from None
