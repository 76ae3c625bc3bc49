"""A forward that is interrupted stops soon and leaves memory as it was: asked again it gives the bits of an undisturbed one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.test_recurrent_memory import SHAPE as HYBRID
from tests.test_recurrent_memory import draw
from tests.tiny_models import TinyLlama, write_tiny
from tests.tiny_qwen35 import write_qwen35
from tests.trunk_steps import PLAIN, VERIFY, Array, same_bits, step, visible_cells
from tests.windowed import TinyWindow
from tsgg.errors import Interrupted, TsggError
from tsgg.ggml.interrupt import NATIVE
from tsgg.gguf import TensorInfo
from tsgg.memory import Sequence
from tsgg.memory.memory import LARGEST_RUN
from tsgg.model import Model
from tsgg.models.base import TensorSpec
from tsgg.plan import FEWEST_ROWS, prefill_rows
from tsgg.speculative.protocol import Batch, Want
from tsgg.weights import Placement

UNSEEN = Want("none")

pytestmark = pytest.mark.skipif(not NATIVE, reason="the extension is older than the sources: pip install -e . again")


def llama(folder: Path) -> Path:
    return write_tiny(folder / "llama.gguf", TinyLlama(layers=3))


def hybrid(folder: Path) -> Path:
    return write_qwen35(folder / "hybrid.gguf", HYBRID)


def windowed(folder: Path) -> Path:
    return write_tiny(folder / "windowed.gguf", TinyLlama(layers=3, arch=TinyWindow.name))


def stopped(model: Model, sequence: Sequence, tokens: list[int], want: Want, after: int) -> bool:
    """Forwards the rows and stops at the node `after` the first; whether there were that many."""
    model._interrupt.request(after)
    try:
        model.forward(Batch((sequence,), np.array([tokens], np.int32), want))
    except Interrupted:
        return True
    model.clear_interrupt()
    return False


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("file", [llama, windowed, hybrid])
@pytest.mark.parametrize("seed", [1, 2])
def test_steps_that_are_interrupted_at_any_node_and_asked_again_give_the_bits_of_undisturbed_ones(
    tmp_path: Path, file: Callable[[Path], Path], slots: int, seed: int
) -> None:
    rng, path, interrupted = random.Random(seed), file(tmp_path), 0
    with (
        Model(path, n_ctx=1000, n_seq=slots, n_threads=1) as calm,
        Model(path, n_ctx=1000, n_seq=slots, n_threads=1) as shaken,
    ):
        pair = [(model, model.new_sequence()) for model in (calm, shaken)]
        for number in range(150):
            if pair[0][1].left < 90 or rng.random() < 0.05:
                length = rng.randint(0, pair[0][1].length)
                assert len({sequence.truncate(length) for _, sequence in pair}) == 1
            rows, want = rng.choice(((1, PLAIN), (1, PLAIN), (1, PLAIN), (5, VERIFY), (9, VERIFY), (70, UNSEEN)))
            tokens = draw(rng, rows)
            kept = rng.randint(0, rows) if want is VERIFY else rows
            for _ in range(rng.choice((0, 1, 1, 2))):  # other rows than those that are committed in the end
                interrupted += stopped(shaken, pair[1][1], draw(rng, rows), want, rng.randint(0, 40))
            assert same_bits(*(step(model, sequence, tokens, kept, want) for model, sequence in pair)), number
        cells = [list(visible_cells(model, sequence)) for model, sequence in pair]
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(*cells, strict=True))
    assert interrupted > 50


def test_rows_of_an_interrupted_forward_cannot_be_committed(tmp_path: Path) -> None:
    with Model(hybrid(tmp_path), n_ctx=700, n_threads=1) as model:
        sequence = model.new_sequence()
        step(model, sequence, [1, 2, 3])
        model.forward(Batch((sequence,), np.array([[4, 5]], np.int32), VERIFY))
        assert stopped(model, sequence, [6, 7], VERIFY, after=3)
        with pytest.raises(TsggError, match="left 0 rows"):
            sequence.commit(1)
        assert sequence.tokens == [1, 2, 3]


def test_an_interrupt_before_a_forward_stops_that_one_alone_and_leaves_pending_rows(tmp_path: Path) -> None:
    with Model(hybrid(tmp_path), n_ctx=700, n_threads=1) as model:
        sequence = model.new_sequence()
        model.forward(Batch((sequence,), np.array([[4, 5]], np.int32), VERIFY))
        model.interrupt()
        model.interrupt()
        with pytest.raises(Interrupted):
            model.forward(Batch((sequence,), np.array([[6]], np.int32), PLAIN))
        sequence.commit(2)
        step(model, sequence, [6])
        assert sequence.tokens == [4, 5, 6]
        model.interrupt()
        model.clear_interrupt()
        step(model, sequence, [7])


def test_a_commit_is_not_interrupted(tmp_path: Path) -> None:
    with Model(hybrid(tmp_path), n_ctx=700, n_threads=1) as model:
        sequence = model.new_sequence()
        model.forward(Batch((sequence,), np.array([[4, 5, 6]], np.int32), VERIFY))
        model.interrupt()
        sequence.commit(2)
        with pytest.raises(Interrupted):
            step(model, sequence, [7])
        assert sequence.tokens == [4, 5]


def test_a_long_prefill_ends_within_0_3_seconds_of_an_interrupt_from_another_thread_and_the_next_answer_is_right(
    tmp_path: Path,
) -> None:
    shape = TinyLlama(layers=24, embedding=256, heads=8, width=1024, weights="q8_0")
    path, rng = write_tiny(tmp_path / "m.gguf", shape), random.Random(5)
    prompt, delays = draw(rng, 512), []

    def answer(model: Model, sequence: Sequence) -> Array:
        return np.concatenate([step(model, sequence, prompt, want=PLAIN), step(model, sequence, [7], want=PLAIN)])

    with Model(path, n_ctx=600, n_seq=8, n_threads=1) as model:
        sequences = tuple(model.new_sequence() for _ in range(8))  # 8 x 512 rows: seconds, on any machine
        right = answer(model, sequences[0])
        sequences[0].truncate(0)
        asked = [0.0]

        def ask() -> None:
            asked[0] = time.perf_counter()
            model.interrupt()

        for wait in (0.05, 0.4, 0.8):
            timer = threading.Timer(wait, ask)
            timer.start()
            with pytest.raises(Interrupted):
                model.forward(Batch(sequences, np.array([prompt] * 8, np.int32), UNSEEN))
            delays.append(time.perf_counter() - asked[0])
            timer.join()
            assert not any(sequence.length for sequence in sequences)
        assert same_bits(answer(model, sequences[0]), right)
    assert min(delays) < 0.3, delays


def placement(name: str, shape: tuple[int, ...], role: str = "matrix") -> Placement:
    return Placement(TensorInfo(name, 0, shape, 0, 0, 0), TensorSpec(name, shape, role), "mapped")


def test_a_chunk_has_fewer_rows_where_one_product_would_take_long() -> None:
    small = [placement("token_embd.weight", (576, 49152), "table"), placement("ffn_up", (576, 1536))]
    large = [placement("ffn_up", (4096, 14336)), placement("attn_q", (4096, 4096))]
    head = placement("output.weight", (4096, 128256))
    experts = placement("ffn_up_exps", (2048, 768, 128), "experts")
    assert prefill_rows([*small, head], experts_used=0) == LARGEST_RUN
    assert prefill_rows(large, experts_used=0) == FEWEST_ROWS
    assert prefill_rows([*small, experts], experts_used=8) == 256


def test_a_prompt_is_forwarded_in_chunks_of_the_models_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsgg.plan.LARGEST_PRODUCT", 2 * 128 * 64 * 256)  # 128 rows of q, k and v, joined to 64 x 256
    with Model(llama(tmp_path), n_ctx=700, n_threads=1) as model:
        assert [model.memory.chunk_end(5, at, 300) for at in (5, 133, 261)] == [133, 261, 300]
