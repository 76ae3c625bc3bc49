"""Gemma 4 with an assistant that often guesses right: what is accepted, and that it changes nothing; rollback past the window.

Trunks of every kind (dense, E-like, mixture) and their assistants are made here: tests/tiny_gemma4.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.test_exact_rows import check_rows
from tests.test_loop_on_models import GREEDY, plain, speculate
from tests.test_memory_exact import History
from tests.tiny_gemma4 import WALKED, WINDOW, TinyGemma4, write_pair
from tests.trunk_steps import Array, decode, same_bits, step
from tsgg.assistant import AssistantHead
from tsgg.memory import Sequence, Slots
from tsgg.model import Model
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.speculative import REGISTRY, SpeculationOptions, SpeculativeExecution
from tsgg.speculative.draft_head import NO_ROW, DraftHeadSpeculator
from tsgg.speculative.protocol import Batch, CommittedRows, DraftContext, HeadRows, Want

RING = 768  # cells of a window layer's slot: the window and a run of 512, in steps of 256
WINDOWS = (1, 2, 3, 4, 7, 8, 15)
DRAFTS = 16  # most drafts of a verify here
AFTER = 32  # rows that are compared after each rollback
UNSEEN = Want("none")
SEEDED = SamplingParams(temperature=0.5, top_p=0.95, seed=11, max_tokens=60)


class Pair:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.paths = write_pair(folder, TinyGemma4(kind))
        self.model = Model(self.paths[0], device="cpu", n_ctx=1700, n_seq=3, n_threads=1)
        self.head: AssistantHead = self.model.draft_model(self.paths[1])

    def speculator(self, gate: float | None = None) -> DraftHeadSpeculator:
        options = SpeculationOptions(enabled=True, type="draft-head", pmin=gate)
        made = REGISTRY.create("draft-head", self.model, options, self.head)
        assert isinstance(made, DraftHeadSpeculator)
        return made


@pytest.fixture(scope="module", params=["dense", "e", "moe"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(request.param, tmp_path_factory.mktemp(request.param))
    assert pair.model.memory.arenas[f"window{WINDOW}"].cells == RING
    yield pair
    pair.model.close()


@pytest.fixture
def pair(opened: Pair) -> Iterator[Pair]:
    yield opened
    opened.model.slots = Slots(3, opened.model.n_ctx, opened.model.memory)  # whatever a test still holds is given back


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(WALKED.start, WALKED.stop, length).tolist()
    return tokens


def prefill(model: Model, sequence: Sequence, tokens: list[int]) -> None:
    for start in range(0, len(tokens), 512):
        step(model, sequence, tokens[start : start + 512], want=UNSEEN)


# -- what is accepted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_most_drafts_are_accepted_and_every_row_is_that_of_plain_decoding(pair: Pair, params: SamplingParams) -> None:
    """Rows are compared too, bit for bit: whatever was drafted, each token is drawn from the row of its own prefix."""
    prompt = prompt_of(30)
    expected = plain(pair.model, prompt, params)
    for window in WINDOWS:
        (stream,), execution = speculate(pair.model, [prompt], params, pair.speculator(), window)
        assert stream == expected, f"window {window}"
        stats = execution.counters.snapshot()
        assert stats.emitted == len(stream.tokens) - 1 == stats.steps + stats.accepted
        assert stats.acceptance > 0.5 and stats.dropped is None, f"window {window}: {stats}"
        assert 0 < stats.accepted < stats.drafted <= stats.steps * window


@pytest.mark.parametrize("length", [WINDOW, 4 * WINDOW, RING - 20, 2 * RING - 30])
def test_contexts_far_past_the_window_change_no_row(pair: Pair, length: int) -> None:
    """The two last streams pass the end of the ring. Prompts of more than 512 tokens go in as they do in a generation."""
    prompt = prompt_of(length, length)
    held = pair.model.new_sequence()
    prefill(pair.model, held, prompt[:-1])
    streams = []
    for speculator in (None, pair.speculator()):
        assert held.truncate(length - 1) == length - 1
        sampler = RowSampler(SEEDED, pair.model.vocab_size, prompt=prompt)
        execution = SpeculativeExecution(pair.model, speculator, SpeculationOptions(enabled=True, draft=7))
        first = sampler.sample(step(pair.model, held, prompt[-1:], want=Want("last"))[0], length)
        request = execution.arm(held, sampler, last=first)
        while request.finished is None:
            list(execution.step([request]))
        execution.disarm(request)
        streams.append(list(sampler.tokens))
    assert streams[0] == streams[1]
    assert execution.counters.snapshot().acceptance > 0.4


def test_sequences_side_by_side_give_what_each_gives_alone(pair: Pair) -> None:
    prompts = [prompt_of(length, length) for length in (30, 61, 4)]
    expected = [plain(pair.model, prompt, SEEDED) for prompt in prompts]
    streams, execution = speculate(pair.model, prompts, SEEDED, pair.speculator(), 4)
    assert streams == expected and execution.counters.snapshot().acceptance > 0.5


# -- it goes on from anywhere ------------------------------------------------------------------------------------------


def finish(pair: Pair, sequence: Sequence, sampler: RowSampler, last: int) -> SpeculativeExecution:
    execution = SpeculativeExecution(pair.model, pair.speculator(), SpeculationOptions(enabled=True, draft=4))
    request = execution.arm(sequence, sampler, last=last)
    while request.finished is None:
        list(execution.step([request]))
    execution.disarm(request)
    return execution


def test_a_reused_prefix_drafts_after_its_first_step(pair: Pair) -> None:
    """Nobody captured the prefix's rows. Behind it another text stood before, of which nothing may be seen."""
    model, prompt = pair.model, prompt_of(40)
    expected = plain(model, prompt, GREEDY)
    sequence = model.new_sequence()
    prefill(model, sequence, [*prompt[:-1], *prompt_of(50, 9)])
    assert sequence.truncate(len(prompt) - 1) == len(prompt) - 1
    sampler = RowSampler(GREEDY, model.vocab_size, prompt=prompt)
    last = sampler.sample(step(model, sequence, prompt[-1:], want=Want("last"))[0], len(prompt))
    stats = finish(pair, sequence, sampler, last).counters.snapshot()
    assert sampler.tokens == expected.tokens
    assert dict(stats.silence_reasons).get(NO_ROW) == 1 and stats.acceptance > 0.5


def test_after_a_gap_a_draft_is_what_it_would_have_been_without_one(pair: Pair) -> None:
    """Tokens whose rows were not captured, and a verify of which only some rows were kept."""
    model, prompt = pair.model, prompt_of(40, 5)
    truth = prompt_of(12, 6)
    drafts = []
    for gap in (False, True):
        sequence, speculator = model.new_sequence(), pair.speculator(0.0)
        speculator.open(0, sequence)
        for start, tokens, kept in ((0, prompt, 40), (40, [*truth[:5], 1, 2, 3], 5), (45, truth[5:9], 4)):
            rows = model.forward(Batch((sequence,), np.array([tokens], np.int32), Want("all", "all")))
            sequence.commit(kept)
            seen = not gap or start == 45
            speculator.commit(0, tokens[:kept], start, CommittedRows(rows, 0, kept) if seen else None)
        (draft,) = speculator.propose([DraftContext(0, truth[9], sequence.length, 6)])
        drafts.append(draft)
        speculator.close(0)
    assert drafts[0] == drafts[1] and len(drafts[0].tokens) == 6


def test_a_drafted_head_row_depends_on_all_it_is_given(pair: Pair) -> None:
    """Else acceptance would say nothing about caches, positions and hidden rows."""
    model, sequence = pair.model, pair.model.new_sequence()
    prefill(model, sequence, prompt_of(50))
    row = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    base = pair.head.run(sequence.slot, 40, row, 50)[0].copy()
    others = (41, row, 50), (40, row[::-1], 50), (40, row, 49)
    assert all(np.abs(pair.head.run(sequence.slot, *other)[0] - base).max() > 0.05 for other in others)


# -- stops and failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 4, 9, 17])
def test_nothing_is_accepted_past_an_end_of_generation(pair: Pair, at: int) -> None:
    prompt = prompt_of(30)
    whole = plain(pair.model, prompt, GREEDY).tokens
    end = whole[at]
    cut = whole[: whole.index(end) + 1]
    for window in WINDOWS:
        sequence = pair.model.new_sequence()
        sampler = RowSampler(GREEDY, pair.model.vocab_size, prompt=prompt, end_of_generation={end})
        execution = SpeculativeExecution(pair.model, pair.speculator(), SpeculationOptions(enabled=True, draft=window))
        request = execution.arm(sequence, sampler)
        rows = pair.model.forward(Batch((sequence,), np.array([prompt], np.int32), execution.prefill_want(request)))
        request.last = sampler.sample(rows.logits(0, len(prompt) - 1), len(prompt))
        sequence.commit(len(prompt))
        execution.catch_up(request, rows, 0)
        while request.finished is None:
            list(execution.step([request]))
        execution.disarm(request)
        assert (sampler.finished, sampler.tokens) == ("stop", cut)
        assert sequence.tokens == [*prompt, *cut[:-1]]
        pair.model.release(sequence)


def test_a_head_that_breaks_down_costs_its_request_nothing_but_the_drafts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tsgg.speculative")
    prompt = prompt_of(30)
    expected = plain(pair.model, prompt, SEEDED)
    run, calls = pair.head.run, [0]

    def break_down(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] == 7:
            raise MemoryError("the head broke")
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pair.head, "run", break_down)
    (stream,), execution = speculate(pair.model, [prompt], SEEDED, pair.speculator(), 3)
    assert stream == expected and calls[0] == 7 and execution.counters.snapshot().accepted > 0
    assert sum("the head broke" in record.getMessage() for record in caplog.records) == 1


# -- the trunk's memory ------------------------------------------------------------------------------------------------

# Half a window, one, one and a half, four; and where verifies or what follows them wrap round the ring.
CONTEXTS = (WINDOW // 2, WINDOW, 3 * WINDOW // 2, 4 * WINDOW, RING - 8, 2 * RING - 3)
SOME, ALL = (1, 3, 8, DRAFTS), range(1, DRAFTS + 1)


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_rollback_leaves_what_one_row_decodes_leave(pair: Pair, context: int) -> None:
    """Up to 16 drafts, every number of rows kept; then the next 32 rows, at once, and for one choice one by one."""
    model, rng = pair.model, random.Random(context)
    prompt, truth = (rng.choices(range(model.vocab_size), k=count) for count in (context, DRAFTS + 1 + AFTER))
    plain_one, tried = model.new_sequence(), model.new_sequence()
    for sequence in (plain_one, tried):
        prefill(model, sequence, prompt)
    expected = decode(model, plain_one, truth)
    for drafts in ALL if context in CONTEXTS[2:5:2] else SOME:
        chosen = rng.randint(0, drafts + 1)
        for kept in range(drafts + 2):
            assert tried.truncate(context) == context
            wrong = rng.choices(range(model.vocab_size), k=DRAFTS + 1)
            verified = step(model, tried, truth[:kept] + wrong[: drafts + 1 - kept], kept)
            assert same_bits(verified[:kept], expected[:kept]), f"rows of {drafts} drafts, {kept} kept"
            follow = truth[kept : kept + AFTER]
            after = decode(model, tried, follow) if kept == chosen else step(model, tried, follow)
            assert same_bits(after, expected[kept : kept + AFTER]), f"after {drafts} drafts, {kept} kept"


def test_any_history_with_drafts_in_between_leaves_what_its_replay_leaves(pair: Pair) -> None:
    """Plain steps, verifies, truncations and prefill chunks, past the ring; the head drafts at every turn."""
    model, rng = pair.model, random.Random(1)
    history, scratch = History(model, rng), model.new_sequence()
    for rows in (400, 350):
        history.prefill(rows)
    for number in range(120):
        sequence, pick = history.sequence, rng.random()
        row = np.array([rng.gauss(0, 1) for _ in range(64)], np.float32)[None]
        pair.head.draft([HeadRows(sequence, row, np.array([30], np.int32), sequence.length - 1)], 3, 0.0)
        if sequence.left < 200 or pick < 0.1:
            history.truncate(sequence.length - rng.randint(1, 12))
        elif pick < 0.15:
            history.prefill(rng.choice((2, 31, 130)))
        elif pick < 0.3:
            history.decode()
        else:
            window = rng.randint(1, DRAFTS)
            history.verify(window, rng.randint(0, window + 1))
        if number % 40 == 39:
            history.check(scratch)


def test_a_verify_row_is_the_one_row_decode_past_the_window_and_the_ring(pair: Pair) -> None:
    for depth in (20, RING - 9, RING + 40):
        check_prefilled(pair.model, depth)


def check_prefilled(model: Model, depth: int) -> None:
    """`check_rows` behind a prompt that goes in by chunks."""
    if depth <= 512:
        check_rows(model, depth, tuple(range(1, 18)))
        return
    tokens = prompt_of(depth + 17, depth)
    sequence = model.new_sequence()
    prefill(model, sequence, tokens[:depth])
    alone = decode(model, sequence, tokens[depth:])
    for count in range(1, 18):
        assert sequence.truncate(depth) == depth
        assert same_bits(step(model, sequence, tokens[depth : depth + count]), alone[:count]), count


def test_memory_equals_a_fresh_prefill_of_the_whole_text(pair: Pair) -> None:
    """Without a scale in front of the soft max: where a difference would be largest."""
    model, history, fresh = pair.model, History(pair.model, random.Random(3)), pair.model.new_sequence()
    history.prefill(40)
    for window in WINDOWS * 2:
        history.verify(window, window // 2 + 1)
    ours: Array = step(model, history.sequence, [50])
    theirs = step(model, fresh, [*history.sequence.tokens[:-1], 50])[-1:]
    assert same_bits(ours, theirs)
