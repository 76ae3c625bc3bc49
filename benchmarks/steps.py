"""`python -m benchmarks steps`: what the engine adds to a step, for so many requests side by side.

Two times are taken of every step in which all of them decode: `engine` is the step without the model's forwards, that is
scheduling, drafting, drawing, committing and reporting; `python` is the step without ggml's computes, so the Python of the
forwards as well. Medians and 10th percentiles in microseconds, and what each further request adds. Requests are greedy; their
readers wait for the end. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.quiet import describe_machine, require_quiet
from tsgg.engine import Engine, Stream
from tsgg.forward import StepRows
from tsgg.ggml.devices import Backend
from tsgg.model import Model
from tsgg.pull import resolve_model
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.speculative import SpeculationOptions
from tsgg.speculative.protocol import Batch

SETTLE = 4  # steps of a round that are not counted: they build graphs
PROMPT = 8  # tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One step, in seconds."""

    step: float
    forwards: float
    computes: float

    @property
    def engine(self) -> float:
        return self.step - self.forwards

    @property
    def python(self) -> float:
        return self.step - self.computes


class TimedEngine(Engine):
    """Takes down every step in which all who run decode, by their number."""

    def __init__(self, model: Model, options: SpeculationOptions) -> None:
        self.samples: dict[int, list[Sample]] = {}
        self.forwards = self.computes = 0.0
        self._plain_forward = model.forward
        model.forward = self._forward  # type: ignore[method-assign]
        super().__init__(model, options, cache_bytes=0)

    def step(self) -> bool:
        self.forwards = self.computes = 0.0
        decoding = [request for request in self.scheduler.running if request.phase == "decode"]
        whole = not self.scheduler.waiting and len(decoding) == len(self.scheduler.running) > 0
        start = time.perf_counter()
        busy = super().step()
        seconds = time.perf_counter() - start
        if whole and len(self.scheduler.running) == len(decoding):
            self.samples.setdefault(len(decoding), []).append(Sample(seconds, self.forwards, self.computes))
        return busy

    def _forward(self, batch: Batch) -> StepRows:
        start = time.perf_counter()
        rows = self._plain_forward(batch)
        self.forwards += time.perf_counter() - start
        return rows

    @contextmanager
    def timing(self) -> Iterator[None]:
        """ggml's computes are counted inside."""
        compute = Backend.compute

        def timed(backend: Backend, graph: Any, pace: Any = None) -> None:
            start = time.perf_counter()
            compute(backend, graph, pace)
            self.computes += time.perf_counter() - start

        Backend.compute = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            Backend.compute = compute  # type: ignore[method-assign]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name [smollm2-135m]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", default="1,2,4,8", help="side by side, comma-separated [%(default)s]")
    parser.add_argument("--tokens", type=int, default=60, help="of each answer [%(default)s]")
    parser.add_argument("--rounds", type=int, default=4, help="alternations [%(default)s]")
    parser.add_argument("--drafter", default="off", help="off, or a drafter such as suffix [%(default)s]")
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")


def main(arguments: argparse.Namespace) -> int:
    require_quiet(arguments.force)
    path = resolve_model(arguments.model)
    counts = sorted({int(count) for count in arguments.requests.split(",")})
    options = SpeculationOptions()
    if arguments.drafter != "off":
        options = SpeculationOptions(enabled=True, type=arguments.drafter)
    model = Model(path, n_ctx=PROMPT + arguments.tokens, n_seq=max(counts), n_threads=arguments.threads)
    found: dict[int, list[Sample]] = {count: [] for count in counts}
    with closing(TimedEngine(model, options)) as engine, engine.timing():
        for _ in range(arguments.rounds):
            for count in counts:
                found[count] += _round(engine, count, arguments.tokens)
    report: dict[str, Any] = {
        "model": path.name, "threads": arguments.threads, "drafter": arguments.drafter, "machine": describe_machine(),
        "requests": {count: _summary(samples) for count, samples in found.items()},
    }  # fmt: skip
    print(f"{'requests':>8} {'steps':>6} {'step ms':>8} {'engine us':>10} {'p10':>6} {'python us':>10} {'p10':>6}")
    for count, row in report["requests"].items():
        times = (
            f"{row['engine_us']:10.0f} {row['engine_us_p10']:6.0f} {row['python_us']:10.0f} {row['python_us_p10']:6.0f}"
        )
        print(f"{count:8} {row['steps']:6} {row['step_ms']:8.2f} {times}")
    if len(counts) > 1:
        for kind in ("engine_us", "python_us"):
            report[f"further_{kind}"] = _slope(report["requests"], kind)
            print(f"each further request: {report[f'further_{kind}']:.0f} us of {kind.removesuffix('_us')} time")
    print(json.dumps(report))
    return 0


def _round(engine: TimedEngine, count: int, tokens: int) -> list[Sample]:
    """`count` requests side by side, from their first step together to the first end."""
    engine.call(engine.samples.clear)
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    text = np.random.default_rng(count).integers(0, engine.model.vocab_size, (count, PROMPT)).tolist()

    def submit() -> list[Stream]:
        return [engine.submit(prompt, RowSampler(params, engine.model.vocab_size), most_unread=None) for prompt in text]

    for stream in engine.call(submit):  # on the engine's thread: it takes them in together
        stream.wait()
    return engine.call(lambda: engine.samples.get(count, []))[SETTLE:]


def _summary(samples: list[Sample]) -> dict[str, float]:
    row: dict[str, float] = {"steps": len(samples), "step_ms": 1e3 * statistics.median(s.step for s in samples)}
    for kind in ("engine", "python"):
        times = sorted(1e6 * getattr(sample, kind) for sample in samples)
        row |= {f"{kind}_us": statistics.median(times), f"{kind}_us_p10": times[len(times) // 10]}
    return row


def _slope(rows: dict[int, dict[str, float]], kind: str) -> float:
    """What a further request adds: the line through the fewest and the most."""
    fewest, most = min(rows), max(rows)
    return (rows[most][kind] - rows[fewest][kind]) / (most - fewest)
