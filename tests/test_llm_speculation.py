"""Speculation of the Python API: governed windows, one governor per drafter, and a change on a live model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import TinyLlama, write_tiny
from tsgg import LLM, TsggError
from tsgg.engine.planner import MOST_EXECUTIONS
from tsgg.speculative.execution import NO_ROOM
from tsgg.speculative.ngram import NO_MATCH, WEAK_MATCH

PROMPT = "the hell the hell the hell the"
TOKENS = 80


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("llm") / "tiny.gguf", TinyLlama())


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, n_ctx=256) as llm:
        yield llm


def stream(llm: LLM, temperature: float = 0.0, **keywords: object) -> tuple[int, ...]:
    llm.generate(PROMPT, max_tokens=TOKENS, temperature=temperature, seed=3, ignore_eos=True, **keywords)
    assert llm.last is not None
    return llm.last.tokens


@pytest.mark.parametrize("drafter", ["ngram", "suffix", {"type": "ngram", "draft": 64}, {"type": "suffix", "draft": 1}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_governed_stream_is_the_plain_one(llm: LLM, drafter: object, temperature: float) -> None:
    plain = stream(llm, temperature, speculation=None)
    for _ in range(3):  # costs are learned from one request to the next
        assert stream(llm, temperature, speculation=drafter) == plain


def test_the_governor_reports_what_it_measured(llm: LLM) -> None:
    stream(llm, speculation=None)
    assert llm.last is not None and llm.last.governor is None, "plain decoding has none"
    stream(llm)
    report = llm.last.governor
    assert report is not None and report.plain_ms > 0 and report.asked_steps > 0
    assert sum(steps for _, steps in report.windows) == llm.last.speculation.steps
    assert "ms per plain token" in llm.last.statistics()


def test_all_requests_and_options_of_a_drafter_share_one_governor(llm: LLM) -> None:
    stream(llm, speculation="ngram")
    assert llm.last is not None and llm.last.governor is not None
    before = llm.last.governor
    stream(llm, speculation={"type": "ngram", "draft": 2})
    after = llm.last.governor
    assert after is not None and after.asked_steps + after.plain_steps > before.asked_steps + before.plain_steps
    stream(llm, speculation="suffix")
    other = llm.last.governor
    assert other is not None and other.asked_steps + other.plain_steps == llm.last.speculation.steps


def test_without_adaptation_every_step_drafts_all_that_it_may(llm: LLM) -> None:
    stream(llm, speculation={"type": "ngram", "draft": 4, "adaptive": False})
    assert llm.last is not None and llm.last.governor is None
    assert set(llm.last.speculation.silence_reasons) <= {NO_MATCH, NO_ROOM, WEAK_MATCH}
    assert llm.last.speculation.drafted > 0


@pytest.mark.parametrize("change", ["off", "suffix", {"type": "ngram", "draft": 1, "adaptive": False}])
def test_speculation_changes_between_two_steps_of_a_stream(
    llm: LLM, change: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsgg.llm.MOST_UNREAD", 1)  # the engine waits for the reader
    plain = stream(llm, speculation=None)
    llm.update_speculation({"type": "ngram", "adaptive": False})
    tokens = []
    for number, chunk in enumerate(llm.stream(PROMPT, max_tokens=TOKENS, temperature=0, seed=3, ignore_eos=True)):
        tokens.append(chunk.token)
        if number == 20:
            earlier = llm.engine.planner.execution(llm.speculation).counters
            report = llm.update_speculation(change)
            later = llm.engine.planner.execution(llm.speculation).counters
            assert later is not earlier
    assert tuple(tokens) == plain and report == llm.speculation_report()
    assert llm.last is not None
    steps = earlier.snapshot().steps, later.snapshot().steps
    assert llm.last.speculation.steps == sum(steps) and steps[0] > 0, "one count for the whole request"
    assert later.snapshot().steps > 10 and len(later.snapshot().drafted_per_position) <= (
        1 if isinstance(change, dict) else 8
    )
    assert (llm.last.speculation.dropped is not None) == (change == "off")
    assert stream(llm) == plain


def test_a_change_from_another_thread_takes_effect_in_a_stream_that_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsgg.llm.MOST_UNREAD", 1)
    chunks = llm.stream(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    next(chunks)
    thread = threading.Thread(target=lambda: llm.update_speculation("off"))
    thread.start()
    thread.join()
    assert len(list(chunks)) == 19 and not llm.speculation.enabled
    assert llm.last is not None and llm.last.speculation.dropped


def test_auto_is_the_default_again_whatever_was_set(llm: LLM) -> None:
    for change in ("off", "ngram", {"type": "ngram", "draft": 3}):
        llm.update_speculation(change)
        llm.update_speculation("auto")
        assert llm.speculation.enabled and llm.speculation.type == "auto" and llm.speculation.draft is None


def test_options_that_are_varied_with_every_call_do_not_pile_up(llm: LLM) -> None:
    for i in range(40):
        llm.generate(PROMPT, max_tokens=2, speculation={"type": "suffix", "pmin": i / 100})
    planner = llm.engine.planner
    assert len(planner._executions) <= MOST_EXECUTIONS and len(planner._speculators) <= MOST_EXECUTIONS


def test_speculation_that_was_off_is_armed_late_on_the_tokens_that_are_there(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsgg.llm.MOST_UNREAD", 1)
    llm.update_speculation("off")
    plain = stream(llm)
    tokens = []
    for number, chunk in enumerate(llm.stream(PROMPT, max_tokens=TOKENS, temperature=0, seed=3, ignore_eos=True)):
        tokens.append(chunk.token)
        if number == 10:
            llm.update_speculation("ngram")
    assert tuple(tokens) == plain
    assert llm.last is not None and llm.last.speculation.dropped is None


def test_a_call_with_options_of_its_own_is_not_changed(llm: LLM) -> None:
    for number, _ in enumerate(llm.stream(PROMPT, max_tokens=20, ignore_eos=True, speculation=None)):
        if number == 5:
            llm.update_speculation("suffix")
    assert llm.last is not None and llm.last.speculation.dropped


def test_a_wrong_change_leaves_all_as_it_was(llm: LLM, path: Path) -> None:
    before = llm.speculation_report()
    for wrong in ("nonsense", {"draft": 0}, {"draft_model": str(path)}, {"draft_model": "absent.gguf"}):
        with pytest.raises(TsggError, match=r"nonsense|draft|absent"):
            llm.update_speculation(wrong)
    assert llm.speculation_report() == before and len(stream(llm)) == TOKENS
