"""How far something has come: a callback of the API, and bars of the command line."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import TinyLlama, write_tiny
from tsgg import LLM
from tsgg import progress as module
from tsgg.cli.bars import Bars
from tsgg.model import Model
from tsgg.progress import Progress


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.001)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Forwards wait until the event is set."""
    go, forward = threading.Event(), Model.forward

    def wait(model: Model, batch: object) -> object:
        go.wait(30)
        return forward(model, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "forward", wait)
    yield go
    go.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", TinyLlama(weights="q4_0"))


def test_loading_reports_the_bytes_that_are_copied_up_to_all_of_them(path: Path) -> None:
    events: list[Progress] = []
    with LLM(path, on_progress=events.append) as llm:
        assert {event.phase for event in events} == {"load"}
        assert [event.done for event in events] == sorted(event.done for event in events)
        assert events[-1] == Progress("load", llm.model.plan.copied, llm.model.plan.copied) and events[-1].finished


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_prefill_reports_tokens_on_the_thread_that_waits_and_its_end(
    how: str, path: Path, slow: threading.Event
) -> None:
    events: list[tuple[Progress, threading.Thread]] = []

    def hear(progress: Progress) -> None:
        events.append((progress, threading.current_thread()))
        if len(events) == 3:
            slow.set()

    with LLM(path, speculation=None) as llm:
        llm._on_progress = hear
        tokens = [1, 2, 3, 4, 5, 6]
        if how == "generate":
            llm.generate(tokens, max_tokens=2)
        else:
            list(llm.stream(tokens, max_tokens=2))
    assert {thread for _, thread in events} == {threading.current_thread()}
    assert [progress for progress, _ in events[:3]] == [Progress("prefill", 0, 6)] * 3
    assert events[-1][0] == Progress("prefill", 6, 6)


def test_a_prefill_that_takes_no_time_reports_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL", 30.0)
    events: list[Progress] = []
    with LLM(path) as llm:
        llm._on_progress = events.append
        llm.generate([1, 2, 3], max_tokens=2)
    assert not events


def test_a_prompt_of_somebody_else_is_not_reported(path: Path, slow: threading.Event) -> None:
    events: list[Progress] = []
    with LLM(path, n_seq=1, speculation=None) as llm:
        other = threading.Thread(target=llm.generate, args=([1, 2, 3],), kwargs={"max_tokens": 1})
        other.start()
        while not any(request.prompt == [1, 2, 3] for request in llm.engine.executor.serving):
            pass
        llm._on_progress = events.append
        looked = threading.Event()
        threading.Thread(target=lambda: looked.wait(0.05) or slow.set()).start()
        llm.generate([4, 5], max_tokens=1)
        other.join()
    assert {event.total for event in events} <= {2}


def test_what_a_callback_raises_ends_the_wait_and_the_next_answer_is_right(path: Path, slow: threading.Event) -> None:
    class Enough(Exception): ...

    def stop(progress: Progress) -> None:
        slow.set()
        raise Enough

    with pytest.raises(Enough):
        LLM(path, on_progress=stop)
    slow.clear()
    with LLM(path) as llm:
        llm._on_progress = stop
        with pytest.raises(Enough):
            llm.generate([1, 2, 3], max_tokens=2)
        llm._on_progress = None
        stopped = llm.generate([1, 2, 3], max_tokens=5, temperature=0)
    with LLM(path) as llm:
        assert stopped.tokens == llm.generate([1, 2, 3], max_tokens=5, temperature=0).tokens


# -- bars --------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text(stream: io.StringIO) -> str:
    """What was shown, without the terminal's commands."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


@pytest.fixture
def time() -> list[float]:
    return [0.0]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@pytest.mark.parametrize(("phase", "delay"), [("download", 0.0), ("load", 1.0), ("prefill", 2.0)])
def test_a_bar_appears_after_its_delay_and_is_gone_at_the_end(
    phase: str, delay: float, terminal: Terminal, time: list[float]
) -> None:
    with Bars(terminal, lambda: time[0]) as bars:
        bars(Progress(phase, 1, 50))  # type: ignore[arg-type]
        if delay:
            time[0] = delay - 0.01
            bars(Progress(phase, 2, 50))  # type: ignore[arg-type]
            assert not terminal.getvalue()
        time[0] = delay
        bars(Progress(phase, 3, 50))  # type: ignore[arg-type]
        bars(Progress(phase, 50, 50))  # type: ignore[arg-type]
        shown = terminal.getvalue()
        assert {"download": "downloading", "load": "loading", "prefill": "reading the prompt"}[phase] in text(terminal)
        assert shown.endswith("\x1b[2K") or "\x1b[2K" in shown[-20:]  # the line was taken away
    assert terminal.getvalue() == shown


def test_short_work_after_long_work_has_no_bar(terminal: Terminal, time: list[float]) -> None:
    with Bars(terminal, lambda: time[0]) as bars:
        bars(Progress("load", 1, 2))
        bars(Progress("load", 2, 2))
        time[0] = 100.0
        bars(Progress("load", 1, 2))  # another one, which begins only now
        bars(Progress("prefill", 1, 2))
        bars(Progress("prefill", 2, 2))
    assert not terminal.getvalue()


def test_a_bar_of_unknown_length_and_one_that_is_left_in_the_middle_go_away(terminal: Terminal) -> None:
    with Bars(terminal) as bars:
        bars(Progress("download", 1, None))
        bars(Progress("download", 2, None))
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is back


def test_no_bar_is_shown_where_stderr_is_no_terminal() -> None:
    stream = io.StringIO()
    with Bars(stream) as bars:
        assert not bars.wanted
        bars(Progress("download", 1, 2))
    assert not stream.getvalue()
