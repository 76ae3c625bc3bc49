"""`python -m benchmarks speed`: the raw speed of one model, alone or beside llama.cpp's llama-bench on the same file.

decode at several depths, prefill, the verify curve T(n)/T(1) with the ceiling that it implies, Python time of a step, and
decode beside a busy process. Arms alternate, medians of N alternations, spread as (max - min) / median. Ends in one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quiet import describe_machine, require_quiet
from tsgg.ggml.devices import Backend
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.plan import PREFILL_ROWS
from tsgg.pull import resolve_model
from tsgg.speculative.protocol import Batch, Want

DECODE_STEPS = 24  # per alternation
CURVE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
DECODE, VERIFY, SILENT = Want(logits="last"), Want(logits="all"), Want(logits="none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name [smollm2-135m]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depths", default="0,1024,4096", help="context lengths, comma-separated [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="alternations [%(default)s]")
    parser.add_argument("--cache-type", default="f16", help="K and V cache, both engines [%(default)s]")
    parser.add_argument("--peer", type=Path, metavar="LLAMA_BENCH", help="path of llama-bench")
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")


def main(arguments: argparse.Namespace) -> int:
    require_quiet(arguments.force)
    path = resolve_model(arguments.model)
    depths = [int(depth) for depth in arguments.depths.split(",")]
    kind = arguments.cache_type
    n_ctx = max(depths) + PREFILL_ROWS + 256
    with Model(path, n_ctx=n_ctx, n_threads=arguments.threads, cache_type_k=kind, cache_type_v=kind) as model:
        bench = Bench(model)
        peer = Peer(arguments.peer, path, arguments.threads, kind) if arguments.peer else None
        report: dict[str, Any] = {
            "model": path.name, "threads": arguments.threads, "cache": kind, "rounds": arguments.rounds,
            "machine": describe_machine(),
        }  # fmt: skip
        report |= _against_peer(bench, peer, depths, arguments.rounds)
        report["curve"] = _curve(bench, depths, arguments.rounds)
        report["python_us"] = _python(bench, max(depths))
        report["beside_busy"] = _beside_busy(bench, arguments.rounds)
    print(json.dumps(report))
    return 0


class Bench:
    """One model with one sequence that is moved from depth to depth. Times in seconds."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sequence: Sequence = model.new_sequence()
        text = np.random.default_rng(0).integers(100, model.vocab_size, model.n_ctx)
        self.tokens = text.astype(np.int32)

    def go_to(self, depth: int) -> None:
        """Leaves exactly `depth` tokens in memory."""
        if self.sequence.truncate(depth) < depth:
            while (at := self.sequence.length) < depth:
                self.forward(min(PREFILL_ROWS, depth - at), SILENT, commit=True)

    def forward(self, rows: int, want: Want, commit: bool = False) -> float:
        """One forward of the next rows; rejected unless `commit`."""
        at = self.sequence.length
        batch = Batch((self.sequence,), self.tokens[None, at : at + rows], want)
        start = time.perf_counter()
        result = self.model.forward(batch)
        if want.logits != "none":
            result.logits(0, rows - 1)
        seconds = time.perf_counter() - start
        self.sequence.commit(rows if commit else 0)
        return seconds

    def decode(self, depth: int) -> float:
        """Seconds per one-row step at a depth, committing each."""
        self.go_to(depth)
        self.forward(1, DECODE)
        times = [self.forward(1, DECODE, commit=True) for _ in range(DECODE_STEPS)]
        return statistics.fmean(times)

    def prefill(self, rows: int) -> float:
        self.sequence.truncate(0)
        return self.forward(rows, DECODE)

    def rows(self, depth: int, rows: int, want: Want, steps: int = 5) -> list[float]:
        """Seconds of each of so many equal steps."""
        self.go_to(depth)
        self.forward(rows, want)
        return [self.forward(rows, want) for _ in range(steps)]


class Peer:
    """llama-bench on the same file, threads and cache type; its defaults otherwise. Rates in tokens per second."""

    def __init__(self, program: Path, model: Path, threads: int, kind: str) -> None:
        self.base = [
            str(program),
            "-m",
            str(model),
            "-t",
            str(threads),
            "-ctk",
            kind,
            "-ctv",
            kind,
            "-r",
            "1",
            "-o",
            "json",
        ]

    def rate(self, prompt: int, generate: int, depth: int) -> float:
        command = [*self.base, "-p", str(prompt), "-n", str(generate), "-d", str(depth)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)[0]["avg_ts"])


def _against_peer(bench: Bench, peer: Peer | None, depths: list[int], rounds: int) -> dict[str, Any]:
    """Tokens per second of every scenario, ours and the peer's in turn."""
    scenarios: dict[str, tuple[Callable[[], float], Callable[[Peer], float]]] = {
        "prefill 512": (lambda: 512 / bench.prefill(512), lambda p: p.rate(512, 0, 0))
    }
    for depth in depths:
        scenarios[f"decode @{depth}"] = (
            lambda depth=depth: 1 / bench.decode(depth),
            lambda p, depth=depth: p.rate(0, DECODE_STEPS, depth),
        )
        scenarios[f"8 rows @{depth}, head on the last"] = (
            lambda depth=depth: 8 / statistics.fmean(bench.rows(depth, 8, DECODE)),
            lambda p, depth=depth: p.rate(8, 0, depth),
        )
    ours: dict[str, list[float]] = {name: [] for name in scenarios}
    theirs: dict[str, list[float]] = {name: [] for name in scenarios}
    for _ in range(rounds):
        for name, (mine, other) in scenarios.items():
            ours[name].append(mine())
            if peer is not None:
                theirs[name].append(other(peer))
    print(f"{'tok/s, median (spread)':36} {'tsgg':>16} {'llama-bench':>16} {'ratio':>7}")
    table = {}
    for name in scenarios:
        row: dict[str, float] = {"tsgg": statistics.median(ours[name]), "spread": _spread(ours[name])}
        line = f"{name:36} {row['tsgg']:9.1f} ({row['spread']:3.0%})"
        if peer is not None:
            row |= {"peer": statistics.median(theirs[name]), "peer_spread": _spread(theirs[name])}
            row["ratio"] = statistics.median(a / b for a, b in zip(ours[name], theirs[name], strict=True))
            line += f" {row['peer']:9.1f} ({row['peer_spread']:3.0%}) {row['ratio']:7.2f}"
        print(line)
        table[name] = row
    return {"rates": table}


def _curve(bench: Bench, depths: list[int], rounds: int) -> dict[str, Any]:
    """T(n) of a verify (head on all rows) per depth, in ms, and the best rows per unit of T(1)."""
    result = {}
    for depth in depths:
        samples: dict[int, list[float]] = {rows: [] for rows in CURVE_ROWS}
        for _ in range(rounds):
            for rows in CURVE_ROWS:
                samples[rows] += bench.rows(depth, rows, VERIFY)  # the median bears a stretch of slow steps
        times = {rows: 1e3 * statistics.median(values) for rows, values in samples.items()}
        ratios = {rows: times[rows] / times[1] for rows in CURVE_ROWS}
        ceiling = {rows: rows / ratio for rows, ratio in ratios.items()}
        best = max(ceiling, key=lambda rows: ceiling[rows])
        print(f"T(n)/T(1) @{depth}, T(1) = {times[1]:.2f} ms: " + " ".join(f"{n}:{r:.2f}" for n, r in ratios.items()))
        print(f"  ceiling with every draft accepted: {ceiling[best]:.2f}x at {best} rows")
        result[str(depth)] = {"ms": times, "ceiling": ceiling[best], "ceiling_rows": best}
    return result


def _python(bench: Bench, depth: int) -> dict[str, float]:
    """Microseconds of a step outside of ggml's compute, per rows."""
    inside = [0.0]
    compute = Backend.compute

    def timed(self: Backend, graph: Any, pace: Any = None) -> None:
        start = time.perf_counter()
        compute(self, graph, pace)
        inside[0] = time.perf_counter() - start

    result = {}
    Backend.compute = timed  # type: ignore[method-assign]
    try:
        bench.go_to(depth)
        for rows, want in ((1, DECODE), (8, VERIFY)):
            bench.forward(rows, want)
            result[str(rows)] = 1e6 * statistics.median(bench.forward(rows, want) - inside[0] for _ in range(40))
    finally:
        Backend.compute = compute  # type: ignore[method-assign]
    print(f"Python per step @{depth}: " + ", ".join(f"{rows} rows {us:.0f} us" for rows, us in result.items()))
    return result


def _beside_busy(bench: Bench, rounds: int) -> float:
    """Decode rate beside one busy process over the rate alone."""
    ratios = []
    for _ in range(rounds):
        alone = bench.decode(0)
        with _busy_process():
            ratios.append(alone / bench.decode(0))
    ratio = statistics.median(ratios)
    print(f"decode beside one busy process over alone: {ratio:.2f} (spread {_spread(ratios):.0%})")
    return ratio


@contextmanager
def _busy_process() -> Any:
    child = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    child.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        child.kill()
        child.join()


def _spin() -> None:
    while True:
        pass


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)
