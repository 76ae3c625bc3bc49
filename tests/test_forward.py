"""The one forward: logits, hidden rows and taps against float64 numpy, what may be read when, and the graph cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import windowed
from tests.numpy_llama import head, residuals, values
from tests.tiny_models import TinyLlama, tensors, write_tiny
from tests.trunk_steps import PLAIN, VERIFY, Array, batch, decode, differing_cells, same_bits, step
from tsgg.errors import TsggError, UsageError
from tsgg.forward import StepRows
from tsgg.memory import Sequence
from tsgg.memory.kv import KVArena
from tsgg.model import Model
from tsgg.settings import settings
from tsgg.speculative.protocol import Batch, Want

SHAPE = TinyLlama(layers=3)
TOKENS: list[int] = np.random.default_rng(1).integers(0, 264, 50).tolist()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    with Model(write_tiny(tmp_path / "m.gguf", SHAPE), n_ctx=300, n_seq=3, n_threads=1) as model:
        yield model


def run(model: Model, sequence: Sequence, tokens: list[int], want: Want) -> StepRows:
    """One forward whose rows are all committed."""
    rows = model.forward(Batch((sequence,), np.array([tokens], np.int32), want))
    sequence.commit(len(tokens))
    return rows


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "experts", "window", "tied", "wide heads"])
def test_every_layers_residual_and_the_logits_agree_with_float64(tmp_path: Path, kind: str) -> None:
    shape = {
        "dense": SHAPE,
        "experts": replace(SHAPE, experts=5, used=3),
        "window": replace(SHAPE, arch=windowed.TinyWindow.name),
        "tied": replace(SHAPE, tied=True),
        "wide heads": replace(SHAPE, heads=6, kv_heads=1, head_dim=64),
    }[kind]
    windows = tuple(0 if i % 2 else windowed.WINDOW for i in range(shape.layers)) if kind == "window" else ()
    w = values(tensors(shape))
    expected = residuals(w, shape, TOKENS, windows)
    hidden, logits = head(w, expected[-1])
    taps = tuple(range(shape.layers + 1))
    with Model(write_tiny(tmp_path / "m.gguf", shape), n_threads=1, cache_type_k="f32", cache_type_v="f32") as model:
        rows = run(model, model.new_sequence(), TOKENS, Want("all", "all", taps))
        for layer in taps:
            np.testing.assert_allclose(rows.tap(layer, 0), expected[layer], atol=1e-4, err_msg=f"tap {layer}")
        np.testing.assert_allclose(rows.hidden(0), hidden, atol=1e-4)
        found = np.stack([rows.logits(0, i) for i in range(len(TOKENS))])
        np.testing.assert_allclose(found, logits, atol=1e-4 * logits.std())


def test_the_row_that_only_the_last_is_asked_of_is_the_last_of_all(model: Model) -> None:
    for count in (2, 3, 17, 50, 150):  # the last in three blocks of rows
        tokens = (TOKENS * 3)[:count]
        first, second = model.new_sequence(), model.new_sequence()
        every = run(model, first, tokens, Want("all", "all"))
        logits, hidden = every.logits(0, -1).copy(), every.hidden(0).copy()
        last = run(model, second, tokens, Want("last", "last"))
        assert same_bits(last.logits(0, count - 1), logits) and same_bits(last.logits(0, -1), logits)
        assert same_bits(last.hidden(0), hidden[-1:])
        assert not differing_cells(model, first, second)
        model.release(first)
        model.release(second)


@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f32"), ("bf16", "bf16"), ("q8_0", "q8_0")])
def test_a_row_has_the_same_bits_however_many_masked_cells_its_graph_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[str, str]
) -> None:
    path, rng = write_tiny(tmp_path / "m.gguf", SHAPE), np.random.default_rng(6)
    tokens, found = rng.integers(0, 264, 140).tolist(), []
    for least in (0, 1000):
        bucket = KVArena.bucket
        monkeypatch.setattr(KVArena, "bucket", lambda arena, n, rows, f=bucket, k=least: f(arena, max(n, k), rows))
        with Model(path, n_ctx=1024, n_threads=1, cache_type_k=types[0], cache_type_v=types[1]) as model:
            sequence = model.new_sequence()
            step(model, sequence, tokens[:60], want=PLAIN)
            alone, together = decode(model, sequence, tokens[60:136]), step(model, sequence, tokens[136:])
            cells = [key.cells for key in model._forward._programs]
        found.append(np.concatenate([alone, together]))
        monkeypatch.undo()
    assert cells == [(1024,)] * len(cells)
    assert same_bits(*found)


def test_a_lone_row_reads_few_masked_cells_where_each_of_them_takes_time(model: Model) -> None:
    """The soft_max path computes them all. A verify has a graph per number of rows, so its buckets are larger."""
    (arena,) = model.memory.arenas.values()
    assert arena.transposed
    assert [arena.bucket(n, 1) for n in (1, 64, 65, 200, 300)] == [64, 64, 128, 256, 320]
    assert [arena.bucket(n, rows) for rows in (2, 512) for n in (1, 257)] == [256, 512, 256, 512]


@pytest.mark.parametrize(
    "want",
    [Want("none"), Want("last"), Want("all"), Want("none", "all"), Want("none", "none", (1, 3)), Want("last", "all")],
)
def test_what_is_asked_for_does_not_change_what_is_remembered(model: Model, want: Want) -> None:
    for count in (1, 9, 140):
        first, second = model.new_sequence(), model.new_sequence()
        tokens = (TOKENS * 3)[:count]
        run(model, first, tokens, want)
        run(model, second, tokens, VERIFY)
        assert not differing_cells(model, first, second), f"{count} rows"
        model.release(first)
        model.release(second)


def test_rows_of_several_sequences_are_told_apart(model: Model) -> None:
    texts = [TOKENS[:6], TOKENS[6:12], TOKENS[12:18]]
    sequences = [model.new_sequence() for _ in texts]
    want = Want("all", "all", (1,))
    alone = []
    for sequence, text in zip(sequences, texts, strict=True):
        rows = run(model, sequence, text, want)
        alone.append((rows.logits(0, 4).copy(), rows.hidden(0).copy(), rows.tap(1, 0).copy()))
        sequence.truncate(0)
    rows = model.forward(Batch(tuple(sequences), np.array(texts, np.int32), want))
    for i, (logits, hidden, tap) in enumerate(alone):
        assert same_bits(rows.logits(i, 4), logits)
        assert same_bits(rows.hidden(i), hidden) and same_bits(rows.tap(1, i), tap)
    rows = model.forward(Batch(tuple(sequences), np.array(texts, np.int32), Want("last", "last")))
    last = [(rows.logits(i, -1).copy(), rows.hidden(i).copy()) for i in range(3)]
    rows = model.forward(Batch(tuple(sequences), np.array(texts, np.int32), Want("all", "all")))
    for i, (logits, hidden) in enumerate(last):
        assert same_bits(rows.logits(i, 5), logits) and same_bits(rows.hidden(i)[-1:], hidden)


# -- what may be asked and read ----------------------------------------------------------------------------------------


def test_rows_are_valid_until_the_next_forward(model: Model) -> None:
    sequence = model.new_sequence()
    rows = run(model, sequence, TOKENS[:3], Want("all", "all"))
    kept = rows.logits(0, 0)
    assert np.isfinite(kept).all() and np.isfinite(rows.hidden(0)).all()
    run(model, sequence, TOKENS[3:4], PLAIN)
    with pytest.raises(TsggError, match="read after the model's next forward"):
        rows.logits(0, 0)
    with pytest.raises(TsggError, match="read after the model's next forward"):
        rows.hidden(0)


def test_what_was_not_asked_for_cannot_be_read(model: Model) -> None:
    rows = run(model, model.new_sequence(), TOKENS[:3], Want("last", "none", (1,)))
    with pytest.raises(UsageError, match="hidden was not asked for in this forward"):
        rows.hidden(0)
    with pytest.raises(UsageError, match="tap 2 was not asked for in this forward"):
        rows.tap(2, 0)
    with pytest.raises(UsageError, match="logits of row 1 were not asked for"):
        rows.logits(0, 1)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1, 2]], "a batch of 2 sequences needs tokens"),
        ([[], []], "with one row or more"),
        ([1, 2], "needs tokens"),
        ([[1], [264]], "token ids must lie in 0..263, got 264"),
        ([[1, -1], [2, 3]], "token ids must lie in 0..263, got -1..1"),
    ],
)
def test_a_malformed_batch_is_refused(model: Model, tokens: list[object], words: str) -> None:
    sequences = (model.new_sequence(), model.new_sequence())
    with pytest.raises(UsageError, match=words):
        model.forward(Batch(sequences, np.array(tokens, np.int32), PLAIN))
    assert all(not sequence.pending for sequence in sequences)


def test_a_batch_of_none_and_a_tap_past_the_last_layer_are_refused(model: Model) -> None:
    with pytest.raises(UsageError, match="a batch of 0 sequences"):
        model.forward(Batch((), np.zeros((0, 1), np.int32), PLAIN))
    with pytest.raises(UsageError, match=r"tap 4: the model has residuals 0\.\.3"):
        run(model, model.new_sequence(), TOKENS[:2], Want("none", "none", (4,)))


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_graphs_are_kept_within_their_budget_and_evicted_ones_are_built_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = model.new_sequence()
    step(model, sequence, TOKENS[:40])

    def every_count() -> list[Array]:
        return [step(model, sequence, TOKENS[:count], kept=0) for count in (1, 2, 3, 5, 8, 1, 8)]

    expected, roomy = every_count(), model.graph_bytes()
    monkeypatch.setattr("tsgg.forward.settings", replace(settings, graph_budget=roomy // 3))
    assert all(same_bits(a, b) for a, b in zip(every_count(), expected, strict=True))
    step(model, sequence, TOKENS[:11], kept=0)
    assert model.graph_bytes() <= roomy // 3
    monkeypatch.setattr("tsgg.forward.settings", replace(settings, graph_budget=1))
    assert all(same_bits(a, b) for a, b in zip(every_count(), expected, strict=True))


def test_a_graph_is_built_once_for_equal_steps(model: Model) -> None:
    sequence = model.new_sequence()
    decode(model, sequence, TOKENS[:2])
    held = model.graph_bytes()
    decode(model, sequence, TOKENS[2:])
    assert model.graph_bytes() == held


def test_two_models_in_two_threads_compute_what_each_computes_alone(tmp_path: Path) -> None:
    paths = [write_tiny(tmp_path / f"{seed}.gguf", TinyLlama(seed=seed)) for seed in (1, 2)]
    found: dict[int, list[Array]] = {0: [], 1: []}

    def work(number: int, model: Model) -> None:
        sequence = model.new_sequence()
        for _ in range(4):
            found[number].append(decode(model, sequence, TOKENS))

    for together in (False, True):
        with Model(paths[0], n_threads=1) as one, Model(paths[1], n_threads=1) as two:
            threads = [threading.Thread(target=work, args=pair) for pair in enumerate((one, two))]
            for thread in threads:
                thread.start()
                if not together:
                    thread.join()
            for thread in threads:
                thread.join()
    for streams in found.values():
        assert all(same_bits(a, b) for a, b in zip(streams[:4], streams[4:], strict=True)) and len(streams) == 8


def test_neighbouring_slots_are_needed_and_their_order_matters(model: Model) -> None:
    first, second, third = (model.new_sequence() for _ in range(3))
    batch(model, [second, third], [[1, 2], [3, 4]])
    for wrong in ([first, third], [third, second], [first, first]):
        with pytest.raises(UsageError, match="neighbouring slots, in order"):
            batch(model, wrong, [[1], [2]])
