"""Logits processors: what they are given, where they stand in the chain, and that speculation changes nothing about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiny_models import TinyLlama, write_tiny
from tsgg import LLM, SamplingParams, TsggError
from tsgg.sampling import RowSampler

VOCAB = 64
PROMPT = "the hell the hell the hell the"
Ids = NDArray[np.int32]
Row = NDArray[np.float32]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny(tmp_path_factory.mktemp("processors") / "tiny.gguf", TinyLlama())
    with LLM(path, n_ctx=256, n_seq=2, speculation=None) as llm:
        yield llm


def sampler(
    *processors: Callable[[Ids, Row], Row], prompt: Any = (), suppressed: Any = (), **fields: Any
) -> RowSampler:
    params = SamplingParams(temperature=0, logits_processors=processors, **fields)
    return RowSampler(params, VOCAB, prompt=prompt, suppressed=suppressed)


def want(token: int, value: float = 9.0) -> Callable[[Ids, Row], Row]:
    def processor(ids: Ids, logits: Row) -> Row:
        logits[token] = value
        return logits

    return processor


def test_a_processor_sees_the_whole_prompt_and_every_token_since_and_may_keep_what_it_saw() -> None:
    seen: list[Ids] = []

    def watch(ids: Ids, logits: Row) -> Row:
        seen.append(ids)
        logits[len(ids) % VOCAB] = 1.0
        return logits

    drawing = sampler(watch, prompt=[7, 8, 9])
    tokens = [drawing.sample(np.zeros(VOCAB, np.float32), position) for position in range(3, 203)]
    assert tokens == [length % VOCAB for length in range(3, 203)]
    for count, ids in enumerate(seen):
        assert ids.dtype == np.int32 and ids.tolist() == [7, 8, 9, *tokens[:count]]
    with pytest.raises(ValueError, match="read-only"):
        seen[0][0] = 1


def test_a_row_is_never_taken_by_the_device_past_a_processor() -> None:
    assert sampler(want(3)).needs_logits


def test_processors_run_in_order_each_on_what_the_one_before_returned() -> None:
    def double(ids: Ids, logits: Row) -> Row:
        return logits * 2

    def add_one_where_eight(ids: Ids, logits: Row) -> Row:
        return np.where(logits == 8, 99, logits).astype(np.float64)  # wider floats are taken

    row = np.zeros(VOCAB, np.float32)
    row[[4, 5]] = 4, 5
    assert sampler(double, add_one_where_eight).sample(row, 0) == 4
    assert sampler(add_one_where_eight, double).sample(row, 0) == 5


def test_the_models_row_stays_as_it_was_and_log_probabilities_are_its_own() -> None:
    row = np.zeros(VOCAB, np.float32)
    drawing = sampler(want(3), logprobs=0)
    assert drawing.sample(row, 0) == 3
    assert not row.any()
    assert drawing.logprobs[0].logprob == pytest.approx(-np.log(VOCAB))


def test_a_table_that_a_processor_returns_is_not_changed_by_the_chain() -> None:
    table = np.arange(VOCAB, dtype=np.float32)
    fixed = sampler(lambda ids, logits: table, logit_bias={63: -5.0}, presence_penalty=1.0, prompt=[62])
    assert fixed.sample(np.zeros(VOCAB, np.float32), 0) == 61
    assert table.tolist() == list(range(VOCAB))


def test_no_processor_brings_back_a_token_that_bias_or_the_models_file_forbids() -> None:
    row = np.zeros(VOCAB, np.float32)
    assert sampler(want(3), logit_bias={3: -np.inf}).sample(row, 0) == 0
    assert sampler(want(3), suppressed=[3]).sample(row, 0) == 0
    end = RowSampler(
        SamplingParams(temperature=0, logits_processors=want(3), ignore_eos=True), VOCAB, end_of_generation=[3]
    )
    assert end.sample(row, 0) == 0


def leave(ids: Ids, logits: Row) -> Row:
    raise SystemExit(3)


def fail(ids: Ids, logits: Row) -> Row:
    raise KeyError("table")


def nothing(ids: Ids, logits: Row) -> Any:
    """Changes its copy and returns nothing."""


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (fail, r"processor fail failed: KeyError\('table'\)"),
        (leave, r"processor leave failed: SystemExit"),
        (nothing, r"processor nothing returned object of shape \(\); expected floats of shape \(64,\)"),
        (lambda ids, logits: logits[1:], r"returned float32 of shape \(63,\)"),
        (lambda ids, logits: np.zeros(VOCAB, np.int64), "returned int64"),
        (lambda ids, logits: np.full(VOCAB, np.nan), "nan"),
        (lambda ids, logits: np.full(VOCAB, -np.inf), "-inf"),
    ],
)
def test_a_processor_that_raises_or_returns_no_row_is_told_by_name(processor: Any, words: str) -> None:
    with pytest.raises(TsggError, match=words):
        sampler(processor).sample(np.zeros(VOCAB, np.float32), 0)


def steer(ids: Ids, logits: Row) -> Row:
    """Depends on every token so far: a window that showed it other tokens would draw others."""
    logits[np.unique(ids)] += 1.5
    logits[int(ids.sum()) % logits.size] += 2.0
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_stream_with_processors_is_the_plain_one_whatever_is_drafted(
    llm: LLM, window: int, temperature: float
) -> None:
    drafting = {"type": "ngram", "draft": window, "adaptive": False}
    params = SamplingParams(
        max_tokens=80, temperature=temperature, seed=5, logits_processors=steer, logprobs=1, ignore_eos=True
    )
    plain, fast = llm.generate(PROMPT, params), llm.generate(PROMPT, params, speculation=drafting)
    assert fast.speculation.drafted > 0 == plain.speculation.drafted
    assert (fast.tokens, fast.logprobs, fast.text) == (plain.tokens, plain.logprobs, plain.text)
    assert fast.tokens != llm.generate(PROMPT, params, logits_processors=None).tokens


def test_verify_rows_are_processed_once_per_emitted_token_with_the_tokens_before_it(llm: LLM) -> None:
    seen: list[list[int]] = []

    def watch(ids: Ids, logits: Row) -> Row:
        seen.append(ids.tolist())
        return logits

    drafting = {"type": "ngram", "draft": 4, "adaptive": False}
    for _ in range(2):  # the second time the prompt is in memory already
        seen.clear()
        result = llm.generate(PROMPT, max_tokens=40, temperature=0, logits_processors=[watch], speculation=drafting)
        whole = llm.tokenize(PROMPT) + list(result.tokens)
        assert result.speculation.accepted > 0
        assert seen == [whole[: -len(result.tokens) + i] for i in range(len(result.tokens))]


def test_a_processor_that_raises_fails_its_own_request_and_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsgg.llm.MOST_UNREAD", 1)

    def late(ids: Ids, logits: Row) -> Row:
        if ids.size > len(llm.tokenize(PROMPT)) + 5:
            raise RuntimeError("no more")
        return logits

    alone = llm.generate(PROMPT, max_tokens=20, temperature=0).tokens
    good = llm.stream(PROMPT, max_tokens=20, temperature=0)
    bad = llm.stream(PROMPT, max_tokens=20, temperature=0, logits_processors=late)
    found, lost = [next(good).token], [next(bad).token]
    with pytest.raises(TsggError, match="late failed"):
        for chunk in bad:
            lost.append(chunk.token)
            found.append(next(good).token)
    assert tuple(lost) == alone[:6]
    assert (*found, *(chunk.token for chunk in good)) == alone
    assert llm.generate(PROMPT, max_tokens=20, temperature=0).tokens == alone


@pytest.mark.parametrize("window", [1, 3, 8])
def test_the_tokens_before_a_failing_row_reach_the_reader_wherever_its_window_ends(llm: LLM, window: int) -> None:
    def repeat(ids: Ids, logits: Row) -> Row:
        logits[ids[-4]] += 100  # so that windows are accepted to their ends
        return logits

    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "logprobs": 0}
    drafting = {"type": "ngram", "draft": window, "adaptive": False}
    whole = list(llm.stream(PROMPT, logits_processors=repeat, speculation=drafting, **fields))
    drafts = [at for at, chunk in enumerate(whole) if chunk.from_draft]
    size = len(llm.tokenize(PROMPT))
    assert len(drafts) > 9
    for failing in (0, 1, *(at + 1 for at in drafts[:9])):

        def late(ids: Ids, logits: Row, failing: int = failing) -> Row:
            if ids.size == size + failing:
                raise RuntimeError("no more")
            return logits

        found = []
        with pytest.raises(TsggError, match="late failed"):
            for chunk in llm.stream(PROMPT, logits_processors=[repeat, late], speculation=drafting, **fields):
                found.append(chunk)
        seen = [(chunk.token, chunk.text, chunk.logprob) for chunk in found]
        assert seen == [(chunk.token, chunk.text, chunk.logprob) for chunk in whole[:failing]]


@pytest.mark.parametrize("call", ["generate", "stream", "forget"])
def test_a_processor_that_waits_for_the_engine_is_an_error_and_does_not_hang(llm: LLM, call: str) -> None:
    def nested(ids: Ids, logits: Row) -> Row:
        if call == "forget":
            llm.forget()
        elif call == "generate":
            llm.generate("a", max_tokens=1)
        else:
            next(llm.stream("a", max_tokens=1))
        return logits

    with pytest.raises(TsggError, match=r"nested failed: UsageError.*engine's (own )?thread"):
        llm.generate(PROMPT, max_tokens=2, logits_processors=nested)
    assert llm.generate(PROMPT, max_tokens=2).tokens
