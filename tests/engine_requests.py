"""Helpers for tests of the engine: tiny files of every kind, engines that check themselves, streams of requests alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tests.windowed  # noqa: F401  (registers "tinywindow")
from tests.test_recurrent_memory import SHAPE
from tests.tiny_models import TinyLlama, write_tiny
from tests.tiny_qwen35 import write_qwen35
from tsgg.engine import Engine, Stream
from tsgg.model import Model
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.speculative import SpeculationOptions
from tsgg.speculative.protocol import Batch, Want

KINDS = ("llama", "tinywindow", "qwen35")  # full attention, windows, recurrent layers
PLAIN = SpeculationOptions()
DRAFTING = SpeculationOptions(enabled=True, type="ngram", draft=5, adaptive=False)  # whatever it costs
FEW = range(5, 9)  # tokens of a narrow answer


class CheckedEngine(Engine):
    """Looks at itself after every step; what it finds ends every stream."""

    def step(self) -> bool:
        busy = super().step()
        self.check_integrity()
        return busy


def write(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.gguf"
    if not path.exists():
        _ = write_qwen35(path, SHAPE) if kind == "qwen35" else write_tiny(path, TinyLlama(arch=kind, context=2048))
    return path


def engine(folder: Path, kind: str = "llama", slots: int = 2, types: tuple[str, str] = ("f16", "f16"),
           options: SpeculationOptions = PLAIN, cache_bytes: int = 64 << 20, n_ctx: int = 700) -> CheckedEngine:  # fmt: skip
    model = Model(
        write(folder, kind), n_ctx=n_ctx, n_seq=slots, n_threads=1, cache_type_k=types[0], cache_type_v=types[1]
    )
    return CheckedEngine(model, options, cache_bytes)


@dataclass(frozen=True)
class Wish:
    """A request as a value: what it gives depends on nothing else."""

    prompt: tuple[int, ...]
    tokens: int = 12
    temperature: float = 1.0
    seed: int = 0
    narrow: bool = False  # draws from FEW alone: a random model's answer hardly ever repeats itself, this one does

    def sampler(self, model: Model) -> RowSampler:
        bias = dict.fromkeys(FEW, 100.0) if self.narrow else {}
        params = SamplingParams(
            max_tokens=self.tokens, temperature=self.temperature, seed=self.seed, logit_bias=bias, ignore_eos=True
        )
        return RowSampler(params, model.vocab_size, prompt=self.prompt, token_limit=model.n_ctx - len(self.prompt) + 1)

    def submit(self, engine: Engine, options: SpeculationOptions | None = None, **keywords: object) -> Stream:
        return engine.submit(self.prompt, self.sampler(engine.model), options, **keywords)  # type: ignore[arg-type]


def alone(model: Model, wish: Wish) -> tuple[int, ...]:
    """Its tokens by plain forwards of one sequence that was empty before."""
    sequence, sampler = model.new_sequence(), wish.sampler(model)
    rows = list(wish.prompt)
    while sampler.finished is None:
        for start in range(0, len(rows), 512):
            chunk = rows[start : start + 512]
            given = model.forward(Batch((sequence,), np.array([chunk], np.int32), Want("last")))
            logits = given.logits(0, -1)
            sequence.commit(len(chunk))
        rows = [sampler.sample(logits, sequence.length)]
    model.release(sequence)
    return tuple(sampler.tokens)


@contextmanager
def standing(engine: Engine) -> Iterator[None]:
    """The engine makes no step meanwhile: what is submitted is taken in together."""
    go_on = threading.Event()
    gate = threading.Thread(target=lambda: engine.call(go_on.wait))
    gate.start()
    try:
        yield
    finally:
        go_on.set()
        gate.join()


def tokens_of(stream: Stream) -> tuple[int, ...]:
    return tuple(token for event in stream for token in event.tokens)


def text(count: int, seed: int, vocab: int = 200) -> tuple[int, ...]:
    """Token ids in which some runs come again, so that lookups draft."""
    rng = random.Random(seed)
    words = [rng.choices(range(3, vocab), k=rng.randint(2, 9)) for _ in range(8)]
    ids: list[int] = []
    while len(ids) < count:
        ids += rng.choice(words)
    return tuple(ids[:count])
