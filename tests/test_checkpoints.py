"""Checkpoints of recurrent states: how far back a sequence can be cut, and that it then goes on as if freshly read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_recurrent_memory import SHAPE, UNSEEN, draw, recurrent, states
from tests.tiny_models import TinyLlama, write_tiny
from tests.tiny_qwen35 import write_qwen35
from tests.trunk_steps import PLAIN, differing_cells, same_bits, step
from tsgg import LLM, SamplingParams
from tsgg.errors import OutOfMemoryError
from tsgg.ggml.buffers import TensorSet
from tsgg.memory import Memory, Sequence, checkpoints
from tsgg.memory.checkpoints import MOST_ENTRIES, ROWS_APART, pool_entries
from tsgg.memory.memory import pool_bytes
from tsgg.model import Model


@pytest.fixture(params=[1, 3], ids=["lone", "several"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    """With a lone slot the live state may lie in scratch."""
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=2000, n_seq=request.param, n_threads=1) as model:
        yield model


def prefill(model: Model, sequence: Sequence, tokens: list[int], chunk: int) -> None:
    for i in range(0, len(tokens), chunk):
        step(model, sequence, tokens[i : i + chunk], want=UNSEEN)


def test_a_sequence_goes_back_to_the_last_chunk_end_and_on_as_if_freshly_read(model: Model) -> None:
    rng, chunk = random.Random(1), 80
    tokens, sequence = draw(rng, 240), model.new_sequence()
    prefill(model, sequence, tokens, chunk)
    for token in draw(rng, 3):
        step(model, sequence, [token], want=PLAIN)
    step(model, sequence, draw(rng, 5), kept=2)
    for cut, expected in ((244, 240), (200, 160), (160, 160), (159, 80)):
        assert sequence.truncate(cut) == expected == sequence.length
        assert sequence.tokens == tokens[:expected]
        held, tail = states(model, sequence), draw(rng, 4)
        after = [step(model, sequence, tail, kept=1), step(model, sequence, tail[1:2], want=PLAIN)]
        end = states(model, sequence)
        with Model(model.file.paths[0], n_ctx=2000, n_seq=2, n_threads=1) as other:
            fresh = other.new_sequence()
            prefill(other, fresh, tokens[:expected], chunk)
            assert states(other, fresh) == held
            again = [step(other, fresh, tail, kept=1), step(other, fresh, tail[1:2], want=PLAIN)]
            assert all(same_bits(a, b) for a, b in zip(after, again, strict=True)) and states(other, fresh) == end
        # What stood behind the cut is gone for good; the next cut is below.
        prefill(model, sequence, draw(rng, 80), chunk)
    assert sequence.truncate(79) == 0 and not recurrent(model).checkpoints.lengths(sequence.slot)
    assert not any(b"".join(states(model, sequence)))


def test_what_was_read_after_a_cut_replaces_what_was_there(model: Model) -> None:
    rng, sequence = random.Random(2), model.new_sequence()
    first, second = draw(rng, 300), draw(rng, 200)
    prefill(model, sequence, first, 100)
    assert sequence.truncate(150) == 100
    prefill(model, sequence, second, 100)
    assert recurrent(model).checkpoints.lengths(sequence.slot) == [100, 200, 300]
    assert sequence.truncate(220) == 200 and sequence.tokens == [*first[:100], *second[:100]]
    expected = states(model, sequence)
    sequence.truncate(0)
    prefill(model, sequence, [*first[:100], *second[:100]], 100)
    assert states(model, sequence) == expected


def test_the_pool_is_bounded_and_keeps_the_newest_and_a_spread_of_the_others(model: Model) -> None:
    sequence, rng = model.new_sequence(), random.Random(3)
    ends = []
    for _ in range(20):
        step(model, sequence, draw(rng, ROWS_APART), want=UNSEEN)
        ends.append(sequence.length)
        kept = recurrent(model).checkpoints.lengths(sequence.slot)
        assert len(kept) <= MOST_ENTRIES and kept[-1] == sequence.length and set(kept) <= set(ends)
    gaps = [b - a for a, b in zip([0, *kept], kept, strict=False)]
    assert len(kept) == MOST_ENTRIES and max(gaps) <= 10 * ROWS_APART
    assert recurrent(model).checkpoints.nbytes <= model.plan.checkpoints + 4096
    assert model.plan.checkpoints == pool_bytes(model.arch.attention()) > 0 and "checkpoints" in str(model.plan)


def test_short_chunks_and_verifies_leave_none(model: Model) -> None:
    sequence, rng = model.new_sequence(), random.Random(4)
    arena = recurrent(model)
    for _ in range(3):
        step(model, sequence, draw(rng, 64), want=UNSEEN if not arena.checkpoints.nbytes else PLAIN)
        step(model, sequence, draw(rng, ROWS_APART - 1), kept=ROWS_APART - 1)  # a verify of many rows
        for token in draw(rng, 2):
            step(model, sequence, [token], want=PLAIN)
    assert arena.checkpoints.lengths(sequence.slot) == [64, 193, 322]
    step(model, sequence, draw(rng, 2), want=UNSEEN)
    assert arena.checkpoints.lengths(sequence.slot)[-1] == 389
    step(model, sequence, draw(rng, 60), want=UNSEEN)
    assert arena.checkpoints.lengths(sequence.slot)[-1] == 389


def test_slots_do_not_see_each_others_checkpoints(tmp_path: Path) -> None:
    rng = random.Random(5)
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=700, n_seq=3, n_threads=1) as model:
        one, other = model.new_sequence(), model.new_sequence()
        texts = [draw(rng, 200) for _ in range(2)]
        for sequence, text in zip((one, other), texts, strict=True):
            prefill(model, sequence, text, 100)
        model.release(one)
        again = model.new_sequence()
        assert again.slot == one.slot and recurrent(model).checkpoints.lengths(again.slot) == []
        assert other.truncate(150) == 100
        prefill(model, again, texts[1][:100], 100)
        assert not differing_cells(model, other, again) and states(model, other) == states(model, again)


def test_without_memory_for_the_pool_everything_else_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(TensorSet):
        def allocate(self, *_: object, **__: object) -> int:
            raise OutOfMemoryError("full")

    monkeypatch.setattr(checkpoints, "TensorSet", Full)
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=700, n_threads=1) as model:
        sequence = model.new_sequence()
        prefill(model, sequence, draw(random.Random(6), 200), 100)
        assert sequence.truncate(150) == 0
    assert caplog.text.count("no memory for checkpoints") == 1


def test_a_prompt_that_shares_its_beginning_is_not_read_from_the_start(tmp_path: Path) -> None:
    rng = random.Random(7)
    shared, one, other = draw(rng, 600), draw(rng, 100), draw(rng, 50)
    path = write_qwen35(tmp_path / "m.gguf", SHAPE)
    with LLM(path, n_ctx=900, n_threads=1, speculation="off") as llm:
        greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        llm.generate([*shared, *one], greedy)
        reused = llm.generate([*shared, *other], greedy)
        assert reused.usage.cached_tokens == 512
        llm.forget()
        assert llm.generate([*shared, *other], greedy).tokens == reused.tokens


def chunks_of(memory: Memory, first: int, end: int) -> list[tuple[int, int]]:
    """How a prompt's tokens first..end - 1 are forwarded, as (first, end) of each chunk."""
    chunks, at = [], first
    while at < end:
        chunks.append((at, memory.chunk_end(first, at, end)))
        at = chunks[-1][1]
    return chunks


@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.parametrize("count", [1, 255, 256, 300, 512, 516, 517, 1100])
def test_a_long_prompt_leaves_a_checkpoint_shortly_before_its_end(model: Model, first: int, count: int) -> None:
    chunks = chunks_of(model.memory, first, first + count)
    assert [i for a, b in chunks for i in range(a, b)] == list(range(first, first + count))
    assert all(b - a <= 512 for a, b in chunks)
    assert (chunks[-1] == (first + count - 4, first + count)) == (count >= 256)
    with Model(write_tiny(Path(model.file.paths[0]).with_name("l.gguf"), TinyLlama()), n_ctx=64) as other:
        assert len(chunks_of(other.memory, first, first + count)) == -(-count // 512)


def test_deep_models_keep_fewer() -> None:
    mib = 1 << 20
    assert [pool_entries(size * mib) for size in (1, 18, 48, 144, 400)] == [4, 4, 4, 1, 1]
