"""Messages and tools, checked, in the shape that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tsgg.errors import UsageError

Arguments = Literal["object", "text", "any"]
"""How a template reads the arguments of a tool call: as a mapping, as JSON text, or both ways."""


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of plain data: texts, numbers, lists and dicts. Raises `UsageError` for the wrong shape.

    Content is a text, or None where an assistant says nothing. Entries that are None or empty are left out, as if they had
    not been given: templates ask whether they are there.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError('messages are a list like [{"role": "user", "content": "Hello"}], with one entry or more')
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Any) -> dict[str, Any]:
    message = _dumped(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(f"message {index} is {message!r}, expected a mapping with the keys role and content")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        parts = [_dumped(part) for part in content]
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            raise UsageError(
                f"message {index}: content parts are texts like {{'type': 'text', 'text': ...}}, nothing else"
            )
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        raise UsageError(
            f"message {index}: content is {type(content).__name__}, expected a text or a list of text parts"
        )
    found = {key: _plain(f"message {index}: {key}", value) for key, value in message.items() if key != "content"}
    return {key: value for key, value in found.items() if value is not None and value != []} | {"content": content}


def read_tools(tools: Any) -> list[Any]:
    """Tools of plain data. Raises `UsageError` for the wrong shape."""
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise UsageError(f"tools is {type(tools).__name__}, expected a list of mappings (JSON schemas of functions)")
    found = [_plain(f"tool {index}", tool) for index, tool in enumerate(tools)]
    for index, tool in enumerate(found):
        if not isinstance(tool, dict):
            raise UsageError(
                f"tool {index} is {type(tool).__name__}, expected a mapping (the JSON schema of a function)"
            )
    return found


def adapt(messages: list[dict[str, Any]], arguments: Arguments, none: bool) -> list[dict[str, Any]]:
    """Messages as a template expects them: `arguments` of tool calls, and whether it knows content that is None."""
    return [
        message
        | ({"content": ""} if message["content"] is None and not none else {})
        | ({"tool_calls": [_call(call, arguments) for call in message["tool_calls"]]} if _calls(message) else {})
        for message in messages
    ]


def asks_adapting(messages: list[dict[str, Any]]) -> bool:
    """Whether `adapt` has anything to choose."""
    return any(message["content"] is None or _calls(message) for message in messages)


def _calls(message: dict[str, Any]) -> bool:
    return isinstance(message.get("tool_calls"), list)


def _call(call: Any, arguments: Arguments) -> Any:
    """A tool call; its function may stand in it or, as older templates have it, be it."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"], arguments)}
    given = call.get("arguments")
    if isinstance(given, str) and arguments == "object":
        try:
            read = json.loads(given or "{}")
        except ValueError:  # a model may write what is no JSON: the template is shown what was written
            return call
        return call | {"arguments": read} if isinstance(read, dict) else call
    if isinstance(given, dict) and arguments == "text":
        return call | {"arguments": json.dumps(given, ensure_ascii=False)}
    return call


def _dumped(value: Any) -> Any:
    """Objects of API clients say what they hold."""
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) else value


def _plain(where: str, value: Any) -> Any:
    """Data that holds nothing a template could call, and no text that is overlooked."""
    value = _dumped(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(where, item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(where, item) for item in value]
    raise UsageError(f"{where} holds a {type(value).__name__}, expected texts, numbers, lists and mappings")
