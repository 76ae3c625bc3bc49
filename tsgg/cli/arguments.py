"""Flags that several commands share, and the flags of old that name their replacement."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from tsgg.errors import UsageError
from tsgg.llm import LLM
from tsgg.sampling import SamplingParams

REPLACED = {
    "--mtp-spec": "--spec",
    "--mtp-draft": "--spec-draft",
    "--mtp-pmin": "--spec-pmin",
    "--mtp-draft-model": "--draft-model",
    "--spec-draft-model": "--draft-model",
}


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of printing usage and exiting; flags are never abbreviated."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in sys.argv[1:] if args is None else args:
            name = str(word).split("=", 1)[0]
            if name in REPLACED:
                raise UsageError(f"{name} was removed: use {REPLACED[name]}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, where, how large, and how it speculates."""
    parser.add_argument("-m", "--model", metavar="MODEL", help="path, short name or user/repo:quant [smollm2-135m]")
    parser.add_argument("--device", default="auto", help="device name from `tsgg devices` [%(default)s]")
    parser.add_argument(
        "-c", "--n-ctx", type=int, metavar="N", help="context in tokens [min(trained, 8192, what fits)]"
    )
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads [usable physical cores]")
    for kind in "kv":
        parser.add_argument(
            f"--cache-type-{kind}", default="f16", metavar="TYPE", help="f16, f32, bf16 or q8_0 [%(default)s]"
        )
    spec = parser.add_argument_group("speculation (the answer is the same with and without)")
    switch = spec.add_mutually_exclusive_group()
    switch.add_argument("--spec", dest="spec", action="store_true", default=None, help="speculate [on]")
    switch.add_argument("--no-spec", dest="spec", action="store_false", help="decode plainly")
    spec.add_argument("--spec-type", metavar="NAME", help="auto or a drafter's name [auto]")
    spec.add_argument("--spec-draft", type=int, metavar="N", help="most tokens drafted per step, 1 to 64 [8]")
    spec.add_argument("--spec-pmin", type=float, metavar="F", help="confidence gate, 0 to 1 [the drafter's own]")
    spec.add_argument("--draft-model", metavar="PATH", help="drafter weights in a GGUF file of their own")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn; llama.cpp's names where they mean the same."""
    group = parser.add_argument_group("sampling")
    group.add_argument("-n", "--max-tokens", type=int, metavar="N", help="most tokens to generate")
    group.add_argument("--temp", "--temperature", dest="temperature", type=float, metavar="F", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--top-p", type=float, metavar="F")
    group.add_argument("--min-p", type=float, metavar="F")
    group.add_argument("--repetition-penalty", type=float, metavar="F")
    group.add_argument("--presence-penalty", type=float, metavar="F")
    group.add_argument("--frequency-penalty", type=float, metavar="F")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument("--logprobs", type=int, metavar="N", help="report log-probabilities of the top N tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop string; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past end-of-generation tokens")


SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "logprobs", "stop", "ignore_eos",
)  # fmt: skip


def sampling(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that were given; all others keep their defaults."""
    given = {name: getattr(arguments, name) for name in SAMPLING}
    return SamplingParams.parse(None, **{name: value for name, value in given.items() if value is not None})


def load(arguments: argparse.Namespace) -> LLM:
    """Loads the model that the arguments name. Speculation is on unless --no-spec (or TS_SPEC=0) says otherwise."""
    flags = {
        "enabled": "spec",
        "type": "spec_type",
        "draft": "spec_draft",
        "pmin": "spec_pmin",
        "draft_model": "draft_model",
    }
    spec = {option: getattr(arguments, flag) for option, flag in flags.items() if getattr(arguments, flag) is not None}
    return LLM(
        arguments.model,
        device=arguments.device,
        n_ctx=arguments.n_ctx,
        n_threads=arguments.threads,
        cache_type_k=arguments.cache_type_k,
        cache_type_v=arguments.cache_type_v,
        speculation=spec or "auto",
    )


def read_prompt(text: str | None, file: str | None = None) -> str:
    """The prompt of -p or -f; "-" reads standard input to its end."""
    if (text is None) == (file is None):
        raise UsageError("give one prompt: -p TEXT, -p - for standard input, or -f FILE")
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"prompt file {file}: {error}") from error
    return sys.stdin.read() if text == "-" else str(text)


def print_json(value: Any) -> None:
    """One JSON object on stdout; dataclasses and mappings become objects."""
    print(json.dumps(_plain(value)))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
