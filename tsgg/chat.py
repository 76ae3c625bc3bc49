"""Chat templates: the file's own Jinja texts, and the prompts that they make of conversations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from tsgg.conversation.guard import Marks, changed, texts_of, unused_character
from tsgg.conversation.messages import Arguments, adapt, asks_adapting, read_messages, read_tools
from tsgg.conversation.reasoning import CHANNEL, THINK, ReasoningSplitter, Tags
from tsgg.conversation.sandbox import SEAM, compile_template
from tsgg.errors import ModelFileError, UsageError
from tsgg.tokenizer import Tokenizer

__all__ = ["CHANNEL", "THINK", "ChatPrompt", "ChatTemplate", "ReasoningSplitter"]

DEFAULT, TOOL_USE = "default", "tool_use"  # names of a file's templates


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. `seamed` holds a `seam` where a message has a control token's text: see guard.py.

    `begun` is the assistant's message that the answer goes on with, where the conversation ends with one.
    """

    seamed: str
    seam: str = ""
    tags: Tags = THINK
    begun: str = ""

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.seamed.replace(self.seam, "") if self.seam else self.seamed


class ChatTemplate:
    """The templates of a file. Made from untrusted text: they can read their arguments and nothing else.

    One is compiled at its first use: a model whose template is broken still generates from plain prompts.
    """

    def __init__(
        self, sources: str | Mapping[str, str], bos: str = "", eos: str = "", marks: Collection[str] = ()
    ) -> None:
        """`sources`: the template, or several by name. `marks`: texts of control tokens, which no message can bring in."""
        named = {DEFAULT: sources} if isinstance(sources, str) else sources
        self._templates = {name: _Template(source) for name, source in named.items()}
        self._special_texts = {"bos_token": bos, "eos_token": eos}
        self._marks = Marks(marks)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The file's templates, or None when it has none."""
        sources = tokenizer.chat_templates
        if not sources:
            return None
        bos = "" if tokenizer.bos is None else tokenizer.token_text(tokenizer.bos)
        eos = "" if tokenizer.eos is None else tokenizer.token_text(tokenizer.eos)
        return cls(sources, bos, eos, tokenizer.vocabulary.marks)

    def source(self, tools: object = None, name: str | None = None) -> str:
        """The text of the template that serves a conversation with these tools."""
        return self._choose(tools, name).source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | None = None,
        enable_thinking: bool | None = None,
        chat_template: str | None = None,
        **keywords: Any,
    ) -> ChatPrompt:
        """The prompt for a conversation; keywords reach the template as they are.

        A conversation that ends with an assistant's text is continued there: the prompt ends with that text, unless
        `continue_final_message` is False.

        `chat_template` names one of the file's templates; without it tools ask for the one called tool_use, where there is
        one. Arguments of tool calls may be mappings or JSON texts: the template gets what it reads.

        Raises `UsageError` for messages or tools of the wrong shape, and for what the template itself refuses, in its
        words; `ModelFileError` for a template that is broken or tries to leave its sandbox.
        """
        template = self._choose(tools, chat_template)
        read = read_messages(messages)
        if asks_adapting(read):
            read = adapt(read, template.arguments, template.knows_none)
        given: dict[str, Any] = {"tools": None if tools is None else read_tools(tools), **keywords}
        if enable_thinking is not None:
            given["enable_thinking"] = enable_thinking
        given["messages"] = read
        fixed = {"add_generation_prompt": add_generation_prompt, **self._special_texts}
        if _continues(read[-1], add_generation_prompt, continue_final_message):
            return self._continued(template, given, fixed | {"add_generation_prompt": False})
        seamed, seam = self._guarded(template, given, fixed)
        return ChatPrompt(seamed, seam, template.tags)

    def splitter(self, prompt: ChatPrompt) -> ReasoningSplitter:
        """Splits the answer to a prompt, by the tags that its template knows."""
        text, begun = prompt.text, prompt.begun
        if begun:
            text = text.removesuffix(begun.lstrip()) if text.endswith(begun.lstrip()) else ""
        return ReasoningSplitter(text, prompt.tags, begun)

    def encode(self, tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
        """Token ids of a prompt; the BOS of the template is not doubled by the tokenizer's own."""
        bos = self._special_texts["bos_token"]
        own = bool(bos) and prompt.seamed.startswith(bos)
        # Told, not asked: the file's rule would also end the prompt (EOS).
        return tokenizer.encode(prompt.seamed, add_bos=tokenizer.add_bos and not own, seam=prompt.seam)

    def _choose(self, tools: object, name: str | None) -> _Template:
        if name is None:
            name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
            if name not in self._templates:
                name = next(iter(self._templates))
        if name not in self._templates:
            raise UsageError(
                f"chat_template is {name!r}, but the templates of this file are: {', '.join(self._templates)}"
            )
        return self._templates[name]

    def _continued(self, template: _Template, given: dict[str, Any], fixed: dict[str, Any]) -> ChatPrompt:
        """The prompt up to the end of the last message, wherever the template has put it."""
        *before, last = given["messages"]
        begun = last["content"] or ""
        end = unused_character({*texts_of(given), template.source})
        given = given | {"messages": [*before, last | {"content": begun + end}]}
        seamed, seam = self._guarded(template, given, fixed)
        prompt, found, _ = seamed.rpartition(end)
        if not found:
            raise UsageError("the chat template does not show the last message to its end: it cannot be continued")
        return ChatPrompt(prompt, seam, template.tags, begun)

    def _guarded(self, template: _Template, given: dict[str, Any], fixed: dict[str, Any]) -> tuple[str, str]:
        """The rendered text, in which marks are the template's alone, and the seam in it: see guard.py."""
        marks, texts = self._marks, set(texts_of(given))
        if not marks.may_come_of(texts):
            return template.render(given | fixed), ""
        seam = unused_character({*texts, template.source})
        fixed = fixed | {SEAM: seam}
        text = template.render(changed(given, lambda text: marks.with_seams(text, seam)) | fixed)
        other = template.render(changed(given, lambda text: marks.with_all_seams(text, seam)) | fixed)
        return text if marks.of(text) == marks.of(other) else other, seam


def _continues(last: dict[str, Any], asked: bool, told: bool | None) -> bool:
    """Whether the answer goes on with the last message. Raises `UsageError` where it cannot."""
    may = last["role"] == "assistant" and "tool_calls" not in last
    if told and not may:
        raise UsageError("continue_final_message: the last message is not the text of an assistant")
    return may and asked if told is None else told


class _Template:
    """One template: compiled, and asked what it expects, when that is first needed."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tags = CHANNEL if CHANNEL.open in source else THINK

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return compile_template(self.source)

    def render(self, arguments: Mapping[str, Any]) -> str:
        try:
            return self._compiled.render(arguments)
        except SecurityError as error:
            raise ModelFileError(f"the file's chat template tries to leave its sandbox: {error}") from error
        except (UsageError, ModelFileError):
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise UsageError(f"the chat template refuses this conversation: {error}") from error

    @cached_property
    def arguments(self) -> Arguments:
        """How it reads the arguments of a tool call, by what it makes of some."""
        shown = self._try({"probed": "value"})
        if "probed" in shown and "value" in shown and "{'probed" not in shown:  # not as Python shows a dict
            return "object"
        return "text" if '{"probed": "value"}' in self._try('{"probed": "value"}') else "any"

    @cached_property
    def knows_none(self) -> bool:
        """Whether content that is None is no text to it."""
        return "called" in (shown := self._try({"probed": "value"}, None)) and "None" not in shown

    def _try(self, arguments: object, content: str | None = "") -> str:
        """A conversation with a tool call; empty where the template refuses it."""
        call = {"id": "call00001", "type": "function", "function": {"name": "called", "arguments": arguments}}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        properties = {"other": {"type": "string", "description": "words"}}
        parameters = {"type": "object", "properties": properties, "required": ["other"]}
        tool = {"name": "called", "description": "words", "parameters": parameters}
        try:
            return self.render(
                {
                    "messages": [{"role": "user", "content": "words"}, answer],
                    "tools": [{"type": "function", "function": tool}],
                    "add_generation_prompt": False,
                    "bos_token": "",
                    "eos_token": "",
                }
            )
        except UsageError:
            return ""
