"""`python -m benchmarks turns`: speculative decoding beside plain decoding on one model, workload by workload.

Arms alternate; every speculative stream is compared with the plain one token for token. Medians of N alternations. Ends in
one JSON line. With --peer, llama-server on the same file, prompt ids, threads and cache type runs plainly and with each
weight-free drafter in the same alternation.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peer import PEER_DRAFTERS, Peer
from benchmarks.quiet import describe_machine, require_quiet
from benchmarks.workloads import WORKLOADS, Workload
from tsgg import LLM, GenerationResult, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name [smollm2-135m]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated [all]")
    parser.add_argument("--drafters", default="auto", help="comma-separated speculation types [%(default)s]")
    parser.add_argument("--draft", type=int, help="window ceiling [8, or what the model prefers]")
    parser.add_argument("--rounds", type=int, default=5, help="alternations [%(default)s]")
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--peer", type=Path, metavar="LLAMA_SERVER", help="path of llama-server")
    parser.add_argument(
        "--private",
        action="store_true",
        help="nobody remembers earlier requests: no shared corpus, a fresh server for each",
    )
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")


def main(arguments: argparse.Namespace) -> int:
    require_quiet(arguments.force)
    names = arguments.workloads.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise UsageError(f"unknown workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    arms = {"plain": None} | {name: _speculation(name, arguments) for name in arguments.drafters.split(",")}
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(arguments.model, n_ctx=arguments.n_ctx, n_threads=arguments.threads))
        path = llm.model.file.paths[0]
        peers: dict[str, Peer] = {}
        for name in PEER_DRAFTERS if arguments.peer is not None else ():
            server = (arguments.peer, path, arguments.threads, arguments.n_ctx)
            peers[name] = Peer(*server, name, fresh=arguments.private)
            stack.callback(peers[name].close)
        rows = [_measure(llm, WORKLOADS[name], arms, peers, arguments.rounds) for name in names]
    report = {
        "model": path.name, "threads": arguments.threads, "rounds": arguments.rounds, "machine": describe_machine(),
        "workloads": {row["workload"]: row for row in rows},
    }  # fmt: skip
    print(json.dumps(report))
    return 0 if all(row["identical"] for row in rows) else 1


def _speculation(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    draft = {} if arguments.draft is None else {"draft": arguments.draft}
    return {"type": name, "shared_corpus": not arguments.private} | draft


def _measure(llm: LLM, load: Workload, arms: dict[str, Any], peers: dict[str, Peer], rounds: int) -> dict[str, Any]:
    before, ids = _prompts(llm, load)
    results: dict[str, list[GenerationResult]] = {name: [] for name in arms}
    theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for number in range(rounds + 1):
        for name, speculation in arms.items():
            llm.forget()
            if before:
                llm.generate(before, max_tokens=1, temperature=0, speculation=speculation)
            result = llm.generate(ids, max_tokens=load.tokens, temperature=0, ignore_eos=True, speculation=speculation)
            if number:  # the first round builds the graphs
                results[name].append(result)
        for name, peer in peers.items():
            answer = peer.generate(ids, load.tokens)
            if number:
                theirs[name].append(answer)
    plain = results["plain"]
    row: dict[str, Any] = {"workload": load.name, "prompt_tokens": len(ids), "identical": True, "arms": {}}
    print(f"{load.name}: {len(ids)} prompt tokens, {load.tokens} generated")
    for name, runs in results.items():
        same = all(run.tokens == plain[0].tokens for run in runs)
        row["identical"] &= same
        spec = runs[-1].speculation
        arm = {
            "tok_s": statistics.median(run.timings.decode_rate for run in runs),
            "spread": _spread([run.timings.decode_rate for run in runs]),
            "ratio": statistics.median(
                run.timings.decode_rate / base.timings.decode_rate for run, base in zip(runs, plain, strict=True)
            ),
            "ttft_ms": 1e3 * statistics.median(run.timings.prefill for run in runs),
            "prefill_tok_s": statistics.median(run.timings.prefill_rate for run in runs),
            "cached_tokens": runs[-1].usage.cached_tokens,
            "drafted": spec.drafted, "accepted": spec.accepted, "tokens_per_verify": spec.tokens_per_verify,
        }  # fmt: skip
        row["arms"][name] = arm
        if not same:
            arm["mismatch"] = _mismatch(llm, ids, load, arms[name], runs[-1], plain[0])
        print(
            f"  {name:14} {arm['tok_s']:7.1f} tok/s ({arm['spread']:3.0%})  {arm['ratio']:5.2f}x  "
            f"TTFT {arm['ttft_ms']:7.1f} ms  drafted {spec.drafted:4} accepted {spec.accepted:4} "
            f"({spec.tokens_per_verify:.2f} per verify)"
        )
        if not same:
            print(f"  STREAM DIFFERS: {arm['mismatch']}")
    if peers:
        row["peer"] = _peer_rows(theirs, row, plain[0].tokens)
    return row


def _prompts(llm: LLM, load: Workload) -> tuple[list[int], list[int]]:
    """What memory holds before, if anything, and the prompt; both as tokens."""
    ids = llm.tokenize(load.prompt, add_bos=None if load.after is None or load.new_chat else False)
    if load.after is None:
        return [], ids
    first = WORKLOADS[load.after]
    asked = llm.tokenize(first.prompt)
    answer = llm.generate(asked, max_tokens=first.tokens, temperature=0, ignore_eos=True, speculation=None)
    before = [*asked, *answer.tokens]
    return before, ids if load.new_chat else [*before, *ids]


def _mismatch(
    llm: LLM, ids: list[int], load: Workload, speculation: Any, run: GenerationResult, plain: GenerationResult
) -> dict[str, Any]:
    """Where two streams part, and by how much each of them preferred its token to the next best."""
    pairs = zip(run.tokens, plain.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run.tokens), len(plain.tokens)))
    margins = []
    for how in (speculation, None):
        llm.forget()
        again = llm.generate(ids, max_tokens=at + 1, temperature=0, ignore_eos=True, speculation=how, logprobs=2)
        best, second = again.logprobs[-1].top
        margins.append(best.logprob - second.logprob)
    return {"token": at, "margin": margins[0], "plain_margin": margins[1]}


def _peer_rows(theirs: dict[str, list[dict[str, Any]]], row: dict[str, Any], tokens: tuple[int, ...]) -> dict[str, Any]:
    table = {}
    for name, answers in theirs.items():
        agreed = next(
            (i for i, (a, b) in enumerate(zip(answers[0]["tokens"], tokens, strict=False)) if a != b), len(tokens)
        )
        table[name] = {
            "tok_s": statistics.median(answer["tok_s"] for answer in answers),
            "drafted": answers[-1]["drafted"], "accepted": answers[-1]["accepted"], "tokens_agreed": agreed,
        }  # fmt: skip
        print(
            f"  llama {name:12} {table[name]['tok_s']:7.1f} tok/s  drafted {table[name]['drafted']:4} "
            f"accepted {table[name]['accepted']:4}  first {agreed} tokens as ours"
        )
    best = max(table, key=lambda name: table[name]["tok_s"])
    ours = max(row["arms"], key=lambda name: row["arms"][name]["tok_s"])
    spec = max((arm["tok_s"] for name, arm in row["arms"].items() if name != "plain"), default=0.0)
    print(
        f"  plain over its plain {row['arms']['plain']['tok_s'] / table['none']['tok_s']:.2f}x, "
        f"ours speculative over its best ({best}) {spec / table[best]['tok_s']:.2f}x, our best is {ours}"
    )
    return table


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)
