"""What reaches a template: tool calls, content that is None, objects of API clients, and which of several templates it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.tiny_vocab import byte_level_metadata
from tsgg.chat import ChatTemplate
from tsgg.errors import UsageError
from tsgg.gguf import Metadata
from tsgg.tokenizer import Tokenizer

CALLS = "{% for m in messages %}{% for c in m.tool_calls %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}"
# How families read the arguments of a call.
OBJECTS = {
    "qwen": CALLS + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}' + END,
    "qwen3": CALLS + "{{ f.arguments if f.arguments is string else f.arguments | tojson }}" + END,
    "coder": CALLS + "{% for key, value in f.arguments | items %}<{{ key }}>{{ value }}</{{ key }}>{% endfor %}" + END,
}
TEXTS = {
    "deepseek": CALLS + "{{ '```json\n' + f.arguments + '\n```' }}" + END,
    "printed": CALLS + "{{ f.name }} {{ f.arguments }}" + END,
}
OBJECT, TEXT = {"city": "Bern", "days": 2}, '{"city": "Bern", "days": 2}'


def called(arguments: object, **more: object) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call], **more}]


@pytest.mark.parametrize("family", [*OBJECTS, *TEXTS])
def test_arguments_of_a_tool_call_reach_a_template_alike_as_mapping_and_as_json_text(family: str) -> None:
    template = ChatTemplate((OBJECTS | TEXTS)[family])
    text = template.render(called(TEXT)).text
    assert template.render(called(OBJECT)).text == text
    assert "<city>Bern</city><days>2</days>" in text if family == "coder" else TEXT in text


def test_arguments_that_are_no_json_are_shown_as_they_were_written() -> None:
    assert "{broken" in ChatTemplate(OBJECTS["qwen3"]).render(called("{broken")).text
    assert ChatTemplate(OBJECTS["qwen3"]).render(called("")).text == "{}"


def test_a_template_that_shows_no_calls_is_given_them_as_they_are() -> None:
    assert ChatTemplate("{{ messages[0].content }}").render(called(OBJECT)).text == "Hi"


def test_content_that_is_none_is_an_empty_text_to_a_template_that_does_not_know_none() -> None:
    shown = "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
    assert ChatTemplate(shown).render(called({}, content=None)).text == "[Hi][]weather"
    knowing = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }} called"
        "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    assert ChatTemplate(knowing).render(called({}, content=None)).text == "[Hi]weather called"
    without = [message | {"content": None} if message["role"] == "assistant" else message for message in called({})]
    del without[1]["content"]
    assert ChatTemplate(shown).render(without).text == "[Hi][]weather"


def test_only_an_assistant_may_say_nothing() -> None:
    for role in ("user", "system", "tool"):
        with pytest.raises(UsageError, match="content is NoneType"):
            ChatTemplate("x").render([{"role": role, "content": None}])
    assert ChatTemplate("x{{ messages[0].content }}").render([{"role": "assistant", "content": None}]).text == "x"


def test_entries_without_a_value_are_not_there() -> None:
    """API clients send them; templates ask `is defined` and `in`."""
    source = "{{ messages[0].tool_calls is defined }} {{ 'name' in messages[0] }} {{ 'tool_calls' in messages[1] }}"
    messages = [{"role": "user", "content": "Hi", "tool_calls": None, "name": None}, {"role": "user", "content": "x"}]
    messages[1]["tool_calls"] = []  # type: ignore[assignment]
    assert ChatTemplate(source).render(messages).text == "False False False"


@dataclass
class Dumped:
    """As clients of the API have messages: they say what they hold."""

    held: dict[str, Any]

    def model_dump(self) -> dict[str, Any]:
        return self.held


def test_messages_of_api_clients_are_read_and_other_objects_are_refused() -> None:
    call = Dumped({"function": Dumped({"name": "weather", "arguments": TEXT})})
    message = Dumped({"role": "assistant", "content": None, "tool_calls": [call], "refusal": None})
    assert TEXT in ChatTemplate(OBJECTS["qwen"]).render([message]).text  # type: ignore[list-item]
    with pytest.raises(UsageError, match="message 0: data holds a object, expected texts"):
        ChatTemplate("x").render([{"role": "user", "content": "", "data": [object()]}])
    with pytest.raises(UsageError, match="tool 0 holds a function"):
        ChatTemplate("x").render([{"role": "user", "content": ""}], tools=[{"call": print and (lambda: 1)}])


# -- several templates -------------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def named(**sources: str) -> ChatTemplate:
    values = {f"tokenizer.chat_template.{name}": source for name, source in sources.items() if name != "default"}
    metadata = {key: value for key, value in byte_level_metadata().items() if key != "tokenizer.chat_template"}
    if "default" in sources:
        values["tokenizer.chat_template"] = sources["default"]
    template = ChatTemplate.from_tokenizer(Tokenizer.from_metadata(Metadata(metadata | values)))
    assert template is not None
    return template


def test_tools_ask_for_the_template_called_tool_use() -> None:
    template = named(default="plain", tool_use="with {{ tools[0].function.name }}", rag="of {{ documents }}")
    assert template.render(USER).text == template.render(USER, tools=[]).text == "plain"
    assert template.render(USER, tools=TOOLS).text == "with weather"
    assert named(default="plain", rag="rag").render(USER, tools=TOOLS).text == "plain"
    assert named(tool_use="tools", rag="rag").render(USER).text == "rag"  # no unnamed one: the first by name


def test_a_template_is_chosen_by_name_and_a_wrong_name_is_told_the_right_ones() -> None:
    template = named(default="plain", tool_use="tools", rag="of {{ documents[0] }}")
    assert template.render(USER, chat_template="rag", documents=["a book"]).text == "of a book"
    assert template.render(USER, tools=TOOLS, chat_template="default").text == "plain"
    assert template.source(TOOLS) == "tools" and template.source() == "plain"
    with pytest.raises(UsageError, match="'rug', but the templates of this file are: default, rag, tool_use"):
        template.render(USER, chat_template="rug")


def test_the_tags_of_reasoning_are_those_of_the_template_in_use() -> None:
    template = named(default="plain", tool_use="<|channel> and more")
    assert template.splitter(template.render(USER)).push("<think>a</think>b") == ("b", "a")
    assert template.splitter(template.render(USER, tools=TOOLS)).push("<|channel>a<channel|>b") == ("b", "a")
