"""A device whose delta rule hands out the last state alone: rows kept of a verify that was accepted in part are forwarded
again. The states are those of a device that keeps one per row, bit for bit, and what it took is counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.test_draft_head import head_speculator
from tests.test_loop_on_models import GREEDY, SEEDED, plain, prompt_of, speculate
from tests.test_recurrent_memory import SHAPE, UNSEEN, Log, draw, recurrent, states
from tests.tiny_qwen35 import write_qwen35
from tests.trunk_steps import VERIFY, same_bits, step
from tsgg import forward
from tsgg.errors import TsggError, UnsupportedError
from tsgg.ggml.devices import Device
from tsgg.memory import snapshots
from tsgg.memory.recurrent import LARGEST_VERIFY
from tsgg.model import Model
from tsgg.models.base import Recurrent
from tsgg.settings import settings
from tsgg.speculative.protocol import Batch


@pytest.fixture
def one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, as a device that runs the rule with the last state only."""

    def runs(shape: Recurrent, device: Device, states: int) -> bool:
        return states == 1

    monkeypatch.setattr(snapshots, "_runs", runs)


@pytest.fixture(params=[1, 3], ids=["a lone slot", "three slots"])
def model(tmp_path: Path, one_state: None, request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=700, n_seq=request.param, n_threads=1) as model:
        yield model


def test_every_kept_count_leaves_the_state_that_a_device_with_a_state_per_row_leaves(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with Model(tmp_path / "m.gguf", n_ctx=700, n_threads=1) as able:
        assert recurrent(able).snapshots and not recurrent(model).snapshots
        rng = random.Random(1)
        pair = [(each, each.new_sequence()) for each in (model, able)]
        for rows in (1, 2, 3, 5, 9, 16, LARGEST_VERIFY):
            for kept in {0, 1, rows // 2, rows - 1, rows}:
                for _, sequence in pair:
                    sequence.truncate(0)
                for tokens, count, want in (
                    (draw(rng, 7), 7, UNSEEN),
                    (draw(rng, rows), kept, VERIFY),
                    (draw(rng, 4), 2, VERIFY),
                    (draw(rng, 1), 1, VERIFY),
                ):
                    assert same_bits(*(step(each, sequence, tokens, count, want) for each, sequence in pair))
                    assert states(*pair[0]) == states(*pair[1]), f"{kept} of {rows} rows"


def test_only_a_part_is_forwarded_again_and_counted(model: Model) -> None:
    sequence = model.new_sequence()
    step(model, sequence, draw(random.Random(2), 9), want=UNSEEN)
    for rows, kept, again in ((5, 5, 0), (5, 0, 0), (1, 1, 0), (5, 3, 3), (2, 1, 1)):
        model.forward(Batch((sequence,), np.array([[1] * rows], np.int32), VERIFY))
        assert sequence.commit(kept) == again


def test_a_prefill_chunk_is_committed_whole_or_not_at_all_here_too(model: Model) -> None:
    sequence = model.new_sequence()
    model.forward(Batch((sequence,), np.array([[1] * 5], np.int32), UNSEEN))
    with pytest.raises(TsggError, match="kept after the last row only"):
        sequence.commit(3)


@pytest.mark.parametrize("seed", [1, 2])
def test_any_history_leaves_what_its_replay_leaves(tmp_path: Path, one_state: None, seed: int) -> None:
    """Sequences of one verify that keep different numbers of rows, among everything else."""
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=700, n_seq=3, n_threads=1) as model:
        rng = random.Random(seed)
        one, other = Log(model, rng), Log(model, rng)
        for number in range(150):
            for log in (one, other):
                if log.sequence.left < 90:
                    log.truncate(0)
            pick, rows = rng.random(), rng.choice((2, 3, 5, 9, 17))
            if pick < 0.2:
                one.verify(1, 1)
            elif pick < 0.5:
                one.verify(rows, rng.randint(0, rows))
            elif pick < 0.6:
                other.chunk(rng.choice((1, 7, 66, 80)))
            elif pick < 0.95:
                tokens = [draw(rng, rows), draw(rng, rows)]
                model.forward(Batch((one.sequence, other.sequence), np.array(tokens, np.int32), VERIFY))
                for log, row in zip((one, other), tokens, strict=True):
                    kept = rng.randint(0, rows)
                    log.sequence.commit(kept)
                    log.accepted(row[:kept])
            else:
                one.truncate(rng.randrange(one.sequence.length + 1))
            if number % 30 == 29:
                one.check()
                other.check()


def test_rows_that_were_handed_out_outlive_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no second graph fits into the budget for graphs."""
    monkeypatch.setattr(forward, "settings", replace(settings, graph_budget=0))
    sequence = model.new_sequence()
    step(model, sequence, draw(random.Random(3), 9), want=UNSEEN)
    rows = model.forward(Batch((sequence,), np.array([[1, 2, 3, 4]], np.int32), VERIFY))
    before = np.array([rows.logits(0, row) for row in range(4)])
    assert sequence.commit(2) == 2
    assert same_bits(np.array([rows.logits(0, row) for row in range(4)]), before)


def test_streams_are_those_of_plain_decoding(golden_dir: Path, one_state: None) -> None:
    with Model(golden_dir / "trunks" / "qwen35-mtp-accepting.gguf", n_ctx=300, n_seq=3, n_threads=1) as model:
        prompts = [prompt_of(model, length, length) for length in (30, 120, 4)]
        for params in (GREEDY, SEEDED):
            expected = [plain(model, prompt, params) for prompt in prompts]
            streams, execution = speculate(model, prompts, params, head_speculator(model), 4)
            stats = execution.counters.snapshot()
            assert streams == expected and stats.accepted > 20
            assert 0 < stats.again < stats.emitted


def test_a_device_without_the_rule_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_runs", lambda *_: False)
    with pytest.raises(UnsupportedError, match="CPU does not compute gated delta rules"):
        Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=64, n_threads=1)
