"""Invariant 2(b): whatever was verified, accepted, rejected or truncated, memory equals a replay of the same prefill chunks
and one-row decodes, bit for bit; 2(c): and a fresh prefill within the kernels' error."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import windowed
from tests.tiny_models import TinyLlama, write_tiny
from tests.trunk_steps import GOLDEN, PLAIN, batch, decode, differing_cells, golden_trunks, same_bits, step
from tsgg.errors import ContextFullError, UsageError
from tsgg.memory import Sequence
from tsgg.memory.memory import LARGEST_RUN
from tsgg.model import Model

WINDOWS = (1, 2, 3, 4, 7, 8, 15, 16)
TINY = {
    "tiny": TinyLlama(),
    "tiny experts q4_0": TinyLlama(experts=4, weights="q4_0"),
    "tiny q8_0 cache": TinyLlama(),
    "tiny window": TinyLlama(arch=windowed.TinyWindow.name),
}


@contextmanager
def opened(name: str, folder: Path, n_ctx: int = 400) -> Iterator[Model]:
    """A tiny or golden trunk with three slots. One thread: a second only waits where others use the cores."""
    path = write_tiny(folder / "m.gguf", TINY[name]) if name in TINY else GOLDEN / "trunks" / f"{name}.gguf"
    cache = "q8_0" if "cache" in name else "f16"
    with Model(path, n_ctx=n_ctx, n_seq=3, n_threads=1, cache_type_k=cache, cache_type_v=cache) as model:
        yield model


@pytest.fixture(params=TINY)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    """Each tiny trunk in turn."""
    with opened(request.param, tmp_path) as model:
        yield model


class History:
    """One sequence and the log that a replay needs: chunks as they were forwarded, and how much of each is still held."""

    def __init__(self, model: Model, rng: random.Random) -> None:
        self.model, self.rng = model, rng
        self.sequence = model.new_sequence()
        self.log: list[tuple[list[int], int]] = []  # tokens of a forward, how many of them memory holds
        self.highest = 0  # rows were written below it since the sequence was last empty

    def draw(self, count: int) -> list[int]:
        return [self.rng.randrange(self.model.vocab_size) for _ in range(count)]

    def prefill(self, rows: int) -> None:
        tokens = self.draw(rows)
        step(self.model, self.sequence, tokens)
        self.log.append((tokens, rows))
        self.highest = max(self.highest, self.sequence.length)

    def decode(self) -> None:
        self.verify(0, 1)

    def verify(self, window: int, kept: int) -> None:
        tokens = self.draw(window + 1)
        step(self.model, self.sequence, tokens, kept)
        self.kept(tokens, kept)

    def kept(self, tokens: list[int], kept: int) -> None:
        """Of a verify's rows the first `kept` were accepted; a replay decodes them one by one."""
        self.highest = max(self.highest, self.sequence.length - kept + len(tokens))
        self.log += [([token], 1) for token in tokens[:kept]]

    def truncate(self, length: int) -> None:
        reached = self.sequence.truncate(length)
        near = self.highest - length <= LARGEST_RUN - max(WINDOWS)
        assert reached == length or (reached == 0 and not near and "window" in "".join(self.model.memory.arenas))
        self.highest = self.highest if reached else 0
        while self.log and sum(held for _, held in self.log) > reached:
            tokens, held = self.log.pop()
            left = reached - sum(n for _, n in self.log)
            if left > 0:
                self.log.append((tokens, min(left, held)))

    def replay(self, into: Sequence) -> None:
        into.truncate(0)
        for tokens, held in self.log:
            step(self.model, into, tokens, held, PLAIN)

    def check(self, scratch: Sequence) -> None:
        """The memory, and the row that follows, against a replay in another slot."""
        self.replay(scratch)
        assert self.sequence.tokens == scratch.tokens == [t for tokens, held in self.log for t in tokens[:held]]
        assert not differing_cells(self.model, self.sequence, scratch)
        if self.sequence.left:
            token = self.draw(1)
            ours, theirs = (step(self.model, s, token, 0, PLAIN) for s in (self.sequence, scratch))
            assert same_bits(ours, theirs)


@pytest.mark.parametrize("depth", [5, 250])
@pytest.mark.parametrize("name", [*TINY, *golden_trunks()])
def test_every_window_and_every_kept_count_leave_what_plain_steps_leave(name: str, depth: int, tmp_path: Path) -> None:
    with opened(name, tmp_path) as model:
        check_windows(model, depth)


def test_a_window_that_wraps_round_its_ring_leaves_what_plain_steps_leave(tmp_path: Path) -> None:
    with opened("tiny window", tmp_path, n_ctx=2000) as model:
        cells = next(arena.cells for arena in model.memory.arenas.values() if arena.window)
        assert cells < 1000, "the ring is to be shorter than the context"
        for depth in (cells - 9, cells, 2 * cells - 3):  # verifies begin before, on and past the first cell
            check_windows(model, depth)


def check_windows(model: Model, depth: int) -> None:
    """Verifies of every window from `depth` on, with every number of kept rows, against plain steps in another slot."""
    history, scratch = History(model, random.Random(1)), model.new_sequence()
    start = history.draw(depth)
    truth = history.draw(max(WINDOWS) + 2)
    for window in WINDOWS:
        rewind(model, scratch, start)
        for kept in range(window + 2):
            rewind(model, history.sequence, start)
            wrong = history.draw(window + 1 - kept)
            step(model, history.sequence, truth[:kept] + wrong, kept)
            assert history.sequence.tokens == scratch.tokens
            assert not differing_cells(model, history.sequence, scratch), f"window {window}, {kept} kept"
            ours, theirs = (step(model, s, [truth[kept]], 0, PLAIN) for s in (history.sequence, scratch))
            assert same_bits(ours, theirs), f"the row after window {window}, {kept} kept"
            decode(model, scratch, [truth[kept]])
    model.release(history.sequence)
    model.release(scratch)


def rewind(model: Model, sequence: Sequence, start: list[int]) -> None:
    """Back to exactly `start`; forwarded again, in the same chunks, where a window has lost it."""
    if sequence.truncate(len(start)) != len(start):
        for i in range(0, len(start), 400):
            step(model, sequence, start[i : i + 400])


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("seed", [1, 2])
def test_any_history_leaves_what_its_replay_leaves(name: str, seed: int, tmp_path: Path) -> None:
    long = name == "tiny window"  # far enough to wrap round the ring
    with opened(name, tmp_path, n_ctx=1300 if long else 400) as model:
        rng = random.Random(seed)
        history, other, scratch = History(model, rng), History(model, rng), model.new_sequence()
        for number in range(300):
            if not history.sequence.tokens:
                for rows in (400, 350) if long else (30,):
                    history.prefill(rows)
            _something(model, history, other, rng)
            if number % 50 == 49:
                history.check(scratch)
                other.check(scratch)


def _something(model: Model, history: History, other: History, rng: random.Random) -> None:
    """One random operation on `history`, or on its neighbour."""
    pick, left = rng.random(), history.sequence.left
    if left < 20 or pick < 0.02:
        history.truncate(rng.randrange(history.sequence.length + 1))
    elif pick < 0.10:
        history.truncate(max(0, history.sequence.length - rng.randint(1, 12)))
    elif pick < 0.16:
        history.prefill(min(left, rng.choice((2, 5, 31, 130))))
    elif pick < 0.24:
        if other.sequence.left < 40:
            other.truncate(0)
        other.prefill(rng.choice((1, 7, 40)))
    elif pick < 0.34 and other.sequence.left > 8:
        _verify_together(model, history, other, rng)
    elif pick < 0.50:
        history.decode()
    else:
        window = rng.choice(WINDOWS)
        history.verify(window, rng.randint(0, window + 1))


def _verify_together(model: Model, one: History, other: History, rng: random.Random) -> None:
    window = rng.choice((0, 1, 4, 7))
    tokens = [one.draw(window + 1), other.draw(window + 1)]
    kept = rng.randint(0, window + 1)
    batch(model, [one.sequence, other.sequence], tokens, kept)
    one.kept(tokens[0], kept)
    other.kept(tokens[1], kept)


def test_memory_equals_a_fresh_prefill_of_the_whole_text(model: Model) -> None:
    history, fresh = History(model, random.Random(3)), model.new_sequence()
    history.prefill(40)
    for window in WINDOWS * 2:
        history.verify(window, window // 2 + 1)
    text, probe = list(history.sequence.tokens), history.draw(1)
    ours = step(model, history.sequence, probe)
    theirs = step(model, fresh, [*text, *probe])[-1:]
    assert len(text) > 60
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 37, LARGEST_RUN])
def test_the_size_of_prefill_chunks_does_not_matter_past_the_window(chunk: int, tmp_path: Path) -> None:
    with opened("tiny window", tmp_path, n_ctx=1300) as model:
        text = History(model, random.Random(6)).draw(1200)
        rows = []
        for size in (64, chunk):
            sequence = model.new_sequence()
            rows.append([step(model, sequence, text[i : i + size], want=PLAIN) for i in range(0, len(text), size)][-1])
        assert same_bits(*rows)


def test_a_forward_that_no_commit_follows_leaves_the_sequence_as_it_was(model: Model) -> None:
    history, scratch = History(model, random.Random(4)), model.new_sequence()
    history.prefill(30)
    step(model, history.sequence, history.draw(9), kept=0)
    history.check(scratch)


def test_a_forward_that_is_refused_writes_nothing(model: Model) -> None:
    history, scratch = History(model, random.Random(5)), model.new_sequence()
    history.prefill(390)
    with pytest.raises(ContextFullError, match="390 of 400 positions are used and 13 more"):
        step(model, history.sequence, history.draw(13))
    with pytest.raises(UsageError, match="token ids must lie in"):
        step(model, history.sequence, [0, model.vocab_size])
    with pytest.raises(UsageError, match="token ids must lie in"):
        step(model, history.sequence, [-1])
    history.check(scratch)


def test_only_pending_rows_can_be_committed(model: Model) -> None:
    sequence = model.new_sequence()
    step(model, sequence, [1, 2, 3], kept=2)
    with pytest.raises(UsageError, match="left 0 rows"):
        sequence.commit(1)
    assert sequence.tokens == [1, 2]


def test_a_run_that_would_overwrite_a_ring_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with opened("tiny window", tmp_path, n_ctx=1300) as model:
        history, scratch = History(model, random.Random(7)), model.new_sequence()
        history.prefill(300)
        with pytest.raises(UsageError, match=f"at most {LARGEST_RUN} at a time"):
            step(model, history.sequence, history.draw(900))
        history.check(scratch)
