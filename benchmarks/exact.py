"""`python -m benchmarks exact`: every speculative stream against the plain one, over windows, governed and fixed, prompts, drafters
and modes.

Prints a line per case that differs and one JSON line; exits 1 if any differs.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.workloads import WORKLOADS
from tsgg import LLM, SamplingParams

WINDOWS = (1, 2, 3, 4, 7, 8, 15, 16)
POLICIES = [(window, False) for window in WINDOWS] + [(8, True), (64, True)]  # ceiling, governed
MODES = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, seed=5, ignore_eos=True, repetition_penalty=1.05),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name [smollm2-135m]")
    parser.add_argument("--drafters", default="ngram,suffix", help="comma-separated speculation types [%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, help="generated per case [%(default)s]")
    parser.add_argument("--threads", type=int, default=2)


def main(arguments: argparse.Namespace) -> int:
    cases = different = 0
    with LLM(arguments.model, n_ctx=4096, n_threads=arguments.threads) as llm:
        for load in WORKLOADS.values():
            ids = llm.tokenize(load.prompt)
            for mode, params in MODES.items():
                plain = llm.generate(ids, params, max_tokens=arguments.tokens, speculation=None)
                for drafter in arguments.drafters.split(","):
                    for window, adaptive in POLICIES:
                        spec = {"type": drafter, "draft": window, "adaptive": adaptive}
                        fast = llm.generate(ids, params, max_tokens=arguments.tokens, speculation=spec)
                        cases += 1
                        if fast.tokens != plain.tokens:
                            different += 1
                            pairs = enumerate(zip(fast.tokens, plain.tokens, strict=True))
                            at = next(i for i, (a, b) in pairs if a != b)
                            kind = "governed" if adaptive else "fixed"
                            print(f"{load.name}, {mode}, {drafter}, {kind} window {window}: differs at token {at}")
    print(json.dumps({"cases": cases, "different": different}))
    return 1 if different else 0
