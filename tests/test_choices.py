"""Several answers to one prompt: which they are, how they run, and how a caller finds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat_models import write_chat_model
from tsgg import LLM, TsggError

PROMPT = "the hell the hell the hell the"
LONG = PROMPT * 12
MESSAGES = [{"role": "user", "content": "the hell"}]
FIELDS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("choices") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, n_ctx=512, n_seq=3) as llm:
        yield llm


def test_answer_i_is_the_one_that_seed_plus_i_gives_alone(llm: LLM) -> None:
    result = llm.generate(PROMPT, n=5, seed=30, **FIELDS)  # more than slots: the last ones wait
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3, 4]
    assert [choice.seed for choice in result.choices] == [30, 31, 32, 33, 34]
    alone = [llm.generate(PROMPT, seed=30 + i, **FIELDS) for i in range(5)]
    assert [choice.tokens for choice in result.choices] == [answer.tokens for answer in alone]
    assert len({answer.tokens for answer in alone}) > 1
    assert result.choices[0] is result and result.text == result.choices[0].text
    assert llm.last is not None and llm.last.choices[0].seed == 34


def test_one_answer_is_its_own_only_choice(llm: LLM) -> None:
    result = llm.generate(PROMPT, **FIELDS)
    assert result.choices == (result,) and result.index == 0


def test_seeds_go_on_at_zero_behind_the_greatest(llm: LLM) -> None:
    result = llm.generate(PROMPT, n=2, seed=2**64 - 1, **FIELDS)
    assert [choice.seed for choice in result.choices] == [2**64 - 1, 0]


def test_a_seed_that_is_chosen_is_reported_and_gives_the_same_answers_again(llm: LLM) -> None:
    first = llm.generate(PROMPT, n=3, **FIELDS)
    again = llm.generate(PROMPT, n=3, seed=first.seed, **FIELDS)
    assert [choice.tokens for choice in again.choices] == [choice.tokens for choice in first.choices]


def test_the_prompt_of_all_answers_is_computed_once(llm: LLM) -> None:
    llm.forget()
    result = llm.generate(LONG, n=3, seed=1, **FIELDS)
    size = len(llm.tokenize(LONG))
    assert [choice.usage.cached_tokens for choice in result.choices] == [0, size - 1, size - 1]
    assert all(choice.usage.prompt_tokens == size for choice in result.choices)


def test_answers_take_turns_where_there_is_one_slot(path: Path, llm: LLM) -> None:
    with LLM(path, n_ctx=512, n_seq=1) as narrow:
        result = narrow.generate(LONG, n=3, seed=1, **FIELDS)
    size = len(llm.tokenize(LONG))
    assert [choice.usage.cached_tokens for choice in result.choices] == [0, size - 1, size - 1]
    expected = llm.generate(LONG, n=3, seed=1, **FIELDS)
    assert [choice.tokens for choice in result.choices] == [choice.tokens for choice in expected.choices]


def test_each_prompt_of_a_list_has_its_answers(llm: LLM) -> None:
    results = llm.generate([PROMPT, "a"], n=2, seed=4, **FIELDS)
    assert [[choice.tokens for choice in result.choices] for result in results] == [
        [llm.generate(prompt, seed=seed, **FIELDS).tokens for seed in (4, 5)] for prompt in (PROMPT, "a")
    ]


def test_streamed_answers_are_told_apart_by_index_and_each_ends_once(llm: LLM) -> None:
    expected = llm.generate(PROMPT, n=4, seed=9, **FIELDS)
    chunks = list(llm.stream(PROMPT, n=4, seed=9, **FIELDS))
    for choice in expected.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert tuple(chunk.token for chunk in own) == choice.tokens
        assert "".join(chunk.text for chunk in own) == choice.text
        assert [chunk.finish_reason for chunk in own] == [None] * 11 + ["length"]
    assert llm.last is not None
    assert [choice.tokens for choice in llm.last.choices] == [choice.tokens for choice in expected.choices]


def test_answers_of_a_turn_are_found_where_users_of_chat_clients_look(llm: LLM) -> None:
    turn = llm.chat(MESSAGES, n=2, seed=2, **FIELDS)
    for i, choice in enumerate(turn.choices):
        alone = llm.chat(MESSAGES, seed=2 + i, **FIELDS)
        assert (choice.index, choice.message.role, choice.finish_reason) == (i, "assistant", "length")
        assert choice.message.content == choice.content == alone.content
        assert choice.message.tool_calls is None and choice.message.reasoning_content is None
        assert choice.usage.completion_tokens == 12


def test_a_streamed_turn_keeps_its_answers_apart(llm: LLM) -> None:
    turn = llm.chat(MESSAGES, n=3, seed=2, **FIELDS)
    chunks = list(llm.chat(MESSAGES, n=3, seed=2, stream=True, **FIELDS))
    for choice in turn.choices:
        assert "".join(chunk.content for chunk in chunks if chunk.index == choice.index) == choice.content
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 3


def test_leaving_a_stream_ends_all_its_answers(llm: LLM) -> None:
    stream = llm.stream(PROMPT, n=3, seed=1, max_tokens=400, ignore_eos=True)
    taken = [next(stream) for _ in range(5)]
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.call(lambda: list(llm.engine.scheduler.requests())) == []
    assert llm.last is not None
    assert [choice.finish_reason for choice in llm.last.choices] == ["cancelled"] * 3
    assert sum(len(choice.tokens) for choice in llm.last.choices) == len(taken)


@pytest.mark.parametrize("streamed", [False, True])
def test_where_one_answer_fails_all_end_with_its_error(llm: LLM, streamed: bool) -> None:
    calls = 0

    def once(ids: Any, logits: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise ValueError("the eighth row")
        return np.asarray(logits)

    fields = {"max_tokens": 200, "ignore_eos": True, "n": 3, "logits_processors": once}
    with pytest.raises(TsggError, match="the eighth row"):
        list(llm.stream(PROMPT, **fields)) if streamed else llm.generate(PROMPT, **fields)
    assert llm.engine.call(lambda: list(llm.engine.scheduler.requests())) == []
    assert llm.generate(PROMPT, **FIELDS).tokens
