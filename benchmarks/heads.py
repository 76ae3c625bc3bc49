"""`python -m benchmarks heads`: a draft head on one model: tokens per verify and speed by window, and where the time goes.

Arms alternate; every speculative stream is compared with the plain one. With --peer, llama-server runs plainly and with its
own driver of the head on the same file, prompt ids and threads, at the same windows and without a confidence gate on either
side. Then the parts: the first token with and without the prompt's rows given to the head, the head, the verify and the commit of a
step, and what keeping the state after every row costs. Medians, spread as (max - min) / median. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.peer import Peer
from benchmarks.quiet import describe_machine, require_quiet
from tsgg import LLM, GenerationResult, UsageError
from tsgg.forward import Key
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.pull import resolve_model
from tsgg.speculative.draft_head import DraftHeadSpeculator
from tsgg.speculative.protocol import Batch, Want

PLAIN, VERIFY = Want("last"), Want("all", "all")
VERIFY_ROWS = (2, 4, 8, 16)
STEPS = 12  # per alternation
DEPTH = 128  # tokens in memory where steps are timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="path or name of a model with a draft head")
    parser.add_argument("--draft-model", type=Path, metavar="GGUF", help="the draft head, where it has its own file")
    parser.add_argument("--windows", default="1,2,3", help="tokens drafted per step, comma-separated [%(default)s]")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens, drawn at random [%(default)s]")
    parser.add_argument("--tokens", type=int, default=96, help="tokens generated [%(default)s]")
    parser.add_argument(
        "--long", type=int, default=512, help="prompt tokens where the first token is timed [%(default)s]"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="alternations [%(default)s]")
    parser.add_argument("--peer", type=Path, metavar="LLAMA_SERVER", help="path of llama-server")
    parser.add_argument("--peer-type", default="draft-mtp", help="its name for such a head [%(default)s]")
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")


def main(arguments: argparse.Namespace) -> int:
    require_quiet(arguments.force)
    try:
        windows = [int(window) for window in arguments.windows.split(",")]
    except ValueError:
        raise UsageError(f"--windows is {arguments.windows!r}, expected numbers such as 1,2,3") from None
    path = resolve_model(arguments.model)
    report: dict[str, Any] = {
        "model": path.name, "threads": arguments.threads, "rounds": arguments.rounds, "machine": describe_machine(),
    }  # fmt: skip
    context = max(arguments.long, arguments.prompt) + arguments.tokens + 64
    with LLM(path, n_ctx=context, n_threads=arguments.threads, speculation="off") as llm, ExitStack() as stack:
        peers = _peers(stack, arguments, path, windows, context) if arguments.peer else {}
        report["windows"] = _windows(llm, peers, windows, arguments)
        report["first token"] = _first_token(llm, arguments)
    with ExitStack() as stack:
        # The plain steps of a lone sequence copy no recurrent state, those of several do.
        pair = [stack.enter_context(Model(path, n_ctx=context, n_seq=n, n_threads=arguments.threads)) for n in (1, 2)]
        report["steps"] = _steps(pair[0], pair[1], arguments.rounds)
    print(json.dumps(report))
    return 0 if report["windows"]["identical"] else 1


# -- streams -----------------------------------------------------------------------------------------------------------


def _windows(llm: LLM, peers: Mapping[int, Peer], windows: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Every window beside plain decoding (window 0), and the peer at the same one."""
    ids = _prompt(llm.model, arguments.prompt)
    ours: dict[int, list[GenerationResult]] = {window: [] for window in (0, *windows)}
    theirs: dict[int, list[dict[str, Any]]] = {window: [] for window in peers}
    commits: dict[int, list[float]] = {window: [] for window in ours}  # seconds of a generation
    for number in range(arguments.rounds + 1):
        for window in ours:
            llm.forget()
            with _timed_commits() as spent:
                result = _generate(llm, ids, window, arguments)
            if number:  # the first round builds the graphs
                ours[window].append(result)
                commits[window].append(spent[0])
            if window in peers:
                answer = peers[window].generate(ids, arguments.tokens)
                if number:
                    theirs[window].append(answer)
    plain = ours[0]
    table: dict[str, Any] = {"identical": True}
    print(f"{len(ids)} prompt tokens, {arguments.tokens} generated")
    for window, runs in ours.items():
        same = all(run.tokens == plain[0].tokens for run in runs)
        table["identical"] &= same
        spec = runs[-1].speculation
        rates = [run.timings.decode_rate for run in runs]
        row: dict[str, Any] = {
            "tok_s": statistics.median(rates), "spread": _spread(rates),
            "ratio": statistics.median(r / p.timings.decode_rate for r, p in zip(rates, plain, strict=True)),
            "drafted": spec.drafted, "accepted": spec.accepted, "tokens_per_verify": spec.tokens_per_verify,
        }  # fmt: skip
        name = f"window {window}" if window else "plain"
        line = f"{name:9} {row['tok_s']:7.1f} tok/s ({row['spread']:3.0%}) {row['ratio']:5.2f}x"
        if window and spec.verifies:
            row |= _split(runs, commits[window])
            line += (
                f"  {spec.tokens_per_verify:.2f} per verify ({spec.accepted} of {spec.drafted}): "
                f"head {row['head_ms']:.1f} + verify {row['verify_ms']:.1f} + commit {row['commit_ms']:.2f} ms"
            )
        if window in theirs:
            row["peer"] = _beside(theirs[window], rates, plain[0].tokens)
            peer = row["peer"]
            line += (
                f"  | peer {peer['tok_s']:7.1f} ({peer['spread']:3.0%}), {peer['accepted']} of {peer['drafted']}, "
                f"ours over it {peer['ratio']:.2f}x, {peer['agreed']} tokens as ours"
            )
        print(line if same else f"{line}  STREAM DIFFERS", flush=True)
        table[name] = row
    return table


def _generate(
    llm: LLM, ids: list[int], window: int, arguments: argparse.Namespace, tokens: int | None = None
) -> GenerationResult:
    speculation: dict[str, Any] = {"enabled": False}
    if window:
        speculation = {"type": "draft-head", "draft": window, "pmin": 0.0, "adaptive": False}
    if window and arguments.draft_model is not None:
        speculation["draft_model"] = str(arguments.draft_model)
    return llm.generate(
        ids, max_tokens=tokens or arguments.tokens, temperature=0, ignore_eos=True, speculation=speculation
    )


def _split(runs: list[GenerationResult], commits: list[float]) -> dict[str, float]:
    """Milliseconds of a step, by part."""
    head, verify, commit = [], [], []
    for run, seconds in zip(runs, commits, strict=True):
        spec = run.speculation
        each = seconds / max(1, spec.steps)
        head.append(1e3 * spec.draft_seconds / spec.verifies)
        commit.append(1e3 * each)
        verify.append(1e3 * (spec.verify_seconds / spec.verifies - each))
    return {
        "head_ms": statistics.median(head),
        "verify_ms": statistics.median(verify),
        "commit_ms": statistics.median(commit),
    }


def _beside(answers: list[dict[str, Any]], rates: list[float], tokens: tuple[int, ...]) -> dict[str, Any]:
    theirs = [answer["tok_s"] for answer in answers]
    pairs = zip(answers[0]["tokens"], tokens, strict=False)
    return {
        "tok_s": statistics.median(theirs), "spread": _spread(theirs), "drafted": answers[-1]["drafted"],
        "accepted": answers[-1]["accepted"],
        "ratio": statistics.median(ours / peer for ours, peer in zip(rates, theirs, strict=True)),
        "agreed": next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens)),
    }  # fmt: skip


def _peers(
    stack: ExitStack, arguments: argparse.Namespace, path: Path, windows: list[int], context: int
) -> dict[int, Peer]:
    """A server per window; 0 is plain."""
    peers = {}
    for window in (0, *windows):
        extra = ["--spec-draft-n-max", str(window)] if window else []
        if window and arguments.draft_model is not None:
            extra += ["--spec-draft-model", str(arguments.draft_model)]
        drafter = arguments.peer_type if window else "none"
        peers[window] = Peer(arguments.peer, path, arguments.threads, context, drafter, *extra)
        stack.callback(peers[window].close)
    return peers


def _first_token(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time to the first token of a long prompt, and what the head then guesses: does it need the prompt's rows?

    "restart" leaves the prompt to the trunk: the head begins with the first token that is decoded.
    """
    ids, window = _prompt(llm.model, arguments.long), 3
    arms = {"plain": (0, False), "rows of the prompt": (window, False), "restart": (window, True)}
    runs: dict[str, list[GenerationResult]] = {name: [] for name in arms}
    for number in range(arguments.rounds + 1):
        for name, (drafts, restart) in arms.items():
            llm.forget()
            with mock.patch.object(DraftHeadSpeculator, "handles_own_prefill", restart):
                result = _generate(llm, ids, drafts, arguments, tokens=48)
            if number:
                runs[name].append(result)
    table = {}
    for name, results in runs.items():
        times = [1e3 * result.timings.prefill for result in results]
        base = [1e3 * result.timings.prefill for result in runs["plain"]]
        spec = results[-1].speculation
        table[name] = {
            "ms": statistics.median(times), "spread": _spread(times),
            "ratio": statistics.median(a / b for a, b in zip(times, base, strict=True)),
            "acceptance": spec.acceptance, "tokens_per_verify": spec.tokens_per_verify,
        }  # fmt: skip
        print(
            f"first token of {len(ids)}, {name:18}: {table[name]['ms']:8.1f} ms ({table[name]['spread']:3.0%}) "
            f"{table[name]['ratio']:.3f}x, then {spec.acceptance:.0%} accepted, {spec.tokens_per_verify:.2f} per verify"
        )
    return table


# -- steps -------------------------------------------------------------------------------------------------------------


def _steps(model: Model, copying: Model, rounds: int) -> dict[str, Any]:
    """Milliseconds of forwards and commits by rows, and of the forward that keeps the state after its last row alone."""
    sequence, other = model.new_sequence(), copying.new_sequence()
    tokens = np.array(_prompt(model, DEPTH + max(VERIFY_ROWS)), np.int32)
    _go_to_depth(model, sequence, tokens)
    _go_to_depth(copying, other, tokens)
    arms: dict[str, Callable[[], tuple[float, float]]] = {
        "1 row": lambda: _step(model, sequence, tokens[:1], PLAIN),
        "1 row, armed": lambda: _step(model, sequence, tokens[:1], Want("last", "last")),
    }
    if model.memory.recurrent is not None:
        arms["1 row, copied"] = lambda: _step(copying, other, tokens[:1], PLAIN)
    for rows in VERIFY_ROWS:
        arms[f"{rows} rows"] = lambda rows=rows: _step(model, sequence, tokens[:rows], VERIFY)  # type: ignore[misc]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            samples = [arm() for _ in range(STEPS)]
            if number:
                times[name].append((statistics.median(s[0] for s in samples), statistics.median(s[1] for s in samples)))
        _go_to_depth(model, sequence, tokens)
        _go_to_depth(copying, other, tokens)
    result: dict[str, Any] = {}
    for name, pairs in times.items():
        forward, commit = (1e3 * statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        result[name] = {"forward_ms": forward, "spread": _spread([f for f, _ in pairs]), "commit_ms": commit}
    one = result["1 row"]["forward_ms"]
    for name, row in result.items():
        print(
            f"{name:13} forward {row['forward_ms']:7.2f} ms ({row['spread']:3.0%}) {row['forward_ms'] / one:5.2f}x, "
            f"commit {row['commit_ms']:5.2f} ms, {row['commit_ms'] / one:.1%} of a one-row forward"
        )
    if model.memory.recurrent is not None:
        result["snapshots"] = _snapshots(model, sequence, tokens, rounds)
    return result


def _snapshots(model: Model, sequence: Sequence, tokens: np.ndarray, rounds: int) -> dict[str, Any]:
    """Verify forwards that keep every row's state beside such that keep the last one's: the same graph otherwise."""
    result = {}
    for rows in VERIFY_ROWS:
        every, last = [], []
        for number in range(rounds + 1):
            # Of another shape of hidden rows, so that the two are two graphs.
            kept = [_forward(model, sequence, tokens[:rows], Want("all", "all")) for _ in range(STEPS)]
            with mock.patch.object(Key, "purpose", "chunk"):
                one = [_forward(model, sequence, tokens[:rows], Want("all", "last")) for _ in range(STEPS)]
            if number:
                every.append(1e3 * statistics.median(kept))
                last.append(1e3 * statistics.median(one))
        extra = [a - b for a, b in zip(every, last, strict=True)]
        result[str(rows)] = {"every_ms": statistics.median(every), "extra_ms": statistics.median(extra)}
        print(f"state after each of {rows} rows instead of the last: {statistics.median(extra):+.2f} ms")
    return result


def _go_to_depth(model: Model, sequence: Sequence, tokens: np.ndarray) -> None:
    sequence.truncate(0)
    model.forward(Batch((sequence,), tokens[None, :DEPTH], PLAIN))
    sequence.commit(DEPTH)


def _step(model: Model, sequence: Sequence, tokens: np.ndarray, want: Want) -> tuple[float, float]:
    """Seconds of a forward whose logits are read, and of the commit of its first row."""
    forward = _forward(model, sequence, tokens, want)
    start = time.perf_counter()
    sequence.commit(1)
    return forward, time.perf_counter() - start


def _forward(model: Model, sequence: Sequence, tokens: np.ndarray, want: Want) -> float:
    start = time.perf_counter()
    rows = model.forward(Batch((sequence,), tokens[None], want))
    rows.logits(0, len(tokens) - 1)
    return time.perf_counter() - start


@contextmanager
def _timed_commits() -> Iterator[list[float]]:
    """Adds up the seconds of all commits while it holds."""
    spent, commit = [0.0], Sequence.commit

    def timed(self: Sequence, kept: int) -> None:
        start = time.perf_counter()
        commit(self, kept)
        spent[0] += time.perf_counter() - start

    with mock.patch.object(Sequence, "commit", timed):
        yield spent


def _prompt(model: Model, count: int) -> list[int]:
    ids: list[int] = (
        np.random.default_rng(0).integers(min(300, model.vocab_size // 2), model.vocab_size, count).tolist()
    )
    return ids


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)
