"""`tsgg chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tsgg.cli.arguments import add_model, add_sampling, print_json, sampling
from tsgg.cli.bars import Bars
from tsgg.cli.loading import load
from tsgg.errors import ContextFullError
from tsgg.llm import LLM

HELP = "talk to a model; the conversation is kept between turns"
COMMANDS = """/help    this list
/new     forget the conversation
/stats   what the last turn did
/quit    leave (or end of input)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="ask once and leave")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument("--think", dest="think", action="store_true", default=None, help="ask the template to think")
    thinking.add_argument("--no-think", dest="think", action="store_false", help="ask the template not to think")
    add_model(parser)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    params = sampling(arguments)
    with Bars() as bars, load(arguments, bars) as llm:
        conversation = Conversation(llm, params, arguments.system, arguments.think)
        if arguments.prompt is not None:
            conversation.ask(arguments.prompt, arguments.json)
            return 0
        print(f"{llm!r}\n/help lists the commands", file=sys.stderr)
        while (line := _read()) is not None:
            if line in ("/quit", "/exit"):
                break
            if line.startswith("/"):
                conversation.command(line)
            elif line:
                conversation.ask(line, arguments.json)
    return 0


class Conversation:
    """Messages so far; a turn that fails or is interrupted leaves them as they were."""

    def __init__(self, llm: LLM, params: dict[str, Any], system: str | None, think: bool | None) -> None:
        self.llm, self.params, self.think = llm, params, think
        self.opening: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)

    def ask(self, text: str, as_json: bool) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        if as_json:
            result = self.llm.chat(messages, self.params, enable_thinking=self.think)
            print_json(result)
            answer = result.content
        else:
            answer = self._stream(messages)
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> None:
        if line == "/new":
            self.messages = list(self.opening)
        elif line == "/stats" and self.llm.last is not None:
            print(self.llm.last.statistics(), file=sys.stderr)
        else:
            print(COMMANDS, file=sys.stderr)

    def _stream(self, messages: list[dict[str, Any]]) -> str:
        parts = []
        try:
            for chunk in self.llm.chat(messages, self.params, stream=True, enable_thinking=self.think):
                parts.append(chunk.content)
                sys.stdout.write(chunk.reasoning_content + chunk.content)
                sys.stdout.flush()
        except KeyboardInterrupt:  # the turn ends here, the conversation goes on
            print(file=sys.stderr)
        except ContextFullError as error:
            raise ContextFullError(f"{error} (or type /new)") from error
        print()
        if self.llm.last is not None:
            print(self.llm.last.statistics(), file=sys.stderr)
        return "".join(parts)


def _read() -> str | None:
    """One line of input, or None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
