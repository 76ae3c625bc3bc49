"""`python -m benchmarks promises`: what speculation must not cost, on one model.

* prose: decode rate with speculation over plain, over the first 64 tokens and over 512; greedy, where a small model soon repeats
  itself, and drawn at temperature 1, where it does not.
* TTFT: time to the first token with speculation over plain, at two prompt lengths, nothing cached.
* second turn: share of drafts accepted in a second turn, whose prefix is in memory already, beside the first; fixed window.

Plain and speculative alternate, first the one, then the other; medians of paired ratios. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.quiet import describe_machine, require_quiet
from benchmarks.workloads import CODE, LOG, WORKLOADS
from tsgg import LLM, UsageError

PARTS = ("prose", "drawn", "ttft", "turn")
EARLY = 64  # tokens
AGAIN = "\n\n# The same file once more:\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name [smollm2-135m]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--drafter", default="auto", help="speculation type [%(default)s]")
    parser.add_argument("--prompts", default="1024,4096", help="prompt lengths in tokens, for TTFT [%(default)s]")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="alternations [%(default)s]")
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")


def main(arguments: argparse.Namespace) -> int:
    require_quiet(arguments.force)
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    lengths = [int(length) for length in arguments.prompts.split(",")]
    with LLM(arguments.model, n_ctx=max(lengths) + 1024, n_threads=arguments.threads) as llm:
        arms = {"plain": None, "speculative": {"type": arguments.drafter}}
        report: dict[str, Any] = {
            "scenario": "promises", "model": llm.model.file.paths[0].name, "drafter": arguments.drafter,
            "rounds": arguments.rounds, "machine": describe_machine(),
        }  # fmt: skip
        measure = {
            "prose": lambda: _prose(llm, arms, arguments.rounds, 0.0),
            "drawn": lambda: _prose(llm, arms, arguments.rounds, 1.0),
            "ttft": lambda: _ttft(llm, arms, lengths, arguments.rounds),
            "turn": lambda: _second_turn(llm, arguments.drafter),
        }
        report |= {part: measure[part]() for part in parts}
    print(json.dumps(report))
    return 0 if all(report.get(part, {}).get("identical", True) for part in PARTS) else 1


def _prose(llm: LLM, arms: dict[str, Any], rounds: int, temperature: float) -> dict[str, Any]:
    load, ratios = WORKLOADS["prose"], {EARLY: list[float](), WORKLOADS["prose"].tokens: list[float]()}
    identical = True
    for number in range(rounds + 1):
        seconds: dict[str, list[float]] = {}
        streams = set()
        for name in _turned(arms, number):
            llm.forget()
            stamps, tokens = [], []
            for chunk in llm.stream(
                load.prompt,
                max_tokens=load.tokens,
                temperature=temperature,
                seed=number,
                ignore_eos=True,
                speculation=arms[name],
            ):
                stamps.append(time.perf_counter())
                tokens.append(chunk.token)
            seconds[name] = [stamps[count - 1] - stamps[0] for count in ratios]
            streams.add(tuple(tokens))
        identical &= len(streams) == 1
        if number:  # the first round builds graphs and learns costs
            for i, values in enumerate(ratios.values()):
                values.append(seconds["plain"][i] / seconds["speculative"][i])
    for count, values in ratios.items():
        spread = f"({min(values):.3f} to {max(values):.3f})"
        print(f"prose at temperature {temperature}, {count} tokens: {statistics.median(values):.3f}x of plain {spread}")
    return {
        "identical": identical,
        **{str(count): statistics.median(values) for count, values in ratios.items()},
    }


def _ttft(llm: LLM, arms: dict[str, Any], lengths: list[int], rounds: int) -> dict[str, float]:
    text, result = llm.tokenize(LOG + CODE), {}
    for length in lengths:
        ids, ratios = (text * (length // len(text) + 1))[:length], []
        for number in range(rounds + 1):
            seconds = {}
            for name in _turned(arms, number):
                llm.forget()
                seconds[name] = llm.generate(ids, max_tokens=4, temperature=0, speculation=arms[name]).timings.prefill
            if number:
                ratios.append(seconds["speculative"] / seconds["plain"])
        result[str(length)] = statistics.median(ratios)
        print(f"TTFT at {length} tokens: {result[str(length)]:.3f}x of plain ({min(ratios):.3f} to {max(ratios):.3f})")
    return result


def _second_turn(llm: LLM, drafter: str) -> dict[str, Any]:
    llm.forget()
    prompt, shares = llm.tokenize(WORKLOADS["quote-prompt"].prompt), []
    for _ in range(2):
        answer = llm.generate(
            prompt, max_tokens=192, temperature=0, ignore_eos=True, speculation={"type": drafter, "adaptive": False}
        )
        shares.append(answer.speculation.acceptance)
        prompt = [*prompt, *answer.tokens, *llm.tokenize(AGAIN + CODE[:300], add_bos=False)]
    print(
        f"drafts accepted: first turn {shares[0]:.1%}, second {shares[1]:.1%} ({answer.usage.cached_tokens} tokens cached)"
    )
    return {"first": shares[0], "second": shares[1], "cached": answer.usage.cached_tokens}


def _turned(arms: dict[str, Any], number: int) -> list[str]:
    """Every other round the other way round: what comes second must not always find the warmer machine."""
    return list(arms)[:: 1 if number % 2 else -1]
