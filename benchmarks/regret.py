"""`python -m benchmarks regret`: the governed window against plain decoding and every fixed window, on one model.

Arms alternate on the same prompts; every stream must be the plain one. A workload's *ceiling* is what the best fixed window
could give if nothing but its forwards took time: tokens over the sum of T(rows)/T(1) of its steps, with acceptance from that
window's own run and T from the verify curve at the prompt's depth. *Regret* is the governor's time over that of the best fixed
window, plain decoding included, which is known in hindsight only. Ends in one JSON line.

With --simulate nothing is loaded: see benchmarks/simulation.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from benchmarks.quiet import describe_machine, require_quiet
from benchmarks.simulation import simulate
from benchmarks.speed import VERIFY, Bench
from benchmarks.workloads import WORKLOADS, Workload
from tsgg import LLM, GenerationResult, UsageError
from tsgg.model import Model
from tsgg.pull import resolve_model

GOVERNED = "governed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name [smollm2-135m]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workloads", default="quote-prompt,code-edit,prose", help="comma-separated [%(default)s]")
    parser.add_argument("--drafter", default="auto", help="speculation type [%(default)s]")
    parser.add_argument("--windows", default="1,2,3,5,7,8", help="fixed windows, comma-separated [%(default)s]")
    parser.add_argument("--draft", type=int, default=8, help="the governor's ceiling [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="alternations [%(default)s]")
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")
    parser.add_argument("--simulate", action="store_true", help="synthetic machines and texts: nothing is loaded")
    parser.add_argument("--seeds", type=int, default=40, help="simulated texts of each kind [%(default)s]")
    parser.add_argument("--curve", metavar="JSON", help='measured {"rows": ms} in place of the simulated "cpu"')


def main(arguments: argparse.Namespace) -> int:
    if arguments.simulate:
        print(json.dumps({"scenario": "regret"} | simulate(arguments.seeds, _curve(arguments.curve))))
        return 0
    require_quiet(arguments.force)
    names, windows = arguments.workloads.split(","), [int(w) for w in arguments.windows.split(",")]
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise UsageError(f"unknown workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    path = resolve_model(arguments.model)
    arms, report = _arms(arguments.drafter, windows, arguments.draft), {}
    options = {"n_ctx": arguments.n_ctx, "n_threads": arguments.threads}
    with LLM(path, **options) as llm, Model(path, **options) as model:
        bench = Bench(model)
        for name in names:
            times = _times(bench, len(llm.tokenize(WORKLOADS[name].prompt)), max(windows) + 1, arguments.rounds)
            report[name] = _report(name, _run(llm, WORKLOADS[name], arms, arguments.rounds), times, windows)
    print(json.dumps({
        "scenario": "regret", "model": path.name, "drafter": arguments.drafter, "threads": arguments.threads,
        "rounds": arguments.rounds, "machine": describe_machine(), "workloads": report,
    }))  # fmt: skip
    return 0 if all(row["identical"] for row in report.values()) else 1


def _arms(drafter: str, windows: list[int], ceiling: int) -> dict[str, Any]:
    # No shared corpus: every round must meet the drafts of the first.
    base = {"type": drafter, "shared_corpus": False}
    fixed = {str(w): base | {"draft": w, "adaptive": False} for w in windows}
    return {"plain": None, GOVERNED: base | {"draft": ceiling}} | fixed


def _run(llm: LLM, load: Workload, arms: dict[str, Any], rounds: int) -> dict[str, list[GenerationResult]]:
    """Results of every arm, round by round; the first round builds the graphs and teaches the governor what steps cost."""
    ids, results = llm.tokenize(load.prompt), {name: list[GenerationResult]() for name in arms}
    for number in range(rounds + 1):
        for name, speculation in arms.items():
            llm.forget()
            result = llm.generate(ids, max_tokens=load.tokens, temperature=0, ignore_eos=True, speculation=speculation)
            if number:
                results[name].append(result)
    return results


def _times(bench: Bench, depth: int, most: int, rounds: int) -> list[float]:
    """[rows]: milliseconds of a verify of so many rows, medians."""
    samples: list[list[float]] = [[] for _ in range(most + 1)]
    for _ in range(rounds):
        for rows in range(1, most + 1):
            samples[rows] += bench.rows(depth, rows, VERIFY)
    return [0.0] + [1e3 * statistics.median(seconds) for seconds in samples[1:]]


def _report(
    name: str, runs: dict[str, list[GenerationResult]], times: list[float], windows: list[int]
) -> dict[str, Any]:
    plain = [run.timings.decode_rate for run in runs["plain"]]
    rates = {arm: statistics.median(r / p for r, p in zip(_rates(results), plain, strict=True))
             for arm, results in runs.items()}  # fmt: skip
    ceilings = {w: _ceiling(runs[str(w)][-1], times) for w in windows}
    best_ceiling = max(1.0, *ceilings.values())
    best = max((str(w) for w in windows), key=lambda arm: rates[arm])
    regrets = [max(_rates(runs[best])[i], plain[i]) / rate - 1.0 for i, rate in enumerate(_rates(runs[GOVERNED]))]
    identical = all(run.tokens == runs["plain"][0].tokens for results in runs.values() for run in results)
    print(f"{name}: plain {statistics.median(plain):.1f} tok/s{'' if identical else '  STREAMS DIFFER'}")
    print(f"  T(n)/T(1): {' '.join(f'{n}:{t / times[1]:.2f}' for n, t in enumerate(times) if n)}")
    for w in windows:
        spec = runs[str(w)][-1].speculation
        print(
            f"  window {w:2}: E {spec.tokens_per_verify:.2f} in {spec.verifies} verifies and {spec.plain_steps} plain steps, "
            f"ceiling {ceilings[w]:.2f}x, realised {rates[str(w)]:.2f}x"
        )
    spec = runs[GOVERNED][-1].speculation
    print(
        f"  governed : {rates[GOVERNED]:.2f}x ({_spread(_rates(runs[GOVERNED])):.0%}), {rates[GOVERNED] / best_ceiling:.0%} of the "
        f"ceiling; regret {statistics.median(regrets):.1%} ({min(regrets):.1%} to {max(regrets):.1%}); "
        f"E {spec.tokens_per_verify:.2f} in {spec.verifies} of {spec.steps} steps"
    )
    return {
        "identical": identical, "plain_tok_s": statistics.median(plain), "ratios": rates, "ceilings": ceilings,
        "of_ceiling": rates[GOVERNED] / best_ceiling, "regret": statistics.median(regrets), "regrets": regrets,
        "best_window": best, "ms": times,
    }  # fmt: skip


def _ceiling(run: GenerationResult, times: list[float]) -> float:
    """Tokens over forwards in plain steps: what a run would gain if nothing else took time."""
    spec = run.speculation
    drafted = spec.drafted_per_position
    verifies = [drafted[i] - (drafted[i + 1] if i + 1 < len(drafted) else 0) for i in range(len(drafted))]
    steps = spec.plain_steps + sum(count * times[i + 2] / times[1] for i, count in enumerate(verifies))
    return spec.emitted / steps if steps else 1.0


def _rates(results: list[GenerationResult]) -> list[float]:
    return [result.timings.decode_rate for result in results]


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def _curve(text: str | None) -> dict[int, float] | None:
    if text is None:
        return None
    try:
        return {int(rows): float(ms) for rows, ms in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f'--curve is no JSON object such as {{"1": 7.4, ..., "17": 61.0}}: {error}') from None
