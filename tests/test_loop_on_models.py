"""The draft-verify-accept loop on real graphs: invariants 1, 3, 4 and 6 of the design.

The reference is a plain loop written here: one row per forward, no speculation code. Besides tokens it keeps the bytes of
every row that a token was drawn from, so a stream that agrees by luck does not pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests import windowed
from tests.tiny_models import TinyLlama, write_tiny
from tests.trunk_steps import GOLDEN, PLAIN, golden_trunks
from tsgg.forward import StepRows
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.speculative import SpeculationOptions, SpeculativeExecution
from tsgg.speculative.protocol import Batch, CommittedRows, Draft, DraftContext, Speculator, Want
from tsgg.speculative.protocol import Sequence as AnySequence

WINDOWS = (1, 2, 3, 4, 7, 8, 15, 16)
COUNT = 60
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT)
SEEDED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=11, max_tokens=COUNT)
TINY = {
    "tiny": TinyLlama(),
    "tiny experts q4_0": TinyLlama(experts=4, weights="q4_0"),
    "tiny window": TinyLlama(layers=3, arch=windowed.TinyWindow.name),
}


@contextmanager
def opened(name: str, folder: Path, n_seq: int = 1) -> Iterator[Model]:
    path = write_tiny(folder / "m.gguf", TINY[name]) if name in TINY else GOLDEN / "trunks" / f"{name}.gguf"
    with Model(path, n_ctx=400, n_seq=n_seq, n_threads=1) as model:
        yield model


def prompt_of(model: Model, length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, model.vocab_size, length).tolist()
    return tokens


@dataclass
class Stream:
    """What one request gave: its tokens, and by position the bytes of the row that each was drawn from."""

    tokens: list[int] = field(default_factory=list)
    rows: dict[int, bytes] = field(default_factory=dict)


class Recorder:
    """A sampler that keeps the rows it is shown."""

    def __init__(self, model: Model, prompt: list[int], params: SamplingParams) -> None:
        self.inner = RowSampler(params, model.vocab_size, prompt=prompt)
        self.stream = Stream(self.inner.tokens)

    @property
    def finished(self) -> str | None:
        return self.inner.finished

    def sample(self, logits: np.ndarray, position: int) -> int:
        self.stream.rows[position] = logits.tobytes()
        return self.inner.sample(logits, position)


def plain(model: Model, prompt: list[int], params: SamplingParams) -> Stream:
    """One row per forward."""
    sampler, sequence = Recorder(model, prompt, params), model.new_sequence()
    tokens = prompt
    while sampler.finished is None:
        rows = model.forward(Batch((sequence,), np.array([tokens], np.int32), PLAIN))
        token = sampler.sample(rows.logits(0, len(tokens) - 1), sequence.length + len(tokens))
        sequence.commit(len(tokens))
        tokens = [token]
    model.release(sequence)
    return sampler.stream


class Scripted(Speculator):
    """Drafts what a function of (key, position, window) says, and keeps the corpus that it was told of."""

    name = "scripted"

    def __init__(self, script: Callable[[int, int, int], list[int]]) -> None:
        self.script = script
        self.corpus: dict[int, list[int]] = {}
        self.sequences: dict[int, AnySequence] = {}

    def open(self, key: int, sequence: AnySequence) -> None:
        self.corpus[key], self.sequences[key] = list(sequence.tokens), sequence

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        for context in contexts:
            assert self.corpus[context.key] == self.sequences[context.key].tokens, "the corpus is the committed tokens"
            assert context.position == len(self.corpus[context.key])
        return [Draft(tuple(self.script(c.key, c.position, c.window))) for c in contexts]

    def commit(self, key: int, tokens: list[int], start_position: int, rows: CommittedRows | None) -> None:
        assert start_position == len(self.corpus[key])
        self.corpus[key] += tokens
        if rows is not None and self.needs_hidden_state:
            assert rows.kept == len(tokens) and np.isfinite(rows.hidden()).all()

    def close(self, key: int) -> None:
        assert self.corpus.pop(key) == self.sequences.pop(key).tokens


class Peeking(Scripted):
    """One that asks for the trunk's rows: every verify then hands out hidden rows and taps."""

    needs_hidden_state = True
    taps = (0, 2)


def drafts(
    kind: str, streams: list[Stream], prompts: list[list[int]], vocab: int
) -> Callable[[int, int, int], list[int]]:
    """Scripts that know the answer: `right` always tells it, the others lie in ways of their own."""
    rng = np.random.default_rng(5)

    def script(key: int, position: int, window: int) -> list[int]:
        done = position - len(prompts[key]) + 1  # tokens drawn so far, the last included
        truth = streams[key].tokens[done : done + window]
        truth += [0] * (window - len(truth))
        if kind == "right":
            return truth
        if kind == "wrong":
            return [(token + 1) % vocab for token in truth]
        if kind == "noise":  # too many tokens, and some that the model does not have
            return list(map(int, rng.integers(-2, vocab + 2, int(rng.integers(0, window + 4)))))
        cut = int(rng.integers(0, window + 1))  # "mixed": right up to somewhere, then one lie, then right again
        return [(t + 1) % vocab if i == cut else t for i, t in enumerate(truth)][: int(rng.integers(1, window + 1))]

    return script


def speculate(
    model: Model, prompts: list[list[int]], params: SamplingParams, speculator: Speculator, window: int
) -> tuple[list[Stream], SpeculativeExecution]:
    """All prompts together, a sequence each, through the loop."""
    execution = SpeculativeExecution(model, speculator, SpeculationOptions(enabled=True, draft=window))
    samplers = [Recorder(model, prompt, params) for prompt in prompts]
    requests = []
    sequences: list[Sequence] = []
    for prompt, sampler in zip(prompts, samplers, strict=True):
        sequence = model.new_sequence()
        request = execution.arm(sequence, sampler, remaining=None)
        rows = model.forward(Batch((sequence,), np.array([prompt], np.int32), execution.prefill_want(request)))
        request.last = sampler.sample(rows.logits(0, len(prompt) - 1), len(prompt))
        sequence.commit(len(prompt))
        execution.catch_up(request, rows, 0)
        requests.append(request)
        sequences.append(sequence)
    while any(request.finished is None for request in requests):
        for step in execution.step(requests):
            assert step.tokens or step.finished
    for request, sampler, prompt in zip(requests, samplers, prompts, strict=True):
        assert request.sequence.tokens == [*prompt, *sampler.stream.tokens[:-1]], "memory holds exactly the prefix"
        execution.disarm(request)
    for sequence in sequences:
        model.release(sequence)
    return [sampler.stream for sampler in samplers], execution


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", TINY)
def test_whatever_is_drafted_the_stream_and_every_row_are_those_of_plain_decoding(
    tmp_path: Path, name: str, params: SamplingParams
) -> None:
    with opened(name, tmp_path) as model:
        prompt = prompt_of(model, 230)  # the stream crosses the border of a KV bucket
        expected = plain(model, prompt, params)
        for window in WINDOWS:
            for kind in ("right", "wrong", "mixed", "noise"):
                script = drafts(kind, [expected], [prompt], model.vocab_size)
                (stream,), execution = speculate(model, [prompt], params, Scripted(script), window)
                assert stream == expected, f"window {window}, {kind} drafts"
                stats = execution.counters.snapshot()
                assert stats.dropped is None and (kind == "wrong") <= (stats.accepted == 0)
                assert kind != "right" or stats.steps <= (COUNT - 1 + window) // (window + 1) + window


@pytest.mark.parametrize("name", golden_trunks())
def test_on_every_architecture_the_stream_is_that_of_plain_decoding(tmp_path: Path, name: str) -> None:
    with opened(name, tmp_path) as model:
        prompt = prompt_of(model, 70)
        for params, window in ((GREEDY, 4), (SEEDED, 7)):
            expected = plain(model, prompt, params)
            script = drafts("mixed", [expected], [prompt], model.vocab_size)
            assert speculate(model, [prompt], params, Scripted(script), window)[0] == [expected]


def test_a_drafter_that_reads_hidden_rows_does_not_change_the_stream(tmp_path: Path) -> None:
    with opened("tiny window", tmp_path) as model:
        prompt = prompt_of(model, 40)
        expected = plain(model, prompt, SEEDED)
        script = drafts("mixed", [expected], [prompt], model.vocab_size)
        streams, execution = speculate(model, [prompt], SEEDED, Peeking(script), 5)
        assert streams == [expected] and execution.counters.snapshot().accepted > 0


@pytest.mark.parametrize(
    "kind",
    ["right", "mixed", "noise"],
)
def test_requests_decoded_together_give_what_each_gives_alone(tmp_path: Path, kind: str) -> None:
    with opened("tiny", tmp_path, n_seq=3) as model:
        prompts = [prompt_of(model, length, length) for length in (30, 251, 4)]
        expected = [plain(model, prompt, SEEDED) for prompt in prompts]
        script = drafts(kind, expected, prompts, model.vocab_size)
        assert speculate(model, prompts, SEEDED, Scripted(script), 7)[0] == expected


@pytest.mark.parametrize("method", ["open", "propose", "commit", "close"])
def test_a_drafter_that_raises_costs_its_request_nothing_but_the_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    caplog.set_level(logging.INFO, "tsgg.speculative")
    with opened("tiny", tmp_path) as model:
        prompt = prompt_of(model, 20)
        expected = plain(model, prompt, GREEDY)
        speculator = Scripted(drafts("mixed", [expected], [prompt], model.vocab_size))
        calls, work = [0], getattr(speculator, method)

        def break_down(*arguments: object) -> object:
            calls[0] += 1
            if calls[0] == (1 if method in ("open", "close") else 4):
                raise ValueError("drafter broke")
            return work(*arguments)

        setattr(speculator, method, break_down)
        streams, _ = speculate(model, [prompt], GREEDY, speculator, 4)
        assert streams == [expected]
        assert sum("drafter broke" in record.getMessage() for record in caplog.records) == 1


def test_a_context_that_fills_up_ends_the_request_with_the_same_tokens(tmp_path: Path) -> None:
    with Model(write_tiny(tmp_path / "m.gguf"), n_ctx=50, n_threads=1) as model:
        prompt = prompt_of(model, 41)
        short = replace(GREEDY, max_tokens=10)  # the last token need not lie in memory
        expected = plain(model, prompt, short)
        script = drafts("right", [expected], [prompt], model.vocab_size)
        streams, _ = speculate(model, [prompt], GREEDY, Scripted(script), 8)
        assert streams[0].tokens == expected.tokens and streams[0].rows == expected.rows


def test_a_verify_wants_no_more_than_its_drafter_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wants: set[Want] = set()
    with opened("tiny", tmp_path) as model:
        forward = model.forward

        def watched(batch: Batch) -> StepRows:
            wants.add(batch.want)
            return forward(batch)

        monkeypatch.setattr(model, "forward", watched)
        prompt = prompt_of(model, 9)
        expected = plain(model, prompt, GREEDY)
        speculate(model, [prompt], GREEDY, Scripted(drafts("right", [expected], [prompt], model.vocab_size)), 3)
    assert wants == {Want("last"), Want("all")}


def test_a_real_model_speculates_exactly(smollm2_path: Path) -> None:
    with Model(smollm2_path, n_ctx=300) as model:
        prompt = prompt_of(model, 20)
        for params, window in ((replace(GREEDY, max_tokens=20), 4), (replace(SEEDED, max_tokens=30), 8)):
            expected = plain(model, prompt, params)
            script = drafts("mixed", [expected], [prompt], model.vocab_size)
            streams, execution = speculate(model, [prompt], params, Scripted(script), window)
            assert streams == [expected] and execution.counters.snapshot().accepted > 5
