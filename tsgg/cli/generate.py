"""`tsgg generate`: continue a text."""

from __future__ import annotations

import argparse
import sys

from tsgg.cli.arguments import add_model, add_sampling, add_statistics, print_json, sampling, text_of
from tsgg.cli.bars import Bars
from tsgg.cli.loading import load, say
from tsgg.cli.logprobs import table
from tsgg.cli.texts import read_prompt

HELP = "continue a text and say what speculation did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue; - reads standard input")
    parser.add_argument("-f", "--file", metavar="PATH", help="read the prompt from a file")
    parser.add_argument("--profile", action="store_true", help="where the time of forwards went, on stderr")
    add_statistics(parser)
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
        for chunk in llm.stream(prompt, params):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        print(flush=True)
        assert llm.last is not None
        if llm.last.logprobs:
            say(table(llm.last.logprobs, llm.tokenizer))
        if sys.stderr.isatty() if arguments.stats is None else arguments.stats:
            say(llm.last.statistics())
        if profile is not None:
            say(profile.report())
    return 0
