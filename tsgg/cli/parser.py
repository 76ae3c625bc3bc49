"""Parsing of flags: one line for what is wrong, with the nearest thing that is right."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from tsgg.errors import UsageError
from tsgg.suggest import did_you_mean

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

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses a whole command line; raises `UsageError` with the flag that may have been meant."""
        parsed, rest = self.parse_known_args(words)
        if rest:
            word = rest[0].split("=", 1)[0]
            self.error(f"unknown argument {word}{did_you_mean(word, self._flags(parsed.command))}")
        return parsed

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message)
        if choice:
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        elif "expected one argument" in message:
            message += ", one that begins with - is given as --FLAG=-VALUE"
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own hides that the disk is full."""
        (file or sys.stderr).write(message)

    def _flags(self, command: str) -> Iterable[str]:
        """Flags that may stand behind a command."""
        commands = next(action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return list(commands.choices[command]._option_string_actions)


class Replaced(argparse.Action):
    """A flag of old: raises `UsageError` with the one that is used now."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", help=argparse.SUPPRESS)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        raise UsageError(f"{option_string} was removed: use {REPLACED[str(option_string)]}")
