"""Sliding windows as rings, on Gemma 3: whatever was verified, rolled back, truncated or reused, rows come out as in a
replay of the same prefill chunks and one-row decodes, bit for bit, past the window and across the wrap of the ring."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.lone_loop import resume
from tests.trunk_steps import Array, decode, differing_cells, same_bits, step
from tsgg.errors import UsageError
from tsgg.ggml.devices import pick_device
from tsgg.llm import LLM
from tsgg.memory import Memory, Sequence
from tsgg.memory.memory import LARGEST_RUN, full_memory_bytes, memory_bytes
from tsgg.model import Model
from tsgg.models.base import Attention
from tsgg.speculative.protocol import Batch, Want

WINDOW, RING = 4, 768  # of the tiny trunk: 4 tokens + a run of 512, in steps of 256 cells
CONTEXTS = (WINDOW // 2, WINDOW, 6, 4 * WINDOW, RING - 8, RING, 2 * RING - 3)  # the last three: where verifies wrap
DRAFTS = 16  # most drafts of a verify here
AFTER = 32  # rows that are compared after each rollback
UNSEEN = Want("none")


@pytest.fixture(scope="module")
def tiny(golden_dir: Path) -> Iterator[Model]:
    """The golden Gemma 3 trunk. One thread: a second only waits where others use the cores."""
    with Model(golden_dir / "trunks" / "gemma3.gguf", device="cpu", n_ctx=1700, n_seq=2, n_threads=1) as model:
        arena = model.memory.arenas[f"window{WINDOW}"]
        assert arena.cells == RING
        yield model


def prefill(model: Model, sequence: Sequence, tokens: list[int]) -> None:
    """Forwards tokens in chunks as a generation does."""
    for start in range(0, len(tokens), LARGEST_RUN):
        step(model, sequence, tokens[start : start + LARGEST_RUN], want=UNSEEN)


# -- rollback ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_rollback_leaves_what_one_row_decodes_leave(tiny: Model, context: int) -> None:
    rng = random.Random(context)
    prompt, truth = (rng.choices(range(tiny.vocab_size), k=count) for count in (context, DRAFTS + 1 + AFTER))
    plain, tried = tiny.new_sequence(), tiny.new_sequence()
    try:
        for sequence in (plain, tried):
            prefill(tiny, sequence, prompt)
        expected = decode(tiny, plain, truth)
        for drafts in range(1, DRAFTS + 1):
            for kept in range(drafts + 2):
                assert tried.truncate(context) == context
                wrong = rng.choices(range(tiny.vocab_size), k=DRAFTS + 1)
                verified = step(tiny, tried, truth[:kept] + wrong[: drafts + 1 - kept], kept)
                assert same_bits(verified[:kept], expected[:kept]), f"rows of {drafts} drafts, {kept} kept"
                after = decode(tiny, tried, truth[kept : kept + AFTER])
                assert same_bits(after, expected[kept : kept + AFTER]), f"after {drafts} drafts, {kept} kept"
    finally:
        tiny.release(plain)
        tiny.release(tried)


def test_a_seeded_choice_of_rollbacks_is_exact_on_gemma3_270m(gemma3_path: Path) -> None:
    """Hidden rows: the head is a function of them. Contexts of 0.5, 1, 1.5 and 4 windows, and where the ring wraps."""
    rng = random.Random(270)
    with Model(gemma3_path, device="cpu", n_ctx=2304, n_seq=2) as model:
        assert (model.arch.attention()[0].window, model.memory.arenas["window512"].cells) == (512, 1024)
        plain, tried = model.new_sequence(), model.new_sequence()
        for context in (256, 512, 768, 1018, 2048):
            last = context == 2048
            prompt = rng.choices(range(model.vocab_size), k=context - plain.length)
            truth = rng.choices(range(model.vocab_size), k=DRAFTS + 1 + AFTER)
            for sequence in (plain,) if last else (plain, tried):
                prefill(model, sequence, prompt)
            expected = np.concatenate([_hidden(model, plain, [token]) for token in truth])
            if last:
                tried = plain  # it has told the truth and is not needed for more
            for one_by_one in (last, False):
                assert tried.truncate(context) == context
                drafts = rng.randint(1, DRAFTS)
                kept = rng.randint(1, drafts)
                wrong = rng.choices(range(model.vocab_size), k=drafts + 1 - kept)
                verified = _hidden(model, tried, truth[:kept] + wrong, kept)
                assert same_bits(verified[:kept], expected[:kept])
                runs = [[t] for t in truth[kept : kept + AFTER]] if one_by_one else [truth[kept : kept + AFTER]]
                after = np.concatenate([_hidden(model, tried, run) for run in runs])
                assert same_bits(after, expected[kept : kept + AFTER]), f"at {context}: {drafts} drafts, {kept} kept"
            if not last:  # both hold the same tokens again, made in another way
                tried.truncate(context)
                prefill(model, tried, truth)
                assert not differing_cells(model, plain, tried)


def _hidden(model: Model, sequence: Sequence, tokens: list[int], kept: int | None = None) -> Array:
    """`step` for the rows before the head: [rows, embedding]."""
    rows = model.forward(Batch((sequence,), np.array([tokens], np.int32), Want("none", hidden="all")))
    hidden: Array = rows.hidden(0).copy()
    sequence.commit(len(tokens) if kept is None else kept)
    return hidden


# -- any history -------------------------------------------------------------------------------------------------------


class History(RuleBasedStateMachine):
    """One sequence under every operation, a log to replay, and a ring of its own to say what can be reached."""

    model: ClassVar[Model]

    def __init__(self) -> None:
        super().__init__()
        self.sequence, self.scratch = self.model.new_sequence(), self.model.new_sequence()
        self.log: list[tuple[list[int], int]] = []  # tokens of a forward, how many of them are held
        self.ring: dict[int, int] = {}  # cell -> position written last
        self.drawn = random.Random(3)

    def draw(self, count: int) -> list[int]:
        return self.drawn.choices(range(self.model.vocab_size), k=count)

    def forward(self, tokens: list[int], kept: int, decoded: bool) -> None:
        start = self.sequence.length
        self.ring.update({position % RING: position for position in range(start, start + len(tokens))})
        step(self.model, self.sequence, tokens, kept, want=UNSEEN if not decoded else Want("all"))
        self.log += [([token], 1) for token in tokens[:kept]] if decoded else [(tokens, kept)]

    def reached(self, asked: int, reached: int) -> None:
        """Compares with the ring, written position by position, and shortens the log."""
        window = range(max(0, asked + 1 - WINDOW), asked)
        assert reached == (asked if all(self.ring[position % RING] == position for position in window) else 0)
        while sum(held for _, held in self.log) > reached:
            tokens, held = self.log.pop()
            before = sum(held for _, held in self.log)
            if before < reached:
                self.log.append((tokens, min(held, reached - before)))
        if not reached:
            self.ring.clear()

    @initialize(chunks=st.sampled_from(((2,), (4,), (6,), (16,), (512, 240), (130, 512, 120), (512, 512, 300))))
    def prompt(self, chunks: tuple[int, ...]) -> None:
        """0.5, 1, 1.5 and 4 windows; before the wrap of the ring, at it, past it."""
        for rows in chunks:
            self.prefill_chunk(rows)

    @precondition(lambda self: self.sequence.left >= LARGEST_RUN)
    @rule(rows=st.sampled_from((1, 2, 3, 7, 40, 129, 300, LARGEST_RUN)))
    def prefill_chunk(self, rows: int) -> None:
        self.forward(self.draw(rows), rows, decoded=False)

    @precondition(lambda self: self.sequence.left >= 5)
    @rule(count=st.integers(1, 5))
    def plain_steps(self, count: int) -> None:
        for _ in range(count):
            self.forward(self.draw(1), 1, decoded=True)

    @precondition(lambda self: self.sequence.left > DRAFTS)
    @rule(drafts=st.integers(1, DRAFTS), share=st.sampled_from((0.0, 0.3, 0.7, 1.0)))
    def verify(self, drafts: int, share: float) -> None:
        self.forward(self.draw(drafts + 1), 1 + int(share * drafts), decoded=True)

    @rule(share=st.floats(0, 1), by=st.sampled_from((1, 3, 17, 200, RING - LARGEST_RUN, RING)))
    def truncate(self, share: float, by: int) -> None:
        length = max(0, self.sequence.length - int(share * by))
        self.reached(length, self.sequence.truncate(length))

    @precondition(lambda self: any(position >= RING for position in self.ring.values()))
    @rule(beyond=st.integers(-2, 1))
    def truncate_to_the_edge(self, beyond: int) -> None:
        """To the least length whose window the ring still holds, and near it."""
        length = max(self.ring.values()) + 1 - RING + WINDOW - 1 + beyond
        self.reached(min(length, self.sequence.length), self.sequence.truncate(length))

    @precondition(lambda self: self.sequence.length > 0)
    @rule(by=st.sampled_from((0, 1, 30, 250, 800)), more=st.integers(1, 60))
    def prompt_with_a_common_prefix(self, by: int, more: int) -> None:
        common = max(0, self.sequence.length - by)
        prompt = [*self.sequence.tokens[:common], *([] if by == 0 else [(self.sequence.tokens[common] + 1) % 300])]
        prompt += self.draw(more)
        prompt = prompt[: self.sequence.capacity]
        held = resume(self.sequence, prompt)
        self.reached(min(common, len(prompt) - 1), held)
        for start in range(held, len(prompt), LARGEST_RUN):
            chunk = prompt[start : start + LARGEST_RUN]
            self.forward(chunk, len(chunk), decoded=False)

    def teardown(self) -> None:
        """The memory, and the next rows, against the replay in another slot."""
        try:
            for tokens, held in self.log:
                step(self.model, self.scratch, tokens, held, want=UNSEEN)
            assert self.sequence.tokens == self.scratch.tokens
            assert not differing_cells(self.model, self.sequence, self.scratch)
            following = self.draw(min(AFTER, self.sequence.left))
            for token in following:
                assert same_bits(*(step(self.model, s, [token]) for s in (self.sequence, self.scratch)))
        finally:
            self.model.release(self.sequence)
            self.model.release(self.scratch)


def test_any_history_leaves_what_its_replay_leaves(tiny: Model) -> None:
    History.model = tiny
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=60, stateful_step_count=16, deadline=None, derandomize=True, database=None,
            suppress_health_check=slow,
        ),
    )  # fmt: skip


def test_llm_reuses_a_prefix_while_the_window_reaches_it_and_starts_anew_beyond(golden_dir: Path) -> None:
    tokens = random.Random(4).choices(range(20, 300), k=700)
    with LLM(golden_dir / "trunks" / "gemma3.gguf", device="cpu", n_ctx=1024, n_threads=1) as llm:
        answer = llm.generate(tokens, max_tokens=100, temperature=0.0, speculation="ngram")
        assert answer.usage.cached_tokens == 0
        turn = [*tokens, *answer.tokens, 30, 31, 32]
        follow = llm.generate(turn, max_tokens=20, temperature=0.0)
        assert follow.usage.cached_tokens == 799  # all but the last token drawn
        other = llm.generate([*tokens[:500], 40], max_tokens=20, temperature=0.0)
        assert other.usage.cached_tokens == 500
        assert llm.generate([*tokens[:20], 40], max_tokens=20, temperature=0.0).usage.cached_tokens == 0
    with LLM(golden_dir / "trunks" / "gemma3.gguf", device="cpu", n_ctx=1024, n_threads=1) as fresh:
        assert fresh.generate([*tokens[:20], 40], max_tokens=20, temperature=0.0).usage.cached_tokens == 0
        fresh_answer = fresh.last
    assert fresh_answer is not None and llm.last is not None
    assert llm.last.tokens == fresh_answer.tokens


# -- size and limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 4, 255, 256, 257, 1024])
@pytest.mark.parametrize("context", [40, 700, 5000])
def test_a_ring_holds_the_window_and_the_largest_run_or_all_positions(window: int, context: int) -> None:
    layers = [Attention(2, 1, 32, 32, window), Attention(2, 1, 32, 32)]
    memory = Memory(layers, context, 1, pick_device("cpu"), "f16", "f16")
    ring = memory.arenas[f"window{window}"]
    assert ring.cells >= min(context, window + LARGEST_RUN)
    assert ring.cells <= memory.arenas["kv"].cells
    memory.close()


def test_a_32k_context_of_gemma3_270m_takes_a_fifth_of_a_full_cache() -> None:
    layers = [Attention(4, 1, 256, 256, 0 if layer % 6 == 5 else 512) for layer in range(18)]
    position = (256 + 256) * 2  # bytes of a layer, F16
    assert memory_bytes(layers, 32768, 1, "f16", "f16") == (15 * 1024 + 3 * 32768) * position
    assert full_memory_bytes(layers, 32768, 1, "f16", "f16") == 18 * 32768 * position


def test_a_run_that_would_overwrite_its_own_window_is_refused_before_anything_is_written(tiny: Model) -> None:
    sequence, scratch = tiny.new_sequence(), tiny.new_sequence()
    tokens = random.Random(1).choices(range(tiny.vocab_size), k=900)
    for each in (sequence, scratch):
        prefill(tiny, each, tokens[:100])
    with pytest.raises(UsageError, match=r"800 rows in one forward .* at most 512 at a time"):
        step(tiny, sequence, tokens[100:])
    assert same_bits(*(step(tiny, each, tokens[:3]) for each in (sequence, scratch)))
    tiny.release(sequence)
    tiny.release(scratch)


def test_the_longest_run_sees_whole_windows_and_can_be_rolled_back_entirely(tiny: Model) -> None:
    """RING - WINDOW + 1 rows at once, against chunks that never come near it. One row more, and the window is lost."""
    sequence, chunked = tiny.new_sequence(), tiny.new_sequence()
    tokens = random.Random(2).choices(range(tiny.vocab_size), k=100 + RING - WINDOW + 1)
    for each in (sequence, chunked):
        prefill(tiny, each, tokens[:100])
    at_once = step(tiny, sequence, tokens[100:], kept=0)
    by_chunks = np.concatenate([step(tiny, chunked, tokens[i : i + 130]) for i in range(100, len(tokens), 130)])
    assert same_bits(at_once, by_chunks)
    assert sequence.truncate(100) == chunked.truncate(100) == 100
    expected = step(tiny, chunked, tokens[100:110], kept=0)
    assert same_bits(step(tiny, sequence, tokens[100:110], kept=0), expected)
    prefill(tiny, sequence, tokens[100:])
    step(tiny, sequence, [1])
    assert sequence.truncate(100) == 0
    prefill(tiny, sequence, tokens[:100])
    assert same_bits(step(tiny, sequence, tokens[100:110]), expected)
    tiny.release(sequence)
    tiny.release(chunked)
