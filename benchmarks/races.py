"""`python -m benchmarks races`: models are closed, dropped and interrupted at random moments while they generate.

Every race runs in a process of its own, see `benchmarks.race`: one that crashes or hangs is counted, and its last words are
shown. Ends in one JSON line; the exit status is 1 when any race went wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.soak import tiny
from benchmarks.synthetic import write
from tsgg import UsageError

KINDS: Mapping[str, int] = {"close": 1, "body": 1, "exit": 1, "drop": 1, "interrupt": 10}  # races in one process
PATIENCE = 180.0  # seconds for a process
HERE = Path(__file__).resolve().parents[1]  # where `benchmarks` can be imported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name [a tiny one, written for the purpose]")
    parser.add_argument("--count", type=int, default=50, help="races of each kind [%(default)s]")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated [%(default)s]")
    parser.add_argument("--seed", type=int, default=1)


def main(arguments: argparse.Namespace) -> int:
    kinds = arguments.kinds.split(",")
    if arguments.count < 1 or not set(kinds) <= set(KINDS):
        raise UsageError(f"--count is at least 1, and --kinds are some of {', '.join(KINDS)}")
    wrong: dict[str, list[str]] = {}
    with ExitStack() as stack:
        model = arguments.model
        if model is None:
            model = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny.gguf")
            write(Path(model), tiny())
        for kind in kinds:
            wrong[kind] = races(kind, model, arguments.count, arguments.seed)
            print(f"{arguments.count:4} x {kind}: {len(wrong[kind]) or 'none'} wrong")
            for words in wrong[kind]:
                print(f"     {words}")
    print(json.dumps({"count": arguments.count, "seed": arguments.seed, "wrong": wrong}))
    return 1 if any(wrong.values()) else 0


def races(kind: str, model: str, count: int, seed: int) -> list[str]:
    """What went wrong at random moments, a line for each process."""
    found = []
    for first in range(0, count, KINDS[kind]):
        words = race(kind, model, seed * 10_000 + first, min(KINDS[kind], count - first))
        if words:
            found.append(f"seed {seed * 10_000 + first}: {words}")
    return found


def race(kind: str, model: str, seed: int, count: int = 1, forward: int | None = None) -> str:
    """What went wrong in one process; "" where nothing did. `forward`: it happens when that one begins."""
    numbers = [str(seed), str(count), *([] if forward is None else [str(forward)])]
    command = [sys.executable, "-m", "benchmarks.race", kind, model, *numbers]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=HERE)
    except subprocess.TimeoutExpired:
        return f"no end within {PATIENCE:.0f} s"
    return judge(kind, done.returncode, done.stderr)


def judge(kind: str, status: int, errors: str) -> str:
    """What is wrong with how a process has ended; "" where nothing is."""
    expected = (1, "RuntimeError: the body failed") if kind == "body" else (0, "")
    last = errors.strip().rpartition("\n")[2]
    if (status, last) == expected:
        return ""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}: {last}"
