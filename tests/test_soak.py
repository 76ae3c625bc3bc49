"""`python -m benchmarks soak`: a small run, and what it calls wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the tiny model is written with it")

from benchmarks import soak
from benchmarks.soak import MIB, Plan, Report
from benchmarks.synthetic import write
from tsgg import LLM
from tsgg.errors import UsageError

PLAN = Plan(100, growth=5)


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(flags)


def test_of_many_requests_that_come_and_leave_none_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(parsed("--requests", "200", "--cancel", "0.3", "--growth", "1000")) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["lost"] == found["different"] == 0 and found["wrong"] == []
    assert found["finished"] + found["cancelled"] == 200 and found["cancelled"] > 10


def test_other_tokens_than_alone_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", soak.tiny())
    monkeypatch.setattr(soak.Soak, "_submit", lambda self, ask, leave, rng: ((-1,), soak.CANCELLED))
    with LLM(tmp_path / "m.gguf", n_ctx=soak.N_CTX, n_seq=2, n_threads=1) as llm:
        report = soak.run(llm, Plan(40, cancel=0.0))
    assert report.different == 40 - report.finished > 5


def test_who_never_ends_and_who_fails_is_lost() -> None:
    report = Report()
    report.count(["finished", "cancelled", "no end", "no end", "KeyError: 3"])
    assert (report.finished, report.cancelled, report.lost) == (1, 1, 3)
    assert report.reasons == {"no end": 2, "KeyError: 3": 1}


def weighed(*resident: int, graphs: tuple[int, int] = (0, 0)) -> Report:
    return Report(
        resident=dict(zip((10, 100), resident, strict=True)), graphs=dict(zip((10, 100), graphs, strict=True))
    )


@pytest.mark.parametrize(
    "report, words",
    [
        (weighed(50 * MIB, 55 * MIB), ""),
        (weighed(50 * MIB, 56 * MIB), "memory grew by 6.0 MiB, more than 5, beside graphs"),
        (weighed(50 * MIB, 56 * MIB, graphs=(10 * MIB, 11 * MIB)), ""),
        (weighed(0, 0), ""),
    ],
)
def test_memory_may_grow_to_the_bound_and_by_what_graphs_hold(report: Report, words: str) -> None:
    assert ", ".join(report.wrong(PLAN)) == words


def test_a_failed_check_of_the_engine_is_wrong() -> None:
    report = weighed(1, 1)
    report.integrity = "slots [0] of 2 have an owner"
    report.lost = 2
    assert report.wrong(PLAN) == ["2 lost", "slots [0] of 2 have an owner"]


@pytest.mark.parametrize("flags", [("--requests", "9"), ("--readers", "0"), ("--cancel", "1.5")])
def test_wrong_arguments_are_refused_before_anything_is_loaded(flags: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        soak.main(parsed(*flags))
