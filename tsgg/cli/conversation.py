"""A conversation with a model: the messages so far, and what may be done with them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tsgg.errors import UsageError
from tsgg.llm import LLM
from tsgg.results import ChatChunk, ChatResult

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages that end with a question, and how the answer is drawn."""

    messages: list[Message]
    params: Mapping[str, Any]


class Conversation:
    """Messages change when an answer is whole: a turn that fails, or that is left in the middle, was never there."""

    def __init__(
        self, llm: LLM, params: Mapping[str, Any], system: str | None = None, think: bool | None = None
    ) -> None:
        self.llm, self.params, self.think = llm, params, think
        self.messages: list[Message] = []
        self._file: Path | None = None  # which this conversation was saved to or loaded from
        self._again = 0  # answers that were asked for once more
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = rest if text is None else [{"role": "system", "content": text}, *rest]

    def question(self, text: str) -> Turn:
        """The turn that a user's message begins."""
        return Turn([*self.messages, {"role": "user", "content": text}], self.params)

    def last_question(self) -> Turn:
        """The last turn once more, in place of the answer that is there. A fixed seed counts up."""
        asked = self.messages[: self._last_question() + 1]
        self._again += 1
        seed = self.params.get("seed")
        return Turn(asked, self.params if seed is None else {**self.params, "seed": seed + self._again})

    def stream(self, turn: Turn) -> Generator[ChatChunk]:
        """The answer, as it comes."""
        parts: list[str] = []
        stream = self.llm.chat(turn.messages, dict(turn.params), stream=True, enable_thinking=self.think)
        with closing(cast("Generator[ChatChunk]", stream)) as chunks:
            for chunk in chunks:
                parts.append(chunk.content)
                yield chunk
        self._answered(turn, "".join(parts))

    def whole(self, turn: Turn) -> ChatResult:
        """The answer in one piece."""
        result = self.llm.chat(turn.messages, dict(turn.params), enable_thinking=self.think)
        self._answered(turn, result.content)
        return result

    def undo(self) -> str:
        """Takes the last question back, with its answer; returns it."""
        at = self._last_question()
        text, self.messages = str(self.messages[at]["content"]), self.messages[:at]
        return text

    def new(self) -> None:
        """Forgets everything but the system message."""
        system, self.messages = self.system, []
        self.system, self._file = system, None

    def save(self, path: Path) -> None:
        """Writes the messages as JSON, the whole file or nothing. Raises `UsageError`, also for a file that is not this
        conversation's."""
        if path.exists() and (self._file is None or not path.samefile(self._file)):
            raise UsageError(f"{path} exists and was not written by this conversation: give another name")
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        try:
            _write(path, f"{text}\n")
        except (OSError, UnicodeEncodeError) as error:
            raise UsageError(f"cannot save to {path}: {error}") from error
        self._file = path

    def load(self, path: Path) -> int:
        """Goes on with the messages of a file; returns how many. Raises `UsageError`; then nothing has changed."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot load {path}: {error}") from error
        messages = value.get("messages") if isinstance(value, dict) else value
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise UsageError(f'{path} holds no messages; expected a list of {{"role": ..., "content": ...}} with texts')
        self.messages, self._file = messages, path
        return len(messages)

    def _last_question(self) -> int:
        """Index of the user's last message. Raises `UsageError` where there is none."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "user":
                return at
        raise UsageError("nothing has been asked yet")

    def _answered(self, turn: Turn, text: str) -> None:
        self.messages = [*turn.messages, {"role": "assistant", "content": text}]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _write(path: Path, text: str) -> None:
    """The file appears whole, in place of an older one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
