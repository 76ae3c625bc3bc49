"""`tsgg generate`: continue a text."""

from __future__ import annotations

import argparse
import sys

from tsgg.cli.arguments import add_display, add_model, add_sampling, print_json, sampling, text_of, wants_statistics
from tsgg.cli.bars import Bars
from tsgg.cli.loading import load, say
from tsgg.cli.logprobs import table
from tsgg.cli.texts import read_prompt
from tsgg.cli.writer import Writer, write_chunks

HELP = "continue a text and say what speculation did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue; - reads standard input")
    parser.add_argument("-f", "--file", metavar="PATH", help="read the prompt from a file")
    parser.add_argument("--profile", action="store_true", help="where the time of forwards went, on stderr")
    add_display(parser)
    add_model(parser)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    prompt, params = read_prompt(arguments.prompt, arguments.file), sampling(arguments)
    prompt = text_of(arguments, prompt, "the prompt")
    with Bars() as bars, load(arguments, bars) as llm:
        if arguments.json:
            print_json(llm.generate(prompt, params))
            return 0
        profile = llm.model.profile() if arguments.profile else None
        write_chunks(llm.stream(prompt, params), Writer(sys.stdout), arguments.show_drafts)
        assert llm.last is not None
        if llm.last.logprobs:
            say(table(llm.last.logprobs, llm.tokenizer))
        if wants_statistics(arguments):
            say(llm.last.statistics())
        if profile is not None:
            say(profile.report())
    return 0
