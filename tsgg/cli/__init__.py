"""The command line: `tsgg generate | chat | inspect | devices | pull | bench`. One module per command.

A command module has `HELP`, `add_arguments(parser)` and `run(arguments) -> int`. Only this package prints: answers on
stdout, everything else on stderr. A `TsggError` is one line on stderr and exit status 2, like a wrong flag.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from tsgg.errors import TsggError

COMMANDS = ("generate", "chat", "inspect", "devices", "pull", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    try:
        return _main(argv)
    except TsggError as error:
        print(f"tsgg: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _main(argv: Sequence[str] | None) -> int:
    # Imported here: a wrong `TS_*` variable and a processor that cannot run the extension are found by the import.
    from tsgg.cli.arguments import Parser

    parser = Parser(prog="tsgg", description="GGUF language models, made faster by speculative decoding.")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the log on stderr")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"tsgg.cli.{name}") for name in COMMANDS}
    for name, module in modules.items():
        command = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        module.add_arguments(command)
    arguments = parser.parse_args(argv)
    level = logging.INFO if arguments.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s: %(message)s", stream=sys.stderr)
    return int(modules[arguments.command].run(arguments))
