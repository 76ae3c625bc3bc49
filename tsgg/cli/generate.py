"""`tsgg generate`: continue a text."""

from __future__ import annotations

import argparse
import sys

from tsgg.cli.arguments import add_model, add_sampling, load, print_json, read_prompt, sampling

HELP = "continue a text and say what speculation did"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue; - reads standard input")
    parser.add_argument("-f", "--file", metavar="PATH", help="read the prompt from a file")
    parser.add_argument("--no-stats", action="store_true", help="no statistics line on stderr")
    parser.add_argument("--profile", action="store_true", help="where the time of forwards went, on stderr")
    add_model(parser)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    prompt, params = read_prompt(arguments.prompt, arguments.file), sampling(arguments)
    with load(arguments) as llm:
        if arguments.json:
            print_json(llm.generate(prompt, params))
            return 0
        profile = llm.model.profile() if arguments.profile else None
        stream = llm.stream(prompt, params)
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        print()
        if not arguments.no_stats and llm.last is not None:
            print(llm.last.statistics(), file=sys.stderr)
        if profile is not None:
            print(profile.report(), file=sys.stderr)
    return 0
