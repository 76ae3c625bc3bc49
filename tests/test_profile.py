"""Phase timing on request: it counts what was forwarded, changes no row, and is not there when nobody asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_models import TinyLlama, write_tiny
from tests.tiny_qwen35 import TinyQwen35, write_qwen35
from tests.trunk_steps import decode, same_bits, step
from tsgg.errors import TsggError
from tsgg.model import Model
from tsgg.profile import HEAD_EVERY, Profile
from tsgg.speculative.protocol import Batch, Want


@pytest.fixture(params=["llama", "qwen35"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    path = tmp_path / "m.gguf"
    write_tiny(path, TinyLlama()) if request.param == "llama" else write_qwen35(path, TinyQwen35())
    with Model(path, device="cpu", n_ctx=300, n_seq=2, n_threads=1) as model:
        yield model


def run(model: Model) -> list[np.ndarray]:
    """A prefill, plain steps, verifies of which some rows are kept: every row of logits."""
    sequence, tokens = model.new_sequence(), np.random.default_rng(1).integers(0, 250, 120).tolist()
    step(model, sequence, tokens[:30], want=Want("last"))
    rows = [decode(model, sequence, tokens[30:50])]
    rows += [step(model, sequence, tokens[50 + 4 * i : 54 + 4 * i], kept=2) for i in range(10)]
    model.release(sequence)
    return rows


def test_rows_are_the_same_bits_with_a_profile(model: Model) -> None:
    plain = run(model)
    model.profile()
    assert all(same_bits(a, b) for a, b in zip(run(model), plain, strict=True))


def test_every_kind_of_forward_is_counted_and_its_head_timed(model: Model) -> None:
    profile = model.profile()
    assert model.profile() is profile and profile.phases() == []
    # The first forward of a graph is left out, and growing scratch drops the graphs of recurrent layers.
    for _ in range(2):
        run(model)
    before = {(p.kind, p.sequences, p.rows): p.forwards for p in profile.phases()}
    run(model)
    found = {(p.kind, p.sequences, p.rows): p for p in profile.phases()}
    assert {name: phases.forwards - before.get(name, 0) for name, phases in found.items()} == {
        ("prefill", 1, 30): 1,
        ("decode", 1, 1): 20,
        ("verify", 1, 4): 10,
    }
    for phases in found.values():
        assert min(phases.inputs, phases.compute, phases.outputs) > 0
        assert 0 < (phases.head_share or 0) <= 1
        assert 1 <= phases.heads <= 1 + phases.forwards // HEAD_EVERY + 1
    report = profile.report()
    assert all(text in report for text in ("decode 1 x 1", "verify 1 x 4", "prefill 1 x 30"))


def test_chunks_of_which_nothing_is_read_have_no_head(model: Model) -> None:
    profile, sequence = model.profile(), model.new_sequence()
    for start in (0, 40, 80):
        step(model, sequence, list(range(start, start + 40)), want=Want("none"))
    (phases,) = profile.phases()
    assert (phases.kind, phases.forwards, phases.heads, phases.head_share) == ("prefill", 2, 0, None)


def test_a_row_that_is_read_too_late_is_refused_as_without_a_profile(model: Model) -> None:
    model.profile()
    sequence = model.new_sequence()
    batch = Batch((sequence,), np.array([[1, 2]], np.int32), Want("last", "last"))
    rows = model.forward(batch)
    assert rows.hidden(0).shape == (1, 64)
    model.forward(batch)
    with pytest.raises(TsggError, match="after the model's next forward"):
        rows.logits(0, -1)


def test_nothing_is_timed_unasked(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profile, "run", lambda *_: pytest.fail("a forward was timed"))
    assert len(run(model)) == 11
    model.profile()
    with pytest.raises(pytest.fail.Exception, match="was timed"):
        run(model)
