"""What the user types: on a terminal with editing, history and several lines, else the lines of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import create_output

from tsgg.cli.logs import log
from tsgg.cli.shell import signals_deferred
from tsgg.cli.texts import checked, decoded
from tsgg.platform import state_folder
from tsgg.settings import settings

Reader = Callable[[], "str | None"]
"""One input, of one line or several; None at the end. Raises `UsageError` for what is not UTF-8, and `KeyboardInterrupt`."""


def reader(commands: Sequence[str]) -> Reader:
    """Of standard input. `commands` are completed with Tab."""
    return _Terminal(commands) if sys.stdin.isatty() and sys.stderr.isatty() else _lines


def history_file() -> Path | None:
    """Where inputs are remembered; None where TSGG_HISTORY is empty."""
    if settings.history is not None:
        return Path(settings.history).expanduser() if settings.history else None
    return state_folder() / "tsgg" / "chat_history"


def _lines() -> str | None:
    binary = getattr(sys.stdin, "buffer", None)
    line = binary.readline() if binary is not None else sys.stdin.readline().encode()
    return decoded(line, "this line of standard input") if line else None


class _Terminal:
    """Enter sends, Alt-Enter begins a new line, and so does a line break in what is pasted."""

    def __init__(self, commands: Sequence[str]) -> None:
        keys = KeyBindings()

        @keys.add("enter")
        def send(event: Any) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def new_line(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        path = history_file()
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=keys,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            history=None if path is None else _History(path),
            output=create_output(sys.stderr),  # standard output is for answers alone
        )

    def __call__(self) -> str | None:
        self._over = False
        try:
            with signals_deferred(self._end):
                text = self._session.prompt(pre_run=self._leave)
            return checked(text, "this input")
        except EOFError:
            return None

    def _end(self) -> None:
        """Ends the prompt, from a signal's handler: at once where it runs, else as soon as it does."""
        self._over = True
        if (loop := self._session.app.loop) is not None:
            loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        app = self._session.app
        if self._over and app.future is not None and not app.future.done():
            app.exit(exception=EOFError)


class _History(FileHistory):
    """A history that cannot be kept is told of once and does not end the conversation."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))  # for nobody else's eyes
            self._kept = True
        except OSError as error:
            self._fail(error)

    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings() if self._kept else []
        except OSError as error:
            self._fail(error)
            return []

    def store_string(self, string: str) -> None:
        try:
            if self._kept:
                super().store_string(string)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._kept = False
        log.warning("the history of inputs is not kept: %s (TSGG_HISTORY names another file, or none)", error)
