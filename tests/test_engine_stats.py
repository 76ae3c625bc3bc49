"""`Engine.stats`: every number is what really happened, and asking waits for nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine_requests import Wish, engine, standing, text
from tsgg.engine import EngineStats
from tsgg.errors import TsggError
from tsgg.sampling import RowSampler

NOTHING = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class Broken(RowSampler):
    def sample(self, logits: object, position: int) -> int:
        raise ZeroDivisionError("no such draw")


def test_a_new_engine_has_done_nothing(tmp_path: Path) -> None:
    with engine(tmp_path, slots=3, cache_bytes=12345) as running:
        assert running.stats() == replace(NOTHING, slots=3, tree_budget=12345)


def test_tokens_are_counted_as_computed_found_and_generated(tmp_path: Path) -> None:
    wish = Wish(text(100, 1), 12)
    with engine(tmp_path, slots=1) as running:
        outcome = [wish.submit(running).wait() for _ in range(2)]
        found = running.stats()
        cached = sum(each.cached_tokens for each in outcome)
        assert (found.prompt_tokens, found.cached_tokens, found.generated_tokens) == (101, 99, 24) and cached == 99
        # Eleven steps behind the first token of each; that comes with the prompt's chunk, beside which nobody decodes.
        assert (found.finished, found.steps, found.running, found.waiting) == (2, 24, 0, 0)


def test_ends_are_counted_by_their_kind(tmp_path: Path) -> None:
    with engine(tmp_path, slots=1) as running:
        stream = Wish(text(20, 1), 600).submit(running)
        stream.read()
        stream.cancel()
        stream.wait()
        Wish(text(20, 2)).submit(running, timeout=0.0).wait()
        with pytest.raises(ZeroDivisionError):
            running.submit(text(20, 3), Broken(Wish(()).sampler(running.model).params, running.model.vocab_size)).wait()
        Wish(text(20, 4)).submit(running).wait()
        found = running.stats()
    assert (found.cancelled, found.timed_out, found.failed, found.finished) == (1, 1, 1, 1)


def test_the_trees_numbers_are_those_of_the_tree(tmp_path: Path) -> None:
    """With one slot: what a request pushes out goes into the tree."""
    with engine(tmp_path, slots=1) as running:
        for seed in range(3):
            Wish(text(200, seed)).submit(running).wait()
        found, tree = running.stats(), running.cache.tree
        assert found.tree_tokens == running.call(lambda: len(tree)) == 2 * 211
        assert found.tree_bytes == tree.nbytes > 0 and found.tree_budget == tree.budget
        running.forget()
        found = running.stats()
        assert found.tree_tokens == found.tree_bytes == 0


def test_asking_does_not_wait_for_the_step_that_runs(tmp_path: Path) -> None:
    with engine(tmp_path, slots=2) as running:
        with standing(running):  # the engine's thread is held up until the end of this block
            streams = [Wish(text(20, seed)).submit(running) for seed in range(3)]
            found = running.stats()
            assert (found.running, found.waiting, found.finished) == (0, 3, 0)
        for stream in streams:
            stream.wait()
        assert running.stats().finished == 3


def test_any_thread_may_ask_at_any_moment_and_what_has_happened_never_becomes_less(tmp_path: Path) -> None:
    seen: list[EngineStats] = []
    done = threading.Event()
    with engine(tmp_path, slots=2, cache_bytes=1 << 16) as running:

        def watch() -> None:
            while not done.is_set():
                seen.append(running.stats())

        watcher = threading.Thread(target=watch)
        watcher.start()
        for stream in [Wish(text(60, seed), 9).submit(running, most_unread=None) for seed in range(12)]:
            stream.wait()
        done.set()
        watcher.join()
        seen.append(running.stats())
    assert len(seen) > 2
    growing = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "finished")
    for name in growing:
        numbers = [getattr(each, name) for each in seen]
        assert numbers == sorted(numbers), name
    assert all(each.running <= each.slots and each.tree_bytes <= each.tree_budget for each in seen)
    assert seen[-1].finished == 12 and seen[-1].generated_tokens == 12 * 9


def test_a_closed_engine_has_no_numbers(tmp_path: Path) -> None:
    running = engine(tmp_path)
    running.close()
    with pytest.raises(TsggError, match="closed"):
        running.stats()
