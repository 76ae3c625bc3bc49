"""The window governor against every fixed window, on simulated machines and texts: `python -m benchmarks regret --simulate`.

A machine is its curve of milliseconds by rows; a text says, token by token, whether the drafter would have been right. Every
policy meets the same texts and the same noise, so that only its choices differ. *Regret* is the time above that of the best
fixed window, which is known in hindsight only: best by the mean time over all texts of the kind. The first request pays for
learning the machine; later ones, whose drafts may be accepted quite differently, find its costs known.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tsgg.errors import UsageError
from tsgg.speculative.governor import CostGovernor
from tsgg.speculative.protocol import Draft, WindowContext
from tsgg.speculative.stats import StepSample

TOKENS = 512
WIDEST = 16
GRAPH_MS = 2.5  # first step of a row count: its graph is built
NOISE = 0.03  # of a step's time, standard deviation
LOOKUP_MS = 0.02  # of one ask of a lookup drafter

# Rows -> ms; straight lines between. The first two are measured with SmolLM2-135M Q4_1 on two cores, at depths 0 and 1,024
# (`python -m benchmarks speed`). m5 is the published curve of Gemma 4 E4B Q8_0 on Metal; past its step at 9 rows, where the
# large-batch kernels take over, it is taken as nearly flat. a40 is constructed: a published 21.5 ms per token of a 12B model,
# rows as cheap as on another CUDA card (77 / 56 ms for 4 rows), and m5's step at 9 rows, since the small-batch kernels end there
# too.
MACHINES: dict[str, dict[int, float]] = {
    "cpu": {1: 7.69, 2: 14.39, 3: 17.25, 4: 20.41, 5: 25.36, 6: 29.34, 7: 33.59, 8: 34.43, 9: 39.29, 10: 43.87, 12: 46.59,
            14: 54.92, 16: 60.15, 17: 65.41},
    "cpu 1k": {1: 10.96, 2: 18.01, 3: 21.53, 4: 29.70, 5: 34.81, 6: 41.53, 7: 42.79, 8: 42.61, 9: 52.39, 10: 54.45, 12: 59.44,
               14: 74.02, 16: 87.50, 17: 95.31},
    "m5": {1: 22.0, 4: 38.0, 6: 44.0, 8: 51.0, 9: 89.0, 17: 97.0},
    "a40": {1: 21.5, 4: 29.6, 8: 40.4, 9: 70.0, 17: 74.0},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """What a drafter meets, by position: whether it speaks up, whether its guess is right, how sure it says it is."""

    speaks: list[bool]
    right: list[bool]
    confidences: list[float] | None  # None = it does not say

    def draft(self, at: int, window: int) -> int:
        """Tokens drafted from `at` on."""
        count = 0
        while count < window and self.speaks[at + count]:
            count += 1
        return count

    def accepted(self, at: int, drafted: int) -> int:
        count = 0
        while count < drafted and self.right[at + count]:
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of text: how often drafts are right, and how often a lookup finds anything to say."""

    tokens: int
    accepted: float
    spoken: float


def prose(_: random.Random) -> list[Part]:
    return [Part(TOKENS, 0.0, 0.1)]


def quote(_: random.Random) -> list[Part]:
    return [Part(TOKENS, 0.95, 1.0)]


def edit(rng: random.Random) -> list[Part]:
    """Copied code with changes in it, which the drafter runs into."""
    parts: list[Part] = []
    while sum(part.tokens for part in parts) < TOKENS:
        parts += [Part(rng.randint(20, 60), 0.97, 1.0), Part(rng.randint(4, 16), 0.2, 0.5)]
    return parts


def changing(_: random.Random) -> list[Part]:
    """A preamble that every answer has, free prose, a quotation."""
    return [Part(64, 0.9, 1.0), Part(256, 0.0, 0.1), Part(192, 0.95, 1.0)]


TEXTS: dict[str, Callable[[random.Random], list[Part]]] = {
    "prose": prose,
    "quote": quote,
    "edit": edit,
    "changing": changing,
}
DRAFTERS = ("blind", "lookup")  # drafts all that it may and says nothing; is silent or unsure where it finds little


def make_text(kind: str, drafter: str, seed: int) -> Text:
    rng = random.Random(f"{kind} {seed}")
    parts = TEXTS[kind](rng)
    quality = [part for part in parts for _ in range(part.tokens)][:TOKENS]
    right = [rng.random() < part.accepted for part in quality]
    if drafter == "blind":
        return Text([True] * TOKENS, right, None)
    speaks = [rng.random() < part.spoken for part in quality]
    sure = [min(0.99, max(0.01, rng.gauss(0.35 + 0.5 * part.accepted, 0.1))) for part in quality]
    return Text(speaks, right, sure)


def curve(points: dict[int, float]) -> list[float]:
    """[rows]: ms, rows 0..17."""
    known = sorted(points)
    times = [0.0]
    for rows in range(1, WIDEST + 2):
        below = max(k for k in known if k <= rows)
        above = min(k for k in known if k >= rows)
        share = (rows - below) / (above - below) if above > below else 0.0
        times.append(points[below] + share * (points[above] - points[below]))
    return times


def run_fixed(machine: list[float], text: Text, window: int) -> float:
    """Milliseconds of a text with one window throughout, without noise."""
    at, total, seen = 0, 0.0, set()
    while at < TOKENS:
        drafted = text.draft(at, min(window, TOKENS - at - 1))
        total += machine[drafted + 1] + (LOOKUP_MS if text.confidences and window else 0.0)
        total += GRAPH_MS if drafted not in seen else 0.0
        seen.add(drafted)
        at += text.accepted(at, drafted) + 1
    return total


class Ride:
    """One governor on one machine, request after request."""

    def __init__(self, machine: list[float], noise: float = NOISE, graph_ms: float = GRAPH_MS) -> None:
        self.machine, self.noise, self.graph_ms = machine, noise, graph_ms
        self.governor = CostGovernor()
        self._requests = 0
        self._seen: set[int] = set()

    def run(self, text: Text, seed: int = 0) -> list[tuple[int, int, int, float]]:
        """(position, drafted, accepted, ms) of every step of a request."""
        rng, at, steps = random.Random(seed), 0, []
        self._requests += 1
        while at < len(text.right):
            ceiling = min(WIDEST, len(text.right) - at - 1)
            context = WindowContext(self._requests, ceiling, at, 1)
            window = self.governor.choose(context) if ceiling else 0
            drafted = proposed = text.draft(at, window)
            sure = tuple(text.confidences[at : at + drafted]) if text.confidences else ()
            if drafted:
                drafted = self.governor.keep(replace(context, ceiling=window), Draft((0,) * drafted, sure))
            foreseen = text.right[at] if proposed and not drafted else None
            accepted = text.accepted(at, drafted)
            forward = self.machine[drafted + 1] * math.exp(rng.gauss(0.0, self.noise))
            forward += self.graph_ms if drafted not in self._seen else 0.0
            self._seen.add(drafted)
            ask = LOOKUP_MS if text.confidences and window else 0.0
            self.governor.record(
                StepSample(
                    key=self._requests,
                    window=window,
                    drafted=drafted,
                    accepted=accepted,
                    emitted=accepted + 1,
                    discarded=0,
                    silence="",
                    finished=False,
                    length=at,
                    sequences=1,
                    draft_seconds=ask / 1e3,
                    forward_seconds=forward / 1e3,
                    foreseen=foreseen,
                )
            )
            steps.append((at, drafted, accepted, forward + ask))
            at += accepted + 1
        return steps


def regret(machine: dict[int, float], kind: str, drafter: str, seeds: int) -> dict[str, Any]:
    """Regret of a first request, and of one that follows a request of changing text."""
    times = curve(machine)
    texts = [make_text(kind, drafter, seed) for seed in range(seeds)]
    fixed = [statistics.fmean(run_fixed(times, text, window) for text in texts) for window in range(WIDEST + 1)]
    best = min(range(WIDEST + 1), key=fixed.__getitem__)
    first, later = [], []
    for seed, text in enumerate(texts):
        first.append(_total(Ride(times).run(text, seed)))
        ride = Ride(times)
        ride.run(make_text("changing", drafter, 1000 + seed), seed)
        later.append(_total(ride.run(text, seed)))
    return {
        "text": kind,
        "drafter": drafter,
        "best_window": best,
        "best_over_plain": fixed[0] / fixed[best],
        "governor_over_plain": fixed[0] / statistics.fmean(later),
        "regret_first": statistics.fmean(first) / fixed[best] - 1.0,
        "regret": statistics.fmean(later) / fixed[best] - 1.0,
    }


def loss_of_a_change(machine: dict[int, float], seeds: int) -> float:
    """Plain steps lost, on average, in the 64 tokens behind the point where a drafter that was right begins to be wrong."""
    times, losses = curve(machine), []
    for seed in range(seeds):
        rng = random.Random(seed)
        change = 200 + rng.randrange(16)
        right = [rng.random() < 0.97 for _ in range(change)] + [False] * 128
        steps = Ride(times, noise=0.0, graph_ms=0.0).run(Text([True] * len(right), right, None), seed)
        behind = [step for step in steps if change <= step[0] < change + 64]
        tokens = sum(step[2] + 1 for step in behind)
        losses.append(_total(behind) / times[1] - tokens)
    return statistics.fmean(losses)


def _total(steps: list[tuple[int, int, int, float]]) -> float:
    return sum(step[3] for step in steps)


def _covers(machine: dict[int, float]) -> bool:
    return min(machine, default=0) == 1 and max(machine) > WIDEST


def simulate(seeds: int, measured: dict[int, float] | None) -> dict[str, Any]:
    """Prints a table and returns it. `measured`: {rows: ms} of this machine in place of "cpu"; 1 to 17 rows."""
    if measured is not None and not (_covers(measured) and all(ms > 0 for ms in measured.values())):
        raise UsageError(f"the curve has {sorted(measured)} rows, expected times from 1 to {WIDEST + 1} rows")
    machines = MACHINES | ({"cpu": measured} if measured is not None else {})
    rows = []
    print(f"{'drafter':8}{'machine':9}{'text':10}{'best':>5}{'its gain':>10}{'governor':>10}{'regret':>9}{'first':>9}")
    for drafter in DRAFTERS:
        for machine, points in machines.items():
            for kind in TEXTS:
                row = regret(points, kind, drafter, seeds) | {"machine": machine}
                rows.append(row)
                print(
                    f"{drafter:8}{machine:9}{kind:10}{row['best_window']:5}{row['best_over_plain']:9.2f}x"
                    f"{row['governor_over_plain']:9.2f}x{row['regret']:9.1%}{row['regret_first']:9.1%}",
                    flush=True,
                )
    losses = {machine: loss_of_a_change(points, seeds) for machine, points in machines.items()}
    print("plain steps lost where a text turns: " + ", ".join(f"{m} {loss:.1f}" for m, loss in losses.items()))
    return {"simulated": True, "rows": rows, "loss_of_a_change": losses}
