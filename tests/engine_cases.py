"""Tiny models of every kind of memory and every cache type, and what a request gives on them alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from tests.engine_requests import DRAFTING, PLAIN, Wish, alone, write
from tests.test_recurrent_memory import SHAPE
from tests.tiny_gemma4 import TinyGemma4, write_pair
from tests.tiny_models import TinyLlama, write_tiny
from tests.tiny_qwen35 import write_qwen35
from tests.trunk_steps import differing_cells
from tsgg.memory import Sequence
from tsgg.memory.memory import LARGEST_RUN
from tsgg.model import Model
from tsgg.speculative import SpeculationOptions
from tsgg.speculative.protocol import Batch, Want

SHORT, LONG = 500, 1000  # tokens of context; LONG is more than the ring of a window layer, which is then written over
HEAD = SpeculationOptions(enabled=True, type="draft-head", draft=3, adaptive=False)
LOOKUPS = (
    PLAIN,
    DRAFTING,
    SpeculationOptions(enabled=True, type="suffix", draft=7, adaptive=False, shared_corpus=False),
    SpeculationOptions(enabled=True, type="ngram"),  # the window that pays, by the test's clock
)


@dataclass(frozen=True)
class Case:
    """kind: of `KINDS`, or "experts", "nextn" (a hybrid with its own draft head), "assistant" (Gemma 4 and a drafter)."""

    kind: str
    types: tuple[str, str] = ("f16", "f16")
    slots: int = 2

    @property
    def n_ctx(self) -> int:
        return LONG if self.kind in ("tinywindow", "assistant") else SHORT

    def __str__(self) -> str:
        return f"{self.kind} {'/'.join(self.types)} {self.slots}"


class Bench:
    """The models of one case: the engine's with its slots, and another one on which requests run alone."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self._folder = case, folder
        self.saved = folder / "prefixes"
        self.model = self._load(case.slots)
        self._known: dict[Wish, tuple[int, ...]] = {}
        self.options = (*LOOKUPS, *self._head())

    @cached_property
    def second(self) -> Model:
        """The same file loaded again, as another process would."""
        return self._load(self.case.slots)

    @cached_property
    def _lone(self) -> Model:
        return self._load(1)

    def close(self) -> None:
        for model in (self.model, self.second, self._lone):
            model.close()

    def expected(self, wish: Wish, most: int) -> tuple[int, ...]:
        """The stream of the wish alone: of `most` tokens computed once, of which fewer are the beginning."""
        longest = replace(wish, tokens=most)
        if longest not in self._known:
            self._known[longest] = alone(self._lone, longest)
        return self._known[longest][: wish.tokens]

    def differences(self, model: Model, sequence: Sequence) -> list[str]:
        """Cache tensors in which a slot of an engine's model differs from a slot that read the same tokens alone."""
        fresh = self._lone.new_sequence()
        for start in range(0, sequence.length, LARGEST_RUN):
            chunk = sequence.tokens[start : start + LARGEST_RUN]
            self._lone.forward(Batch((fresh,), np.array([chunk], np.int32), Want("last")))
            fresh.commit(len(chunk))
        try:
            return differing_cells(model, sequence, fresh, self._lone)
        finally:
            self._lone.release(fresh)

    def _load(self, slots: int) -> Model:
        k, v = self.case.types
        return Model(self._file(), n_ctx=self.case.n_ctx, n_seq=slots, n_threads=1, cache_type_k=k, cache_type_v=v)

    def _file(self) -> Path:
        kind, path = self.case.kind, self._folder / f"{self.case.kind}.gguf"
        if kind == "assistant":
            return self._pair[0]
        if kind == "experts":
            return write_tiny(path, TinyLlama(experts=4, weights="q4_0"))
        if kind == "nextn":
            return write_qwen35(path, replace(SHAPE, nextn=1))
        return write(self._folder, kind)

    @cached_property
    def _pair(self) -> tuple[Path, Path]:
        return write_pair(self._folder, TinyGemma4("e"))

    def _head(self) -> tuple[SpeculationOptions, ...]:
        if self.case.kind == "assistant":
            return (replace(HEAD, draft_model=str(self._pair[1])),)
        return (HEAD,) if self.case.kind == "nextn" else ()
