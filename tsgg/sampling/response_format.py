"""`response_format` of chat requests, as OpenAI's clients send it, turned into fields of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from tsgg.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class SchemaFields(TypedDict):
    """What a response format sets."""

    json_schema: NotRequired[Mapping[str, Any] | bool]


EXPECTED = (
    'expected {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
)


def fields_of(response_format: Mapping[str, Any] | None) -> SchemaFields:
    """The sampling parameters that a response format asks for; none for None and for text.

    A schema may stand in "json_schema" (chat completions), beside "type" (the responses API), and in a "json_object"
    (llama.cpp). It holds whatever "strict" says: a constrained answer is always valid. Raises UsageError.
    """
    if response_format is None:
        return {}
    if not isinstance(response_format, Mapping):
        raise UsageError(f"response_format is {response_format!r}; {EXPECTED}")
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = response_format.get("schema")
        return {"json_schema": True if schema is None else _schema(schema, "response_format.schema")}
    if kind != "json_schema":
        raise UsageError(f"response_format has type {kind!r}; {EXPECTED}")
    inner = response_format.get("json_schema", response_format)
    if not isinstance(inner, Mapping):
        raise UsageError(f"response_format.json_schema is {inner!r}; {EXPECTED}")
    if inner.get("schema") is None:
        raise UsageError(f"response_format.json_schema has no schema; {EXPECTED}")
    if not isinstance(inner.get("strict"), (bool, type(None))):
        raise UsageError(f"response_format.json_schema.strict is {inner['strict']!r}; expected true, false or nothing")
    return {"json_schema": _schema(inner["schema"], "response_format.json_schema.schema")}


def _schema(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} is {value!r}; expected a JSON schema as an object")
    return value
