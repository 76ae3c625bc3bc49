"""The command line: `tsgg generate | chat | inspect | devices | pull | bench`. One module per command.

A command module has `HELP`, `add_arguments(parser)` and `run(arguments) -> int`. Only this package prints: answers on
stdout, everything else on stderr. A `TsggError` is one line on stderr and exit status 2, like a wrong flag.

shell.py        exit statuses, signals, closed pipes
parser.py       flags and what may have been meant
arguments.py    flags that several commands share
texts.py        prompts from flags, files and standard input
loading.py      the model that the flags name
writer.py       text of a model, safe and styled on a terminal
bars.py         progress

A chat is chat.py, over conversation.py (messages), talk.py (turns as they are shown), chat_commands.py and editor.py (input).
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from tsgg.cli import shell

COMMANDS = ("generate", "chat", "inspect", "devices", "pull", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    return shell.run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    # Imported here: a wrong `TS_*` variable and a processor that cannot run the extension are found by the import.
    from tsgg.cli.logs import logged
    from tsgg.cli.parser import Parser

    parser = Parser(prog="tsgg", description="GGUF language models, made faster by speculative decoding.")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the log on stderr")
    parser.add_argument("--version", action=Version, help="show the version and leave")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"tsgg.cli.{name}") for name in COMMANDS}
    for name, module in modules.items():
        command = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        if name != "bench":  # it hands all words on
            command.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="show the log")
        module.add_arguments(command)
    arguments = parser.parse(argv)
    with logged(arguments.verbose):
        return int(modules[arguments.command].run(arguments))


class Version(argparse.Action):
    """Asks for the version only when it is wanted."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tsgg import __version__
        from tsgg.ggml.library import GGML_VERSION

        print(f"tsgg {__version__} (ggml {GGML_VERSION})")
        parser.exit()
