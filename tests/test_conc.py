"""`python -m benchmarks conc`: its arithmetic, with a client whose times are told."""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest

from benchmarks import conc, streams
from benchmarks.arrivals import TEXTS, Request, make_requests
from benchmarks.conc_peer import parse_line
from benchmarks.streams import Event, Stream, figures, gaps_within, quantile, run_together, shared_time
from tsgg.errors import TsggError, UsageError


class ThreadClock(threading.local):
    """A clock of each thread's own, from 0: nothing waits, nothing depends on the scheduler."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeClient:
    """The first token after a second, then one every `step`; a speculating request takes two at a time."""

    def __init__(self, clock: ThreadClock, step: float = 0.5, wrong: bool = False) -> None:
        self.clock, self.step, self.wrong = clock, step, wrong
        self.forgotten = self.reused = 0

    def stream(self, ids: Sequence[int], tokens: int, speculate: bool) -> Iterator[Event]:
        for at in range(tokens):
            drafted = speculate and at % 2 == 0 and at > 0
            self.clock.sleep(1.0 if at == 0 else 0.0 if drafted else self.step)
            yield Event(ids[0] + at + (1000 if self.wrong and speculate else 0), drafted)

    def forget(self) -> None:
        self.forgotten += 1

    def reusing(self) -> AbstractContextManager[None]:
        self.reused += 1
        return nullcontext()


def tokenize(text: str, add_bos: bool | None = None) -> list[int]:
    return [*([0] if add_bos is None else []), *(1 + ord(letter) for letter in text)]


def test_the_decode_rate_counts_from_the_last_first_token_to_the_first_last_one() -> None:
    early = Stream(0.0, (1.0, 2.0, 3.0, 4.0), (1, 2, 3, 4))
    late = Stream(0.5, (2.5, 3.0, 3.5, 4.5, 6.0), (1, 2, 3, 4, 5), drafted=2)
    assert shared_time([early, late]) == (2.5, 4.0)
    found = figures([early, late])
    assert found.decode_rate == pytest.approx((2 + 2) / 1.5)
    assert found.total_rate == pytest.approx(9 / 6.0)
    assert (found.ttft, found.ttft_worst, found.drafted) == (1.5, 2.0, 2)
    assert (found.gap_p50, found.gap_p99) == (1.0, 1.5)


def test_streams_that_never_overlap_have_no_decode_rate() -> None:
    found = figures([Stream(0.0, (1.0, 2.0), (1, 2)), Stream(5.0, (6.0, 7.0), (1, 2))])
    assert math.isnan(found.decode_rate) and found.total_rate == pytest.approx(4 / 7.0)


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile(range(1, 101), 0.99) == 99
    assert quantile([7.0], 0.99) == 7.0 and math.isnan(quantile([], 0.5))


def test_gaps_at_the_edge_of_a_time_are_left_out() -> None:
    assert gaps_within(Stream(0.0, (1.0, 2.0, 4.0, 7.0), (1, 2, 3, 4)), 1.5, 5.0) == [2.0]


def test_requests_run_side_by_side_in_their_order_and_wait_for_their_turn() -> None:
    clock = ThreadClock()
    requests = [Request((10 * n,), 3, 0.25 * n) for n in range(4)]
    found = run_together(FakeClient(clock), requests, [False] * 4, clock, clock.sleep)
    assert [stream.start for stream in found] == [0.0, 0.25, 0.5, 0.75]
    assert [stream.times for stream in found] == [(s + 1.0, s + 1.5, s + 2.0) for s in (0.0, 0.25, 0.5, 0.75)]
    assert [stream.tokens for stream in found] == [(10 * n, 10 * n + 1, 10 * n + 2) for n in range(4)]


def test_what_one_reader_raises_is_raised_after_all_have_ended() -> None:
    clock = ThreadClock()
    done: list[int] = []

    class Failing(FakeClient):
        def stream(self, ids: Sequence[int], tokens: int, speculate: bool) -> Iterator[Event]:
            if ids[0] == 1:
                raise UsageError("no room")
            yield from super().stream(ids, tokens, speculate)
            done.append(ids[0])

    with pytest.raises(UsageError, match="no room"):
        run_together(Failing(clock), [Request((n,), 2) for n in range(3)], [False] * 3, clock, clock.sleep)
    assert sorted(done) == [0, 2]


@pytest.mark.parametrize("texts", TEXTS)
def test_every_kind_of_texts_has_eight_prompts_with_the_depth_asked_for(texts: str) -> None:
    shallow = make_requests(tokenize, texts, "simultaneous", 8, 5)
    deep = make_requests(tokenize, texts, "staggered", 8, 5, depth=300, gap=0.5)
    assert [len(d.ids) - len(s.ids) + 1 for s, d in zip(shallow, deep, strict=True)] == [
        300
    ] * 8  # the first token is one
    assert [d.delay for d in deep] == [0.5 * n for n in range(8)]
    assert len({s.ids for s in shallow}) == (1 if texts == "same" else 8)
    shares_depth = len({d.ids[:300] for d in deep}) == 1
    assert shares_depth == (texts in ("same", "shared"))


def test_unknown_texts_and_arrivals_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown texts x"):
        make_requests(tokenize, "x", "simultaneous", 1, 5)
    with pytest.raises(UsageError, match="unknown arrivals x"):
        make_requests(tokenize, "same", "x", 1, 5)


def test_arms_alternate_in_turning_order_and_the_first_round_is_dropped() -> None:
    seen: list[str] = []
    results = conc.alternate({name: lambda name=name: seen.append(name) or len(seen) for name in "abc"}, 2)
    assert "".join(seen) == "abcbcacab"
    assert results == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> conc.Bench:
    clock = ThreadClock()
    monkeypatch.setattr(
        conc, "run_together", lambda client, requests, on: run_together(client, requests, on, clock, clock.sleep)
    )
    monkeypatch.setattr(
        conc, "run_alone", lambda client, request, on=False: streams.run_alone(client, request, on, clock)
    )
    return conc.Bench(FakeClient(clock), FakeClient(clock, step=1.0), tokenize, 9, 0, 2, 0.25)


def test_a_run_reports_every_arm_with_ratios_of_the_same_round(bench: conc.Bench) -> None:
    report = conc.run_arms(bench, conc.ARMS, [1, 2], ["quote"], ["simultaneous"])
    assert report["identical"]
    one, two = report["grid"]
    assert (one["arms"]["plain"]["decode_rate"], two["arms"]["plain"]["decode_rate"]) == (2.0, 4.0)
    assert (two["arms"]["spec"]["decode_rate"], two["arms"]["llama"]["decode_rate"]) == (8.0, 2.0)
    assert two["spec_over_plain_decode_rate"] == two["plain_over_llama_decode_rate"] == 2.0
    assert two["arms"]["spec"]["drafted"] == 2 * 4
    assert report["neighbour"]["spec_over_plain"] == 1.0 and report["neighbour"]["drafted"] == 4
    assert report["ttft"]["spec_over_plain"] == 1.0
    assert bench.ours.reused == 2 * 3 and bench.peer.reused == 3  # in the arm `cached` alone, the dropped round too
    assert [report["cached"][name]["median"] for name in ("plain", "spec", "llama")] == [2.0, 2.0, 1.0]


def test_every_run_begins_with_nothing_in_memory(bench: conc.Bench) -> None:
    conc.cell(bench, "mixed", "simultaneous", 2)
    assert bench.ours.forgotten == 2 + 2 * 3  # each request alone, then two arms in three rounds
    assert bench.peer.forgotten == 2 + 3


def test_a_figure_that_a_round_lacks_is_lacking_in_the_median() -> None:
    assert math.isnan(streams.median([1.0, math.nan, 2.0])) and math.isnan(streams.spread([math.nan, 1.0]))
    assert streams.median([3.0, 1.0, 2.0]) == 2.0 and streams.spread([3.0, 1.0, 2.0]) == 1.0
    assert conc._without_nan({"a": [1.0, math.nan], "b": "nan"}) == {"a": [1.0, None], "b": "nan"}


def test_a_stream_with_other_tokens_than_alone_is_told(bench: conc.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.ours.wrong = True
    for arm in conc.ARMS:
        assert not conc.run_arms(bench, [arm], [1], ["same"], ["simultaneous"])["identical"]
        assert "OTHER TOKENS THAN ALONE" in capsys.readouterr().out


def test_without_a_peer_its_column_is_absent(bench: conc.Bench) -> None:
    lone = conc.Bench(bench.ours, None, tokenize, 5, 0, 1, 0.0)
    report = conc.run_arms(lone, conc.ARMS, [2], ["mixed"], ["staggered"])
    assert list(report["grid"][0]["arms"]) == ["plain", "spec"]
    assert "llama" not in report["ttft"] and "llama" not in report["cached"]


def test_an_event_of_llama_server_gives_its_tokens_and_the_last_none() -> None:
    assert parse_line(b'data: {"content":" a","tokens":[5,6],"stop":false}\n') == [Event(5), Event(6)]
    assert parse_line(b'data: {"content":"","tokens":[5],"stop":true}\n') == []
    assert parse_line(b"\n") == parse_line(b"data: [DONE]\n") == []
    with pytest.raises(TsggError, match="no slot"):
        parse_line(b'data: {"error":{"message":"no slot"}}\n')


@pytest.mark.parametrize("flags", [["--texts", "x"], ["--requests", "0"], ["--requests", "a"], ["--rounds", "0"]])
def test_wrong_arguments_are_refused_before_anything_is_loaded(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    conc.add_arguments(parser)
    with pytest.raises(UsageError):
        conc.main(parser.parse_args(flags))
