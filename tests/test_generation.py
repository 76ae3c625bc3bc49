"""What a reader is told: the end of an answer whatever brings it, and texts beside log-probabilities."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.chat_models import write_chat_model
from tsgg import LLM
from tsgg.generation import Generation

PROMPT = "the hell the hell the hell the"
MESSAGES = [{"role": "user", "content": "the hell"}]


@pytest.fixture
def llm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr("tsgg.llm.MOST_UNREAD", 1)  # the engine waits for the reader
    with LLM(write_chat_model(tmp_path_factory.mktemp("generation") / "tiny.gguf"), n_ctx=256) as llm:
        yield llm


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Every answer, in the order in which they were started."""
    found: list[Generation] = []
    start = Generation.start

    def noting(self: Generation, *arguments: Any) -> None:
        found.append(self)
        start(self, *arguments)

    monkeypatch.setattr(Generation, "start", noting)
    return found


def test_a_cancelled_stream_ends_with_a_chunk_that_says_so_and_shows_what_was_held_back(
    llm: LLM, started: list[Generation]
) -> None:
    fields: dict[str, Any] = {"max_tokens": 50, "temperature": 0, "ignore_eos": True}
    plain = [chunk.text for chunk in llm.stream(PROMPT, **fields)]
    first = next(i for i, text in enumerate(plain) if text)
    stop = plain[first] + "\x00 never comes"  # so the text from there on is held back until it differs
    stream = llm.stream(PROMPT, stop=stop, **fields)
    chunks = [next(stream) for _ in range(first + 1)]
    assert chunks[-1].text == ""
    started[-1].stream.cancel()
    chunks += stream
    *tokens, last = chunks
    assert (last.token, last.logprob, last.from_draft, last.finish_reason) == (None, None, False, "cancelled")
    assert all(chunk.token is not None and chunk.finish_reason is None for chunk in tokens)
    assert "".join(chunk.text for chunk in chunks) == "".join(plain[: len(tokens)])
    result = llm.last
    assert result is not None and (result.finish_reason, len(result.tokens)) == ("cancelled", len(tokens))
    assert result.text == "".join(chunk.text for chunk in chunks)


def test_a_stream_past_its_deadline_ends_with_a_chunk_that_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine, "submit", partial(llm.engine.submit, timeout=0.0))
    (only,) = llm.stream(PROMPT)
    assert (only.text, only.token, only.finish_reason) == ("", None, "timeout")
    assert llm.last is not None and llm.last.finish_reason == "timeout"


def test_a_cancelled_turn_ends_with_a_chunk_that_says_so(llm: LLM, started: list[Generation]) -> None:
    stream = llm.chat(MESSAGES, stream=True, max_tokens=50, ignore_eos=True)
    next(stream)
    started[-1].stream.cancel()
    chunks = list(stream)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["cancelled"]


def test_a_stream_that_ends_with_a_token_has_no_further_chunk(llm: LLM) -> None:
    chunks = list(llm.stream(PROMPT, max_tokens=3, ignore_eos=True))
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    chunks = list(llm.stream([40] * 255, ignore_eos=True))
    assert [chunk.finish_reason for chunk in chunks] == [None, "context"]


def test_log_probabilities_carry_the_text_of_their_tokens_in_results_and_chunks(llm: LLM) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "seed": 1, "logprobs": 3}
    result = llm.generate(PROMPT, **fields)
    assert len(result.logprobs) == len(result.tokens)
    for token, entry in zip(result.tokens, result.logprobs, strict=True):
        assert entry.token == token and len(entry.top) == 3
        for item in (entry, *entry.top):
            assert item.text == llm.tokenizer.decode_bytes([item.token]).decode("utf-8", "replace")
            assert item.logprob <= entry.top[0].logprob <= 0
    assert tuple(chunk.logprob for chunk in llm.stream(PROMPT, **fields)) == result.logprobs
    end = min(llm.tokenizer.end_of_generation)
    forced = llm.generate(PROMPT, temperature=0, logprobs=0, logit_bias={end: 1e6})
    assert [(entry.text, entry.top) for entry in forced.logprobs] == [(llm.tokenizer.token_text(end), ())]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_is_over_leaves_memory_without_a_garbage_collection(
    llm: LLM, started: list[Generation], streamed: bool
) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "speculation": None}
    gc.disable()
    try:
        list(llm.stream(PROMPT, **fields)) if streamed else llm.generate(PROMPT, **fields)
        sampler = weakref.ref(started.pop().sampler)
        llm.generate(PROMPT, **fields)  # the engine remembers whom it served last
        assert sampler() is None
    finally:
        gc.enable()


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    assert llm.generate(PROMPT, max_tokens=2).logprobs == ()
    assert next(llm.stream(PROMPT, max_tokens=2)).logprob is None
