"""`python -m benchmarks soak`: many short requests, of which some are cancelled at random moments. A check, not a measurement.

Readers on threads of their own submit, read and leave, slowly at times. Counted: who finished, who was cancelled, who was lost (an
error, or no end at all), and who got other tokens than the first time. Memory must not grow by more than a bound once a tenth of
the requests is through. Ends in one JSON line; the exit status is 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.synthetic import Recipe, Tensor, normal, write
from tsgg import LLM, SamplingParams, TsggError, UsageError
from tsgg.platform import resident_memory
from tsgg.sampling import RowSampler

MIB = 2**20
N_CTX = 256
PROMPTS = 64  # different ones: enough that the tree has to push some out
BEGINNINGS = (0, 40, 40, 90)  # tokens that prompts share with others
CACHE = 64 << 10  # bytes of the prefix tree: less than the prompts take
DRAFTERS = ("off", "auto", "ngram", "suffix")
FINISHED, CANCELLED, DIFFERENT = "finished", "cancelled", "different"
MOST = 16  # tokens of an answer
SLOW = 0.05  # share of chunks that a reader takes his time for
PATIENCE = 120.0  # seconds without any end, after which who has not ended is lost


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that comes again and again; what it gives is always the same."""

    ids: tuple[int, ...]
    params: SamplingParams

    @property
    def tokens(self) -> int:
        return self.params.max_tokens or 0


@dataclass(frozen=True, slots=True)
class Plan:
    requests: int
    cancel: float = 0.2  # share
    readers: int = 12
    seed: int = 1
    growth: float = 16.0  # MiB that memory may grow by behind the first tenth, beside graphs


@dataclass(slots=True)
class Report:
    """What became of the requests; by requests asked, bytes that lay in memory and those that cached graphs held of them."""

    finished: int = 0
    cancelled: int = 0
    lost: int = 0
    different: int = 0  # other tokens than alone
    reasons: Counter[str] = field(default_factory=Counter)  # of those that were lost
    integrity: str = ""  # what the engine's check of itself has found
    resident: dict[int, int] = field(default_factory=dict)
    graphs: dict[int, int] = field(default_factory=dict)

    def count(self, ends: Iterable[str]) -> None:
        for end in ends:
            if end in (FINISHED, CANCELLED, DIFFERENT):
                setattr(self, end, getattr(self, end) + 1)
            else:
                self.lost += 1
                self.reasons[end] += 1

    def weigh(self, asked: int, llm: LLM) -> None:
        gc.collect()
        self.resident[asked] = resident_memory() or 0
        self.graphs[asked] = llm.model.graph_bytes() if self.resident[asked] else 0

    def line(self, asked: int) -> str:
        resident, graphs = (held[asked] / MIB for held in (self.resident, self.graphs))
        return (
            f"{asked:6} asked, {resident:6.1f} MiB resident ({graphs:5.1f} in graphs): {self.finished} finished, "
            f"{self.cancelled} cancelled, {self.lost} lost {dict(self.reasons) or ''}"
        )

    def wrong(self, plan: Plan) -> list[str]:
        """What speaks against the engine, in words."""
        found = [f"{n} {what}" for n, what in ((self.lost, "lost"), (self.different, "different")) if n]
        if self.integrity:
            found.append(self.integrity)
        if self.growth(plan) > plan.growth * MIB:
            found.append(f"memory grew by {self.growth(plan) / MIB:.1f} MiB, more than {plan.growth:g}, beside graphs")
        return found

    def growth(self, plan: Plan) -> int:
        """Bytes, behind the first tenth of the requests, beside graphs, which have a budget of their own (TS_GRAPH_BUDGET_MB).

        0 where the system does not tell.
        """
        first, last = (self.resident[at] - self.graphs[at] for at in (plan.requests // 10, plan.requests))
        return max(0, last - first)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan = Plan(10_000)
    parser.add_argument("--model", help="path or name [a tiny one, written for the purpose]")
    parser.add_argument("--requests", type=int, default=plan.requests, help="[%(default)s]")
    parser.add_argument("--cancel", type=float, default=plan.cancel, help="share that is cancelled [%(default)s]")
    parser.add_argument("--readers", type=int, default=plan.readers, help="threads that ask [%(default)s]")
    parser.add_argument("--slots", type=int, default=4, help="requests side by side [%(default)s]")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--growth", type=float, default=plan.growth, help="MiB that memory may grow by [%(default)s]")


def main(arguments: argparse.Namespace) -> int:
    plan = Plan(arguments.requests, arguments.cancel, arguments.readers, arguments.seed, arguments.growth)
    if plan.requests < 10 or plan.readers < 1 or not 0 <= plan.cancel <= 1:
        raise UsageError("--requests is at least 10, --readers at least 1, --cancel a share from 0 to 1")
    with ExitStack() as stack:
        path = arguments.model
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny.gguf"
            write(path, tiny())
        llm = stack.enter_context(
            LLM(path, n_ctx=N_CTX, n_seq=arguments.slots, n_threads=arguments.threads, cache_bytes=CACHE)
        )
        started = time.monotonic()
        report = run(llm, plan, print)
        seconds = time.monotonic() - started
    wrong = report.wrong(plan)
    print("; ".join(wrong) or "nothing was lost")
    found = asdict(report) | {"growth": report.growth(plan), "seconds": round(seconds, 1), "wrong": wrong}
    print(json.dumps(asdict(plan) | {"slots": arguments.slots} | found))
    return 1 if wrong else 0


def run(llm: LLM, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> Report:
    """All requests of the plan, in ten rounds; `tell` gets a line after each."""
    report, soak = Report(), Soak(llm, plan)
    report.weigh(0, llm)
    rounds = [range(plan.requests * i // 10, plan.requests * (i + 1) // 10) for i in range(10)]
    for numbers in rounds:
        soak.round(numbers, report)
        report.integrity = report.integrity or soak.integrity()
        report.weigh(numbers.stop, llm)
        tell(report.line(numbers.stop))
    return report


class Soak:
    """Who asks. The engine is the model's own, on its thread."""

    def __init__(self, llm: LLM, plan: Plan) -> None:
        self.llm, self.plan = llm, plan
        self.asks = make_asks(llm.model.vocab_size, plan.seed)
        self.expected = [llm.generate(ask.ids, ask.params, speculation="off").tokens for ask in self.asks]

    def round(self, numbers: range, report: Report) -> None:
        """These requests, by all readers side by side; returns when all have ended, or none has for PATIENCE seconds."""
        waiting, ends = deque(numbers), deque[str]()
        threads = [
            threading.Thread(target=self._read, args=(waiting, ends), daemon=True) for _ in range(self.plan.readers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            before = -1
            while thread.is_alive() and len(ends) > before:
                before = len(ends)
                thread.join(PATIENCE)
        report.count([*ends, *["no end"] * (len(numbers) - len(ends))])

    def integrity(self) -> str:
        """What is wrong with an engine that nobody asks anything; "" where nothing is."""
        engine = self.llm.engine
        try:
            engine.call(engine.check_integrity)
        except TsggError as error:
            return str(error)
        left = engine.call(lambda: list(engine.scheduler.requests()))
        return f"{len(left)} requests are left in the scheduler" if left else ""

    def _read(self, waiting: deque[int], ends: deque[str]) -> None:
        """One reader: a request after the other, as long as there are any."""
        with suppress(IndexError):
            while True:
                rng = random.Random(self.plan.seed << 32 | waiting.popleft())
                index = rng.randrange(len(self.asks))
                ask, expected = self.asks[index], self.expected[index]
                leave = rng.randint(0, ask.tokens) if rng.random() < self.plan.cancel else None
                try:
                    tokens, end = (self._stream if rng.random() < 0.5 else self._submit)(ask, leave, rng)
                except Exception as error:
                    ends.append(f"{type(error).__name__}: {error}")
                    continue
                known = expected if end == FINISHED else expected[: len(tokens)]
                ends.append(end if tokens == known else DIFFERENT)

    def _stream(self, ask: Ask, leave: int | None, rng: random.Random) -> tuple[tuple[int, ...], str]:
        """Through the API of texts. Its reader leaves by closing the iterator: behind `leave` tokens, None to stay."""
        tokens: list[int] = []
        with closing(self.llm.stream(ask.ids, ask.params, speculation=rng.choice(DRAFTERS))) as chunks:
            for chunk in chunks:
                tokens.append(chunk.token)
                if leave is not None and len(tokens) > leave:
                    return tuple(tokens), CANCELLED
                if rng.random() < SLOW:
                    time.sleep(0.002)
        return tuple(tokens), FINISHED

    def _submit(self, ask: Ask, leave: int | None, rng: random.Random) -> tuple[tuple[int, ...], str]:
        """Past it, to the engine. A timer cancels at any moment, also before the first token."""
        engine, tokenizer = self.llm.engine, self.llm.tokenizer
        ends, never = tokenizer.end_of_generation, tokenizer.suppressed
        vocab = self.llm.model.vocab_size
        sampler = RowSampler(ask.params, vocab, prompt=ask.ids, end_of_generation=ends, suppressed=never)
        stream = engine.submit(ask.ids, sampler, priority=rng.choice((0, 0, 1)), most_unread=rng.choice((2, None)))
        timer = None if leave is None else threading.Timer(0.004 * leave * rng.random(), stream.cancel)
        if timer is not None:
            timer.start()
        tokens: list[int] = []
        while (event := stream.read(PATIENCE)) is not None:
            tokens += event.tokens
        if timer is not None:
            timer.join()
        cancelled = stream.outcome.finish_reason == CANCELLED
        return tuple(tokens), CANCELLED if cancelled else FINISHED


def make_asks(vocab: int, seed: int) -> list[Ask]:
    """Short prompts, many of which begin alike; greedy and seeded ones."""
    rng = random.Random(seed)
    shared = rng.choices(range(vocab), k=max(BEGINNINGS))
    asks = []
    for number in range(PROMPTS):
        ids = (*shared[: rng.choice(BEGINNINGS)], *rng.choices(range(vocab), k=rng.randint(1, 24)))
        params = SamplingParams(
            max_tokens=rng.randint(1, MOST), temperature=rng.choice((0.0, 1.0)), seed=number, ignore_eos=True
        )
        asks.append(Ask(ids, params))
    return asks


def tiny() -> Recipe:
    """A llama with two small layers."""
    e, heads, head, width, layers, vocab = 64, 4, 32, 96, 2, 512
    metadata = {
        "llama.context_length": 1024,
        "llama.embedding_length": e,
        "llama.block_count": layers,
        "llama.feed_forward_length": width,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": heads // 2,
        "llama.attention.key_length": head,
        "llama.attention.value_length": head,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": head,
    }
    ones = normal(0.0, 1.0)
    tensors = [
        Tensor("token_embd.weight", (e, vocab), fill=normal(1.0)),
        Tensor("output_norm.weight", (e,), fill=ones),
        Tensor("output.weight", (e, vocab), fill=normal(0.5)),
    ]
    for p in (f"blk.{layer}." for layer in range(layers)):
        tensors += [
            Tensor(f"{p}attn_norm.weight", (e,), fill=ones),
            Tensor(f"{p}ffn_norm.weight", (e,), fill=ones),
            Tensor(f"{p}attn_q.weight", (e, heads * head)),
            Tensor(f"{p}attn_k.weight", (e, heads // 2 * head)),
            Tensor(f"{p}attn_v.weight", (e, heads // 2 * head)),
            Tensor(f"{p}attn_output.weight", (heads * head, e)),
            Tensor(f"{p}ffn_gate.weight", (e, width)),
            Tensor(f"{p}ffn_up.weight", (e, width)),
            Tensor(f"{p}ffn_down.weight", (width, e)),
        ]
    return Recipe("llama", metadata, tensors, vocab, "gpt-2")
