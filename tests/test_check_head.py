"""`inspect --check-head`: a head that knows its trunk is told from one that does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="synthetic files are written with it")

from benchmarks.synthetic import write
from benchmarks.synthetic_qwen35 import Shape, recipe
from tests.tiny_models import TinyLlama, write_tiny
from tests.tiny_qwen35 import TinyQwen35, write_qwen35
from tsgg.check_head import HeadCheck, check_head
from tsgg.cli import main
from tsgg.model import Model
from tsgg.speculative.protocol import Batch, HeadRows, Want

SMALL = Shape(
    layers=4, embedding=256, width=256, heads=2, kv_heads=1, key_heads=1, value_heads=2, vocab=1024, tied=False,
    type="f16", echo=0.05,
)  # fmt: skip
KNOWS, GUESSES, SCRAMBLED = 0.1, 3.5, 1e4  # noise of the head's projection


def file_with(path: Path, noise: float) -> Path:
    write(path, recipe(replace(SMALL, noise=noise)))
    return path


def checked(path: Path, tokens: list[int]) -> HeadCheck:
    with Model(path, n_ctx=256, n_threads=1) as model:
        head = model.draft_head()
        assert head is not None
        return check_head(model, model.new_sequence(), head, tokens)


def test_a_head_that_knows_its_trunk_is_accepted_and_a_scrambled_one_is_not(tmp_path: Path) -> None:
    tokens = np.random.default_rng(3).integers(300, SMALL.vocab, 40).tolist()
    knows = checked(file_with(tmp_path / "knows.gguf", KNOWS), tokens)
    assert knows.drafts == 39 and knows.accepted == (39, 39, 39) and knows.agrees
    scrambled = checked(file_with(tmp_path / "scrambled.gguf", SCRAMBLED), tokens)
    assert scrambled.shares[0] < 0.1 and sum(scrambled.accepted) <= 3


def test_counts_are_those_of_drafts_compared_with_the_stream_that_follows(tmp_path: Path) -> None:
    path, window, count = file_with(tmp_path / "m.gguf", GUESSES), 3, 40
    expected = [0] * window
    with Model(path, n_ctx=256, n_threads=1) as model:
        sequence, head = model.new_sequence(), model.draft_head()
        assert head is not None
        stream, hidden = [500], []
        for _ in range(count + window):
            rows = model.forward(Batch((sequence,), np.array([stream[-1:]], np.int32), Want("all", "all")))
            stream.append(int(rows.logits(0, 0).argmax()))
            hidden.append(rows.hidden(0).copy())
            sequence.commit(1)
        for position in range(1, count):
            entry = HeadRows(
                sequence, hidden[position - 1], np.array(stream[position : position + 1], np.int32), position - 1
            )
            (draft,) = head.draft([entry], window, 0.0)
            for i in range(window):
                expected[i] += draft.tokens[: i + 1] == tuple(stream[position + 1 : position + 2 + i])
    check = checked(path, stream[:count])
    assert check.drafts == count - 1 and check.accepted == tuple(expected)
    assert 0 < expected[2] < expected[0] < count - 1  # else the comparison says little


def test_the_command_line_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(path: Path) -> str:
        assert main(["inspect", "-m", str(path), "--check-head", "-c", "256", "-t", "1"]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("head check"))

    assert "100%, 100%, 100% of 63, 4.00 tokens per verify" in shown(file_with(tmp_path / "knows.gguf", KNOWS))
    # A tiny random trunk and a random head: they agree by chance alone.
    assert "wired wrongly" in shown(write_qwen35(tmp_path / "random.gguf", TinyQwen35(nextn=1)))
    assert "no draft head" in shown(write_tiny(tmp_path / "none.gguf", TinyLlama()))
