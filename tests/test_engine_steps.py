"""What happens between two steps of the engine, one by one: no order of events loses a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_requests import Wish, text, write
from tests.stepped_engine import SteppedEngine
from tsgg.model import Model


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[SteppedEngine]:
    with Model(write(tmp_path, "llama"), n_ctx=700, n_seq=2, n_threads=1) as model, SteppedEngine(model) as engine:
        yield engine


def test_a_cancel_that_comes_before_the_engine_has_seen_its_request_is_not_forgotten(stepped: SteppedEngine) -> None:
    stepped.take_in()
    stream = Wish(text(20, 1), 300).submit(stepped)  # between taking in and the step: the step does not know of it
    stream.cancel()
    stepped.step()
    stepped.run()
    assert stream.ended and stream.outcome.finish_reason == "cancelled"
    assert stream.poll() is None, "nothing was computed for it"
