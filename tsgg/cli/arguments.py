"""Flags that several commands share. Names are llama.cpp's where they mean the same."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from tsgg.cli.parser import REPLACED, Replaced
from tsgg.cli.texts import checked, unescape
from tsgg.sampling import SamplingParams


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, where, how large, and how it speculates."""
    parser.add_argument(
        "-m", "--model", "-hf", metavar="MODEL", help="path, short name or user/repo:quant [smollm2-135m]"
    )
    parser.add_argument("--device", default="auto", help="device name from `tsgg devices` [%(default)s]")
    parser.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        dest="gpu_layers",
        metavar="N",
        help="0: the CPU; else as --device auto",
    )
    parser.add_argument(
        "-c", "--n-ctx", "--ctx-size", type=int, metavar="N", help="context in tokens [min(trained, 8192, what fits)]"
    )
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads [usable physical cores]")
    for kind in "kv":
        parser.add_argument(
            f"-ct{kind}",
            f"--cache-type-{kind}",
            default="f16",
            metavar="TYPE",
            help="f16, f32, bf16 or q8_0 [%(default)s]",
        )
    spec = parser.add_argument_group("speculation (the answer is the same with and without)")
    switch = spec.add_mutually_exclusive_group()
    switch.add_argument("--spec", dest="spec", action="store_true", default=None, help="speculate [on]")
    switch.add_argument("--no-spec", dest="spec", action="store_false", help="decode plainly")
    spec.add_argument("--spec-type", metavar="NAME", help="auto or a drafter's name [auto]")
    spec.add_argument("--spec-draft", type=int, metavar="N", help="most tokens drafted per step, 1 to 64 [8]")
    spec.add_argument("--spec-pmin", type=float, metavar="F", help="confidence gate, 0 to 1 [the drafter's own]")
    spec.add_argument("--draft-model", metavar="PATH", help="drafter weights in a GGUF file of their own")
    spec.add_argument(*REPLACED, action=Replaced)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn and when they end."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-n",
        "--max-tokens",
        "--predict",
        "--n-predict",
        type=int,
        metavar="N",
        help="most tokens to generate; -1: no limit",
    )
    group.add_argument("--temp", "--temperature", dest="temperature", type=float, metavar="F", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--top-p", type=float, metavar="F")
    group.add_argument("--min-p", type=float, metavar="F")
    group.add_argument("--repetition-penalty", "--repeat-penalty", type=float, metavar="F")
    group.add_argument("--presence-penalty", type=float, metavar="F")
    group.add_argument("--frequency-penalty", type=float, metavar="F")
    group.add_argument(
        "--penalty-last-n", "--repeat-last-n", type=int, metavar="N", help="tokens that penalties look at"
    )
    group.add_argument("-s", "--seed", type=int, metavar="N", help="-1: another one every time")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="show log-probabilities, with those of the top N tokens"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop string; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past end-of-generation tokens")
    escape = group.add_mutually_exclusive_group()
    escape.add_argument(
        "-e", "--escape", action="store_true", help=r"\n, \t, \xHH ... in texts of the command line mean it"
    )
    escape.add_argument(
        "--no-escape", dest="escape", action="store_false", help="texts are taken as they are [default]"
    )


def add_display(parser: argparse.ArgumentParser) -> None:
    """What is shown beside the answer."""
    parser.add_argument(
        "--show-drafts", action="store_true", help="colour the tokens that a drafter guessed (on a terminal)"
    )
    switch = parser.add_mutually_exclusive_group()
    switch.add_argument(
        "--stats", dest="stats", action="store_true", default=None, help="statistics on stderr [on a terminal]"
    )
    switch.add_argument("--no-stats", dest="stats", action="store_false", help="no statistics")


def wants_statistics(arguments: argparse.Namespace) -> bool:
    """As the flags say, else where somebody looks."""
    return bool(sys.stderr.isatty() if arguments.stats is None else arguments.stats)


SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "penalty_last_n", "seed", "logprobs", "ignore_eos",
)  # fmt: skip
UNLIMITED = (-1, -2)  # llama.cpp's -n: without end, and until the context is full; here both are the latter


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, checked; all others are those that the model's file recommends."""
    given = {name: getattr(arguments, name) for name in SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("max_tokens") in UNLIMITED:
        del given["max_tokens"]
    if given.get("seed") == -1:
        del given["seed"]
    if arguments.stop is not None:
        given["stop"] = [text_of(arguments, stop, "--stop") for stop in arguments.stop]
    SamplingParams.parse(given)  # before the model is loaded
    return given


def text_of(arguments: argparse.Namespace, text: str, what: str) -> str:
    """A text of the command line, its escapes read where -e says so. Raises `UsageError` where it is not UTF-8."""
    text = checked(text, what)
    return unescape(text) if arguments.escape else text


def print_json(value: Any) -> None:
    """One JSON object on stdout; dataclasses and mappings become objects."""
    print(json.dumps(_plain(value)), flush=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
