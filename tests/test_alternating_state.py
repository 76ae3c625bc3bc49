"""Plain steps of a lone sequence run from the live state into scratch and back: as copying ones do, without a copy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.test_recurrent_memory import SHAPE, UNSEEN, draw, recurrent, states
from tests.tiny_qwen35 import write_qwen35
from tests.trunk_steps import PLAIN, VERIFY, same_bits, step
from tsgg.memory import recurrent as arena_module
from tsgg.model import Model
from tsgg.speculative.protocol import Batch, Want

ARMED = Want("last", "last")  # a plain step beside a draft head: another graph


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Model]:
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=700, n_threads=1) as model:
        yield model


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_history_gives_the_bits_of_a_model_that_copies(lone: Model, seed: int) -> None:
    """Beside a model of two slots, of which one is used: it copies after every step."""
    rng = random.Random(seed)
    with Model(lone.file.paths[0], n_ctx=700, n_seq=2, n_threads=1) as copying:
        pair = [(model, model.new_sequence()) for model in (lone, copying)]
        assert recurrent(lone).alternates and not recurrent(copying).alternates

        def both(tokens: list[int], kept: int, want: Want) -> None:
            assert same_bits(*(step(model, sequence, tokens, kept, want) for model, sequence in pair))

        for number in range(250):
            if pair[0][1].left < 90:
                for _, sequence in pair:
                    sequence.truncate(0)
            pick, rows = rng.random(), rng.choice((2, 3, 5, 9, 17))
            if pick < 0.45:
                for _ in range(rng.randint(1, 4)):
                    both(draw(rng, 1), 1, rng.choice((PLAIN, ARMED, VERIFY)))
            elif pick < 0.6:  # a row that nobody keeps
                both(draw(rng, 1), 0, rng.choice((PLAIN, ARMED)))
            elif pick < 0.8:
                both(draw(rng, rows), rng.randint(0, rows), VERIFY)
            elif pick < 0.9:
                both(draw(rng, 70), 70, UNSEEN)
            elif pick < 0.95:
                for _, sequence in pair:
                    sequence.truncate(0)
            if number % 7 == 0:  # looking at it settles it, so not after every step
                assert states(lone, pair[0][1]) == states(copying, pair[1][1]), number


def test_plain_steps_copy_nothing_and_what_follows_them_copies_at_most_once(
    lone: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    run = arena_module._Commit.run

    def counted(self: arena_module._Commit, state: int, row: int) -> None:
        copies.append(state)
        run(self, state, row)

    monkeypatch.setattr(arena_module._Commit, "run", counted)
    rng, sequence = random.Random(4), lone.new_sequence()
    step(lone, sequence, draw(rng, 20), want=UNSEEN)
    assert len(copies) == 1
    for count, expected in ((5, 1), (2, 0)):  # an odd number ends in scratch, an even one in the live state
        copies.clear()
        for _ in range(count):
            step(lone, sequence, draw(rng, 1), want=PLAIN)
        assert not copies
        lone.forward(Batch((sequence,), np.array([draw(rng, 4)], np.int32), VERIFY))
        assert len(copies) == expected
        copies.clear()
        sequence.commit(2)
        assert len(copies) == 1


def test_scratch_that_grows_takes_the_state_along(lone: Model) -> None:
    rng, sequence = random.Random(5), lone.new_sequence()
    tokens = draw(rng, 30)
    for token in tokens:
        step(lone, sequence, [token], want=PLAIN)
    step(lone, sequence, [tokens[0]], want=PLAIN)
    assert recurrent(lone).side == 1, "else this shows nothing"
    verify = step(lone, sequence, draw(rng, 9), kept=0)
    held = states(lone, sequence)
    with Model(lone.file.paths[0], n_ctx=700, n_seq=2, n_threads=1) as copying:
        other = copying.new_sequence()
        for token in [*tokens, tokens[0]]:
            step(copying, other, [token], want=PLAIN)
        assert states(copying, other) == held
        assert same_bits(step(copying, other, draw(random.Random(5), 39)[30:], kept=0), verify)
