"""`tsgg chat`: a conversation in the terminal, or over the lines of a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from tsgg.cli.arguments import add_display, add_model, add_sampling, sampling, text_of, wants_statistics
from tsgg.cli.bars import Bars
from tsgg.cli.chat_commands import Commands
from tsgg.cli.conversation import Conversation
from tsgg.cli.loading import load
from tsgg.cli.shell import MENDABLE, complain
from tsgg.cli.talk import Talk
from tsgg.cli.texts import read_prompt
from tsgg.errors import TsggError, UsageError

HELP = "talk to a model; the conversation is kept between turns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="ask once and leave; - reads standard input")
    parser.add_argument("-f", "--file", metavar="PATH", help="ask what a file says and leave")
    parser.add_argument("-sys", "--system", "--system-prompt", metavar="TEXT", help="system message")
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument("--think", dest="think", action="store_true", default=None, help="ask the template to think")
    thinking.add_argument("--no-think", dest="think", action="store_false", help="ask the template not to think")
    add_display(parser)
    add_model(parser)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    params, once, system = sampling(arguments), None, None
    if arguments.prompt is not None or arguments.file is not None:
        once = text_of(arguments, read_prompt(arguments.prompt, arguments.file), "the prompt")
    if arguments.system is not None:
        system = text_of(arguments, arguments.system, "the system message")
    with Bars() as bars, load(arguments, bars) as llm:
        if llm.template is None:
            raise UsageError(f"{llm.model.file.paths[0].name} has no chat template: use tsgg generate")
        conversation = Conversation(llm, params, system, arguments.think)
        talk = Talk(conversation, bars, wants_statistics(arguments), arguments.show_drafts, arguments.json)
        if once is not None:
            talk.ask(once)
            return 0
        from tsgg.cli.editor import reader  # prompt_toolkit is loaded only where somebody types

        commands = Commands(talk)
        read = reader(commands.words)
        if sys.stdin.isatty():
            talk.notes.line(
                "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer; /help lists the commands"
            )
        return _loop(read, commands)


def _loop(read: Callable[[], str | None], commands: Commands) -> int:
    """Until the end of input, or /quit. An error is one line, and the conversation goes on as if nothing had been asked.

    Status 2 where that happened to a line of a pipe, which nobody could repeat.
    """
    terminal, failed, notes = sys.stdin.isatty(), False, commands.talk.notes
    while True:
        text = None
        try:
            text = read()
            if text is None or not commands.take(text):
                break
        except TsggError as error:
            complain(str(error))
            failed = True
        except KeyboardInterrupt:
            if not terminal:
                raise
            notes.line("(Ctrl-D or /quit leaves)" if text is None else "(stopped: this turn is dropped)", "dim")
    return MENDABLE if failed and not terminal else 0
