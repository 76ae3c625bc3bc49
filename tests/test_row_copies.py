"""Rows that are taken out of a slot and put into another: the sequence goes on as the one they were taken from, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import tests.windowed  # noqa: F401  (registers "tinywindow")
from tests.test_exact_rows import CACHES
from tests.test_recurrent_memory import SHAPE
from tests.tiny_models import TinyLlama, write_tiny
from tests.tiny_qwen35 import write_qwen35
from tests.trunk_steps import PLAIN, decode, differing_cells, same_bits, step
from tsgg.errors import UsageError
from tsgg.memory import Sequence
from tsgg.memory.rows import RowCopies, State
from tsgg.model import Model

LENGTH = 700  # past the wrap of the tiny window's ring
FILES = ("llama", "tinywindow", "qwen35")


def load(folder: Path, name: str, types: tuple[str, str] = ("f16", "f16")) -> Model:
    path = folder / f"{name}.gguf"
    if not path.exists():
        _ = write_qwen35(path, SHAPE) if name == "qwen35" else write_tiny(path, TinyLlama(arch=name, context=2048))
    return Model(path, n_ctx=1100, n_seq=3, n_threads=1, cache_type_k=types[0], cache_type_v=types[1])


def draw(model: Model, count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(model.vocab_size), k=count)


def read(model: Model, sequence: Sequence, tokens: list[int], chunk: int = 300) -> None:
    for i in range(0, len(tokens), chunk):
        step(model, sequence, tokens[i : i + chunk], want=PLAIN)


def put_back(model: Model, rows: RowCopies, source: Sequence, target: Sequence, length: int) -> None:
    """What a prefix cache does, by way of the host and in two parts."""
    tokens, half = source.tokens[:length], length // 2
    parts = [rows.read(source.slot, 0, half), rows.read(source.slot, half, length)]
    at = min(at for at in rows.states(source.slot, source.length) if at >= length)
    state = rows.read_state(source.slot, at, source.highest, source.length)
    assert rows.reaches(state, length)
    target.truncate(0)
    rows.write(target.slot, 0, parts[0])
    rows.write(target.slot, half, parts[1])
    rows.write_state(target.slot, state)
    target.adopt(tokens, state.highest)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("types", CACHES, ids="/".join)
def test_a_sequence_put_back_goes_on_as_the_one_it_was_taken_from(
    tmp_path: Path, name: str, types: tuple[str, str]
) -> None:
    with load(tmp_path, name, types) as model:
        rows, source, target = RowCopies(model.memory), model.new_sequence(), model.new_sequence()
        assert rows.needs_state == (name != "llama")
        read(model, target, draw(model, 900, seed=5))  # what the slot held before must not show
        read(model, source, draw(model, LENGTH))
        put_back(model, rows, source, target, LENGTH)
        assert target.tokens == source.tokens and not differing_cells(model, source, target)
        tail = draw(model, 40, seed=1)
        assert same_bits(decode(model, source, tail), decode(model, target, tail))
        assert same_bits(step(model, source, tail, 7), step(model, target, tail, 7))
        assert not differing_cells(model, source, target)


@pytest.mark.parametrize("name", FILES)
def test_a_prefix_is_put_back_where_a_state_reaches_it(tmp_path: Path, name: str) -> None:
    """Any prefix of full attention, some tokens back for a window, the end of a prefill chunk for a recurrent state."""
    with load(tmp_path, name) as model:
        rows, source, target = RowCopies(model.memory), model.new_sequence(), model.new_sequence()
        tokens = draw(model, LENGTH)
        read(model, source, tokens)
        length = 600 if name == "qwen35" else LENGTH - 57
        put_back(model, rows, source, target, length)
        fresh = model.new_sequence()
        read(model, fresh, tokens[:length])
        tail = draw(model, 30, seed=1)
        assert same_bits(decode(model, target, tail), decode(model, fresh, tail))


def test_a_copy_from_slot_to_slot_is_the_same_rows(tmp_path: Path) -> None:
    with load(tmp_path, "llama") as model:
        rows, source, target = RowCopies(model.memory), model.new_sequence(), model.new_sequence()
        read(model, source, draw(model, LENGTH))
        rows.copy(source.slot, target.slot, 0, 333)
        target.adopt(source.tokens[:333], 333)
        source.truncate(333)
        assert not differing_cells(model, source, target)


def test_what_a_sequence_reaches_is_what_truncate_answers(tmp_path: Path) -> None:
    for name in FILES:
        with load(tmp_path, name) as model:
            sequence = model.new_sequence()
            for cut in (LENGTH + 5, LENGTH, LENGTH - 1, 600, 301, 30):
                sequence.truncate(0)
                read(model, sequence, draw(model, LENGTH))
                asked = sequence.reach(cut)
                assert sequence.length == LENGTH, "asking changes nothing"
                assert asked == sequence.truncate(cut)


def test_a_part_of_cells_does_not_keep_the_memory_of_the_whole(tmp_path: Path) -> None:
    with load(tmp_path, "llama") as model:
        rows, sequence = RowCopies(model.memory), model.new_sequence()
        read(model, sequence, draw(model, 300))
        cells = rows.read(sequence.slot, 0, 300)
        assert cells.nbytes == 300 * rows.row_bytes
        part = cells.part(100, 140)
        assert (part.count, part.nbytes) == (40, 40 * rows.row_bytes)
        assert all(lane.base is None or lane.base.nbytes == lane.nbytes for lane in part.lanes)


def test_rows_of_another_model_or_cache_type_are_refused(tmp_path: Path) -> None:
    with load(tmp_path, "llama") as model, load(tmp_path, "llama", ("q8_0", "q8_0")) as other:
        rows, sequence = RowCopies(model.memory), model.new_sequence()
        read(model, sequence, draw(model, 50))
        cells = rows.read(sequence.slot, 0, 50)
        with pytest.raises(UsageError, match="of another model"):
            RowCopies(other.memory).write(0, 0, cells)
    with load(tmp_path, "qwen35") as recurrent, pytest.raises(UsageError, match="of another model"):
        RowCopies(recurrent.memory).write_state(0, State(50, 50, (), ()))
