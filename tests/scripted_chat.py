"""An LLM whose answers are a function of the last message: what tests of the chat talk to. As a program: a chat with it.

echo: anything else; says how many messages it was given
think: reasoning before the answer
drafts: every second word comes from a drafter
long: goes on until it is stopped
late: raises in the middle of its answer
full: has no room
control: an escape sequence in the answer
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tsgg.errors import ContextFullError, TsggError
from tsgg.results import ChatChunk, Chunk


class ScriptedLLM:
    """The part of `tsgg.LLM` that a chat uses."""

    def __init__(self, template: object = "a template") -> None:
        self.template, self.last = template, None
        self.model = SimpleNamespace(file=SimpleNamespace(paths=[Path("scripted.gguf")]))
        self.asked: list[tuple[list[Mapping[str, Any]], dict[str, Any]]] = []
        self.left = 0  # streams that were closed before their end

    def __enter__(self) -> ScriptedLLM:
        return self

    def __exit__(self, *_: object) -> None: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: dict[str, Any],
        *,
        stream: bool = False,
        enable_thinking: bool | None = None,
    ) -> Any:
        self.asked.append((list(messages), params))
        text = str(messages[-1]["content"])
        if text == "full":
            raise ContextFullError("the prompt has 9 tokens and the context holds 8: shorten it")
        if stream:
            return self._stream(text, len(messages), params)
        whole = "".join(chunk.content for chunk in self._stream(text, len(messages), params))
        return SimpleNamespace(content=whole)

    def _stream(self, text: str, count: int, params: dict[str, Any]) -> Generator[ChatChunk]:
        end = "context" if text == "end" else "stop"
        self.last = SimpleNamespace(statistics=lambda: f"statistics of {text!r}")  # type: ignore[assignment]
        try:
            if text == "think":
                yield chunk("", "pondering ")
                yield chunk("", "this")
                yield chunk("the answer")
            elif text == "drafts":
                for i, word in enumerate(("one ", "two ", "three ", "four")):
                    yield chunk(word, drafted=bool(i % 2))
            elif text == "control":
                yield chunk("a\x1b]0;title\x07b\rc\td")
            elif text == "late":
                yield chunk("half an ")
                raise TsggError("the engine's step failed")
            elif text == "long":
                while True:
                    yield chunk("word ")
                    time.sleep(0.005)
            else:
                seed = f" seed {params['seed']}" if "seed" in params else ""
                yield chunk(f"echo {text!r} of {count}{seed}")
            yield chunk("", end=end)
        except GeneratorExit:
            self.left += 1
            raise


def chunk(content: str, reasoning: str = "", drafted: bool = False, end: str | None = None) -> ChatChunk:
    return ChatChunk(content, reasoning, Chunk(content or reasoning, 1, None, "drafted" if drafted else "drawn", end))


if __name__ == "__main__":
    from tsgg.cli import chat, main

    chat.load = lambda arguments, bars: ScriptedLLM()  # type: ignore[assignment, return-value]
    sys.exit(main(["chat", *sys.argv[1:]]))
