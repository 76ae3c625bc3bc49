"""What may be given as a prompt, and that several are all checked before any is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.tiny_models import TinyLlama, write_tiny
from tsgg import LLM, ContextFullError, TsggError, UsageError
from tsgg.prompts import is_batch, naming, token_ids

IDS = [40, 41, 42]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_tiny(tmp_path_factory.mktemp("prompts") / "tiny.gguf", TinyLlama()), n_ctx=64) as llm:
        yield llm


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


ONE: list[Any] = [
    "()*",
    IDS,
    tuple(IDS),
    range(40, 43),
    np.array(IDS),
    np.array(IDS, np.uint8),
    [np.int32(40), 41, np.array(42)],
]


@pytest.mark.parametrize("prompt", ONE, ids=repr)
def test_a_text_and_ids_in_a_list_tuple_range_or_array_are_one_prompt(prompt: Any) -> None:
    assert not is_batch(prompt)
    found = token_ids(prompt, encode)
    assert found == IDS and all(type(item) is int for item in found)


@pytest.mark.parametrize("several", [ONE, tuple(ONE), [IDS], ["a"], ("a", "b"), [np.array(IDS)], [[]]], ids=repr)
def test_a_list_or_tuple_with_a_text_or_ids_in_it_is_several_prompts(several: Any) -> None:
    assert is_batch(several)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "NoneType"),
        (3, "got int"),
        (b"text", "bytes"),
        ({"prompt": "a"}, "dict"),
        ([1, 2.5], r"2\.5 at place 1"),
        ([True], "True at place 0"),
        ([np.True_], "place 0"),
        (np.array([1.0, 2.0]), "array of float64"),
        (np.array([True]), "array of bool"),
        (np.zeros((2, 3), np.int32), r"shape \(2, 3\).*list\(array\)"),
    ],
)
def test_anything_else_is_refused_in_words_that_say_what_a_prompt_is(prompt: Any, words: str) -> None:
    assert not is_batch(prompt)
    with pytest.raises(UsageError, match=f"a prompt is a text or a list of token ids.*{words}"):
        token_ids(prompt, encode)


def test_an_error_keeps_its_class_where_it_gets_the_index_of_its_prompt() -> None:
    with pytest.raises(ContextFullError, match=r"^prompt 2: too long$"), naming(2):
        raise ContextFullError("too long")
    with pytest.raises(TsggError, match=r"^as it is$"), naming(None):
        raise TsggError("as it is")


def test_every_kind_of_prompt_generates_the_same(llm: LLM) -> None:
    ids = llm.tokenize("the hell")
    same = ["the hell", ids, tuple(ids), np.array(ids), [np.int64(item) for item in ids]]
    alone = [llm.generate(prompt, max_tokens=5, temperature=0).tokens for prompt in same]
    assert len(set(alone)) == 1
    assert [result.tokens for result in llm.generate(same, max_tokens=5, temperature=0)] == alone
    assert [result.tokens for result in llm.generate(tuple(same), max_tokens=5, temperature=0)] == alone


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        ("", UsageError, "empty"),
        ([], UsageError, "empty"),
        ([10**6], UsageError, "token ids"),
        ([-1], UsageError, "token ids"),
        (2.5, UsageError, r"got float"),
        ([1, "a"], UsageError, "'a' at place 1"),
        ("\ud800", UsageError, "surrogate"),
        ([40] * 65, ContextFullError, "n_ctx"),
    ],
    ids=repr,
)
def test_a_bad_prompt_in_a_list_is_named_by_its_index_and_none_is_computed(
    llm: LLM, bad: Any, kind: type[TsggError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a prompt was submitted")

    monkeypatch.setattr(llm.engine, "submit", refuse)
    with pytest.raises(kind, match=f"prompt 2: .*{words}"):
        llm.generate(["the", IDS, bad, "hell"], max_tokens=2)


def test_wrong_parameters_of_a_list_are_not_blamed_on_a_prompt(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"^logit_bias names token"):
        llm.generate(["the", "hell"], logit_bias={10**6: 1.0})


def test_a_stream_of_several_prompts_is_refused_with_what_to_do(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"one prompt.*a stream for each.*generate\(\)"):
        llm.stream(["the", "hell"])
