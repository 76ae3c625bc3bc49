"""response_format as OpenAI's clients send it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chat_models import write_chat_model
from tsgg import LLM
from tsgg.errors import UsageError
from tsgg.sampling.response_format import fields_of

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
ASKED = [{"role": "user", "content": "hell"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_chat_model(tmp_path_factory.mktemp("format") / "chat.gguf"), n_ctx=256) as llm:
        yield llm


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (None, {}),
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"json_schema": True}),
        ({"type": "json_object", "schema": SCHEMA}, {"json_schema": SCHEMA}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            {"json_schema": SCHEMA},
        ),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": None}, {"json_schema": SCHEMA}),
    ],
)
def test_a_format_says_which_schema(given: Any, fields: Any) -> None:
    assert fields_of(given) == fields


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("json", "response_format is 'json'"),
        ({}, "type None"),
        ({"type": "xml"}, "type 'xml'"),
        ({"type": "json_schema"}, "has no schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "has no schema"),
        ({"type": "json_schema", "json_schema": []}, r"json_schema is \[\]"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "expected a JSON schema as an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "strict is 'yes'"),
        ({"type": "json_object", "schema": 3}, "response_format.schema is 3"),
    ],
)
def test_a_format_that_cannot_be_read_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fields_of(given)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answers_in_its_format(llm: LLM, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if stream:
        text = "".join(chunk.content for chunk in llm.chat(ASKED, stream=True, response_format=wanted))
    else:
        text = llm.chat(ASKED, response_format=wanted).content
    assert json.loads(text) in ({"a": 1}, {"a": 2})


def test_a_format_and_a_schema_are_one_too_many(llm: LLM) -> None:
    with pytest.raises(UsageError, match="json_schema is given and response_format too"):
        llm.chat(ASKED, json_schema=True, response_format={"type": "json_object"})
    with pytest.raises(UsageError, match="json_schema and regex are given"):
        llm.chat(ASKED, regex="a", response_format={"type": "json_object"})
