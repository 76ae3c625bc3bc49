"""What happens between two steps of the engine, one by one: no order of events loses a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_requests import Wish, text, write
from tests.stepped_engine import SteppedEngine
from tsgg.engine.scheduler import LOOK_AHEAD
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


def test_any_number_of_sleeping_readers_delays_nobody(stepped: SteppedEngine) -> None:
    """Each has given its slot up and waits for its reader, before all who came later."""
    sleeping = [Wish((1, 2, number % 200), 9).submit(stepped, most_unread=1) for number in range(LOOK_AHEAD + 3)]
    last = Wish((7, 8, 9), 5).submit(stepped, most_unread=None)
    stepped.run()
    assert last.ended and last.outcome.finish_reason == "length"
    assert not any(stream.ended for stream in sleeping)
    given = 0
    while not all(stream.ended for stream in sleeping):
        stepped.run()
        given += sum(len(event.tokens) for stream in sleeping for event in iter(stream.poll, None))
    assert given == 9 * len(sleeping)
