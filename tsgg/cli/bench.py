"""`tsgg bench`: the measurements of the clone's `benchmarks` folder, which wheels do not carry."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import tsgg.models
from tsgg.errors import UsageError

HELP = "run a scenario of benchmarks/ (needs a clone of the repository)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCENARIO ...", help="as after python -m benchmarks")


def run(arguments: argparse.Namespace) -> int:
    clone = Path(tsgg.models.__file__).resolve().parents[1]  # an editable install runs from the clone
    if not (clone / "benchmarks" / "__main__.py").is_file():
        raise UsageError("tsgg bench needs a clone of the repository, installed with pip install -e")
    if importlib.util.find_spec("benchmarks") is None:
        sys.path.insert(0, str(clone))
    return int(importlib.import_module("benchmarks.__main__").main(arguments.words))
