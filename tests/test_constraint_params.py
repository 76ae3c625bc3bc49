"""The constraint fields of SamplingParams: one form each, one at a time, and what is refused."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pytest

from tsgg.errors import UsageError
from tsgg.sampling import SamplingParams
from tsgg.sampling.constraint_fields import ANY_OBJECT


@pytest.mark.parametrize("value", [True, {}, "{}", "true", ANY_OBJECT])
def test_an_empty_schema_asks_for_any_object(value: Any) -> None:
    assert SamplingParams(json_schema=value).json_schema == ANY_OBJECT


def test_a_schema_is_the_same_as_mapping_and_as_text() -> None:
    schema = {"type": "object", "properties": {"naïve": {"enum": [1, None, "a"]}}}
    as_mapping, as_text = SamplingParams(json_schema=schema), SamplingParams(json_schema=json.dumps(schema, indent=2))
    assert as_mapping == as_text and hash(as_mapping) == hash(as_text)
    assert json.loads(str(as_mapping.json_schema)) == schema
    read_only = MappingProxyType({"type": "object", "properties": MappingProxyType(schema["properties"])})
    assert SamplingParams(json_schema=read_only) == as_text


def test_one_constraint_at_most() -> None:
    assert SamplingParams().constraint is None
    assert SamplingParams(json_schema=False).constraint is None
    constraint = SamplingParams(choice=["a", "b", "a"]).constraint
    assert constraint is not None and constraint.kind == "choice" and json.loads(constraint.text) == ["a", "b"]
    with pytest.raises(UsageError, match="regex and choice are given; expected one of them"):
        SamplingParams(regex="a", choice=["a"])
    with pytest.raises(UsageError, match="json_schema and regex"):
        SamplingParams.parse({"regex": "a"}, SamplingParams(json_schema=True))
    assert SamplingParams.parse({"regex": "a", "json_schema": None}, SamplingParams(json_schema=True)).regex == "a"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[" * 100_000}, "json_schema is no JSON"),
        ({"json_schema": [1]}, "expected a JSON schema"),
        ({"json_schema": "null"}, "expected a JSON schema"),
        ({"json_schema": {"a": float("nan")}}, "cannot be written as JSON"),
        ({"json_schema": {"a": object()}}, "cannot be written as JSON"),
        ({"regex": ""}, "regex is ''"),
        ({"regex": 3}, "regex is 3"),
        ({"regex": "a\ud800"}, "lone surrogate at character 1"),
        ({"grammar": "  "}, "grammar is '  '"),
        ({"choice": "ab"}, "choice is 'ab'"),
        ({"choice": []}, "choice is empty"),
        ({"choice": ["a", ""]}, "choice holds ''"),
        ({"choice": [1]}, "choice holds 1"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos is set and regex too"),
        ({"guided_json": {}}, "json_schema"),
    ],
)
def test_what_is_wrong_is_told(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams.parse(fields)
