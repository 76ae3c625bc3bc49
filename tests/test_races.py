"""A model that is closed, dropped or interrupted while it generates: nothing crashes, everybody is told, the next answer is right.

Each in a process of its own, at a given forward; `python -m benchmarks races` does the same at random moments.
"""

from __future__ import annotations

import argparse

import pytest

from benchmarks import races
from benchmarks.races import judge, race
from tests.tiny_models import TinyLlama, write_tiny
from tsgg.errors import UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("races") / "m.gguf", TinyLlama(layers=4)))


@pytest.mark.parametrize("forward", [1, 3, 40])
def test_a_model_that_is_closed_in_a_forward_tells_who_reads_and_can_be_opened_again(model: str, forward: int) -> None:
    assert race("close", model, seed=forward, forward=forward) == ""


@pytest.mark.parametrize("forward", [1, 9])
def test_what_the_body_of_with_raises_is_the_last_word_though_threads_generate(model: str, forward: int) -> None:
    assert race("body", model, seed=forward, forward=forward) == ""


@pytest.mark.parametrize("forward", [1, 9])
def test_the_interpreter_ends_in_silence_while_daemon_threads_generate(model: str, forward: int) -> None:
    assert race("exit", model, seed=forward, forward=forward) == ""


def test_a_model_may_be_dropped_with_a_stream_half_read(model: str) -> None:
    assert race("drop", model, seed=1) == ""


@pytest.mark.parametrize("forward", [1, 4, 30])
def test_after_an_interrupt_nobody_is_left_and_the_next_answer_is_right(model: str, forward: int) -> None:
    assert race("interrupt", model, seed=forward, count=3, forward=forward) == ""


@pytest.mark.parametrize(
    "kind, status, errors, words",
    [
        ("close", 0, "", ""),
        ("close", -11, "", "killed by signal 11"),
        ("close", 1, "another answer than before\n", "exit status 1: another answer than before"),
        ("exit", 0, "Exception in thread\n", "exit status 0: Exception in thread"),
        ("body", 1, "Traceback ...\nRuntimeError: the body failed\n", ""),
        ("body", 0, "", "exit status 0: "),
        ("body", -11, "", "killed by signal 11"),
    ],
)
def test_a_race_is_judged_by_how_its_process_ends(kind: str, status: int, errors: str, words: str) -> None:
    assert judge(kind, status, errors) == words


@pytest.mark.parametrize("flags", [("--count", "0"), ("--kinds", "close,fly")])
def test_wrong_arguments_are_refused_before_anything_runs(flags: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    races.add_arguments(parser)
    with pytest.raises(UsageError):
        races.main(parser.parse_args(flags))
