"""`python -m benchmarks replay`: drafters and windows on recorded text, on machines given by their curves.

The streams of plain decoding are recorded once, on a real model; then the real loop, drafter and governor run over them with a
clock that only the curve moves. So two drafters, or two versions of the governor, meet the same tokens and the same prices, and
a difference of one percent is one. Every arm must emit the recorded stream. *Regret* is the governed time over that of the best
fixed window, plain decoding included; *ceiling* is that window's gain over plain decoding. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from benchmarks.simulation import GRAPH_MS, MACHINES, NOISE, WIDEST, curve
from benchmarks.workloads import WORKLOADS
from tsgg import LLM, TsggError, UsageError
from tsgg.pull import resolve_model
from tsgg.speculative import REGISTRY, Speculator
from tsgg.speculative.execution import SpeculativeExecution
from tsgg.speculative.governor import CostGovernor
from tsgg.speculative.options import SpeculationOptions
from tsgg.speculative.protocol import Batch, Rows, Sequence, WindowPolicy

LOOK_SECONDS = 5e-6  # that a look at the clock takes: drafting costs two of them
WINDOWS = (1, 2, 3, 4, 5, 7, 8, 12, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name of the model that is recorded [smollm2-135m]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workloads", default="quote-prompt,code-edit,facts,mixed,tool,prose", help="[%(default)s]")
    parser.add_argument("--drafters", default="ngram,suffix", help="comma-separated speculation types [%(default)s]")
    parser.add_argument("--machines", default=",".join(MACHINES), help="of benchmarks/simulation.py [%(default)s]")
    parser.add_argument("--curve", metavar="JSON", help='measured {"rows": ms}, 1 to 17 rows, as a machine of its own')
    parser.add_argument("--draft", type=int, default=8, help="the governor's ceiling [%(default)s]")
    parser.add_argument("--seeds", type=int, default=8, help="runs with different noise [%(default)s]")


def main(arguments: argparse.Namespace) -> int:
    names = arguments.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise UsageError(f"unknown workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    machines = {name: MACHINES[name] for name in arguments.machines.split(",") if name in MACHINES}
    if arguments.curve:
        machines["this"] = {int(rows): float(ms) for rows, ms in json.loads(arguments.curve).items()}
    path = resolve_model(arguments.model)
    tapes = record(str(path), names, arguments.threads)
    rows = []
    print(f"{'drafter':8}{'machine':9}{'text':14}{'best':>5}{'ceiling':>9}{'governed':>10}{'regret':>8}{'first':>8}")
    for drafter in arguments.drafters.split(","):
        for machine, points in machines.items():
            for tape in tapes:
                row = _row(drafter, curve(points), tape, arguments.draft, arguments.seeds) | {"machine": machine}
                rows.append(row)
                print(
                    f"{drafter:8}{machine:9}{tape.name:14}{row['best_window']:5}{row['best_over_plain']:8.2f}x"
                    f"{row['governed_over_plain']:9.2f}x{row['regret']:8.1%}{row['regret_first']:8.1%}",
                    flush=True,
                )
    print(json.dumps({"scenario": "replay", "model": path.name, "draft": arguments.draft, "rows": rows}))
    return 0


@dataclass(frozen=True, slots=True)
class Tape:
    """A prompt and what plain decoding made of it."""

    name: str
    prompt: list[int]
    answer: list[int]
    vocab: int


def record(path: str, names: list[str], threads: int) -> list[Tape]:
    """Greedy plain streams of these workloads."""
    tapes = []
    with LLM(path, n_ctx=4096, n_threads=threads, speculation=None) as llm:
        for name in names:
            prompt, count = llm.tokenize(WORKLOADS[name].prompt), WORKLOADS[name].tokens
            llm.forget()
            result = llm.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True)
            tapes.append(Tape(name, list(prompt), list(result.tokens), llm.model.vocab_size))
    return tapes


class Clock:
    """Seconds, moved by what is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_SECONDS
        return self.now


class _Sequence:
    """The committed tokens; nothing else of a memory is needed."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.pending = list(tokens), list[int]()

    @property
    def length(self) -> int:
        return len(self.tokens)

    def commit(self, kept: int) -> int:
        self.tokens += self.pending[:kept]
        return 0

    def truncate(self, n: int) -> int:
        del self.tokens[n:]
        return self.length


class _Player:
    """Trunk, rows and sampler in one: a forward moves the clock, a draw reads the tape."""

    preferred_draft_window: int | None = None
    speculation_refusal: str | None = None
    speculation_profitable = True
    feature_size = 1

    def __init__(self, tape: Tape, times: list[float], clock: Clock, seed: int, seen: set[int]) -> None:
        """`seen`: row counts whose graphs are built."""
        self.vocab_size, self._times, self._clock, self._seen = tape.vocab, times, clock, seen
        self.stream, self._end = [*tape.prompt, *tape.answer], len(tape.prompt) + len(tape.answer)
        self._rng, self._drawn = random.Random(seed), 0
        self._none = np.zeros(0, np.float32)

    def forward(self, batch: Batch) -> Rows:
        rows = batch.tokens.shape[1]
        self._clock.now += self._times[rows] * math.exp(self._rng.gauss(0.0, NOISE)) / 1e3
        self._clock.now += 0.0 if rows in self._seen else GRAPH_MS / 1e3
        self._seen.add(rows)
        cast(_Sequence, batch.sequences[0]).pending = batch.tokens[0].tolist()
        return self

    def batches(self, sequences: list[Sequence]) -> list[list[int]]:
        return [[i] for i in range(len(sequences))]

    def context_left(self, sequence: Sequence) -> int:
        return self._end

    def logits(self, sequence: int, row: int) -> np.ndarray:
        return self._none

    hidden = tap = logits  # asked for by no drafter that reads tokens alone

    @property
    def finished(self) -> str | None:
        return "length" if self._drawn == self._end - 1 else None

    def sample(self, logits: np.ndarray, position: int) -> int:
        self._drawn = position
        return self.stream[position]


class Ride:
    """One drafter and one policy on one machine, request after request."""

    def __init__(self, drafter: str, times: list[float], window: int, governed: bool) -> None:
        self.options = SpeculationOptions(enabled=window > 0, type=drafter, draft=max(1, window), shared_corpus=False)
        self.policy: WindowPolicy | None = CostGovernor() if governed else None
        self._drafter, self._times = drafter, times
        self._keys: Iterator[int] = itertools.count()
        self._seen: set[int] = set()

    def run(self, tape: Tape, seed: int) -> float:
        """Seconds of a request behind its first token. Raises `TsggError` where the stream is not the recorded one."""
        clock = Clock()
        player = _Player(tape, self._times, clock, seed, self._seen)
        speculator = REGISTRY.create(self._drafter, player, self.options, None) if self.options.enabled else None
        if speculator is not None and not isinstance(speculator, Speculator):
            raise UsageError(f"{self._drafter} does not draft from tokens alone: {speculator}")
        execution = SpeculativeExecution(player, speculator, self.options, self.policy, clock, self._keys)
        sequence = _Sequence(tape.prompt)
        request = execution.arm(sequence, player, last=tape.answer[0], remaining=len(tape.answer) - 1)
        while request.finished is None:
            list(execution.step([request]))
        execution.disarm(request)
        if sequence.tokens != player.stream[:-1]:
            raise TsggError(f"{self._drafter} changed the stream of {tape.name}")
        return clock.now


def _row(drafter: str, times: list[float], tape: Tape, draft: int, seeds: int) -> dict[str, Any]:
    """A governor that meets the text for the first time, and the second."""
    fixed = {}
    for window in (0, *(w for w in WINDOWS if w <= min(draft, WIDEST))):
        ride = Ride(drafter, times, window, governed=False)
        ride.run(tape, 0)
        fixed[window] = statistics.fmean(ride.run(tape, seed) for seed in range(seeds))
    best = min(fixed, key=fixed.__getitem__)
    first, later = [], []
    for seed in range(seeds):
        ride = Ride(drafter, times, draft, governed=True)
        first.append(ride.run(tape, seed + seeds))
        later.append(ride.run(tape, seed))
    return {
        "text": tape.name,
        "drafter": drafter,
        "best_window": best,
        "best_over_plain": fixed[0] / fixed[best],
        "governed_over_plain": fixed[0] / statistics.fmean(later),
        "regret_first": statistics.fmean(first) / fixed[best] - 1.0,
        "regret": statistics.fmean(later) / fixed[best] - 1.0,
    }
