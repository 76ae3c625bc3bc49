"""What a line of a chat means: a command, or something to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tsgg.cli.talk import Talk
from tsgg.errors import UsageError
from tsgg.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Command:
    run: Callable[[str], None]  # with what stands behind its name
    help: str
    argument: str = ""  # as /help shows it


class Commands:
    """Takes lines one by one."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self._table = {
            "/new": Command(self._new, "forget the conversation, but for the system message"),
            "/undo": Command(self._undo, "take the last turn back"),
            "/regen": Command(lambda _: self.talk.ask_again(), "another answer to the last message"),
            "/system": Command(self._system, "set the system message; without TEXT: show it", "[TEXT]"),
            "/save": Command(self._save, "write the conversation to a JSON file", "FILE"),
            "/load": Command(self._load, "go on with a conversation of a file", "FILE"),
            "/stats": Command(lambda _: self.talk.show_statistics(), "what the last turn did"),
            "/help": Command(self._help, "this list"),
            "/quit": Command(lambda _: None, "leave, like Ctrl-D"),
        }

    @property
    def words(self) -> list[str]:
        return list(self._table)

    def take(self, text: str) -> bool:
        """Runs a command or asks; False to leave. "//" begins a message with one "/". Raises `UsageError` for a command that
        does not exist, and what asking raises."""
        if not text.strip():
            return True
        if text.startswith("//"):
            text = text[1:]
        elif text.startswith("/"):
            name, _, argument = text.strip().partition(" ")
            if name in ("/quit", "/exit"):
                return False
            if name not in self._table:
                hint = did_you_mean(name, self._table)
                raise UsageError(f"no command {name}{hint} (/help lists them, // begins a message with a /)")
            self._table[name].run(argument.strip())
            return True
        self.talk.ask(text)
        return True

    def _say(self, text: str) -> None:
        self.talk.notes.line(text)

    def _new(self, _: str) -> None:
        self.talk.conversation.new()
        self._say("(a new conversation)")

    def _undo(self, _: str) -> None:
        self._say(f"(taken back: {self.talk.conversation.undo()})")

    def _system(self, text: str) -> None:
        conversation = self.talk.conversation
        if text:
            conversation.system = text
        self._say(f"(system message: {conversation.system or 'none'})")

    def _save(self, name: str) -> None:
        path = _path(name)
        self.talk.conversation.save(path)
        self._say(f"(saved to {path})")

    def _load(self, name: str) -> None:
        path = _path(name)
        self._say(f"(loaded {self.talk.conversation.load(path)} messages of {path})")

    def _help(self, _: str) -> None:
        for name, command in self._table.items():
            self._say(f"{f'{name} {command.argument}':<15} {command.help}")
        self._say("//...           a message that begins with /")


def _path(name: str) -> Path:
    if not name:
        raise UsageError("name a file")
    return Path(name).expanduser()
