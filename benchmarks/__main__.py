"""`python -m benchmarks`: every scenario is a module of this package with `add_arguments(parser)` and `main(arguments)`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from tsgg.errors import TsggError, UsageError

SCENARIOS = {
    "golden": "compare with the golden answers of another engine",
    "turns": "speculative beside plain decoding, workload by workload; beside llama-server with --peer",
    "conc": "1 to 8 requests side by side; beside llama-server with --llama-server",
    "soak": "thousands of short requests, some cancelled at random moments: none lost, memory flat",
    "races": "models closed, dropped and interrupted while they generate: no crash, the next answer right",
    "exact": "every window, prompt, drafter and mode: is the speculative stream the plain one",
    "diagnose": "how far a verify row is from the one-row decode, teacher-forced",
    "compare": "two reports of one scenario, number by number",
    "regret": "the governed window against every fixed one, on a model; on simulated machines with --simulate",
    "replay": "drafters and windows on recorded text, on machines given by their curves: no noise",
    "promises": "what speculation must not cost: prose, time to the first token, a second turn",
    "heads": "a draft head beside plain decoding, window by window; beside llama-server with --peer",
    "synthetic": "write a large model file with real shapes and random weights",
    "steps": "what the engine adds to a step, for 1 to 8 requests side by side",
    "speed": "decode, prefill, verify curve, Python time; beside llama-bench with --peer",
}


def main(argv: list[str] | None = None) -> int:
    """Exit status of the scenario; 2 for wrong arguments, 1 for any other `TsggError`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measurements and checks of tsgg.")
    commands = parser.add_subparsers(dest="scenario", required=True, metavar="SCENARIO")
    for name, summary in SCENARIOS.items():
        module = import_module(f"benchmarks.{name}")
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except TsggError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main())
