"""Chat templates: the file's own Jinja text, in a sandbox, and the split of an answer into reasoning and content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tsgg.errors import ModelFileError, UsageError
from tsgg.tokenizer import Tokenizer

LONGEST_TEMPLATE = 1 << 20  # characters: no real template comes near, a hostile one would be compiled for minutes
LONGEST_REPEAT = 1 << 16  # items of `text * n`: real templates indent a little, a hostile one would fill the memory


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks reasoning in an answer. Line breaks next to a tag belong to it."""

    open: str
    close: str
    header: str = ""  # what may stand behind `open` and belongs to it
    anywhere: bool = False  # tags are tokens that no answer contains: reasoning may come again, a stray tag is dropped


THINK = Tags("<think>", "</think>")  # only where an answer begins with it
CHANNEL = Tags("<|channel>", "<channel|>", "thought", anywhere=True)  # Gemma 4


class ChatTemplate:
    """A template. Made from untrusted text: it can read its arguments and nothing else.

    It is compiled at the first use: a model whose template is broken still generates from plain prompts.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self._source, self._bos, self._eos = source, bos, eos

    @cached_property
    def _template(self) -> jinja2.Template:
        """Raises `ModelFileError` when the template is no valid Jinja."""
        size = len(self._source)
        if size > LONGEST_TEMPLATE:
            raise ModelFileError(f"the chat template has {size} characters, expected at most {LONGEST_TEMPLATE}")
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self._source)
        except Exception as error:  # nesting too deep for Python's own parser is no TemplateError
            raise ModelFileError(
                f"the file's chat template is broken: {error}. Use generate() with a plain prompt"
            ) from error

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The file's template, or None when it has none."""
        if not tokenizer.chat_template:
            return None
        bos = "" if tokenizer.bos is None else tokenizer.token_text(tokenizer.bos)
        eos = "" if tokenizer.eos is None else tokenizer.token_text(tokenizer.eos)
        return cls(tokenizer.chat_template, bos, eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **keywords: Any,
    ) -> str:
        """The prompt's text for a conversation; keywords reach the template as they are.

        Raises `UsageError` for messages or tools of the wrong shape, and for what the template itself refuses, in its
        words; `ModelFileError` for a template that is broken or tries to leave its sandbox.
        """
        template = self._template
        arguments: dict[str, Any] = dict(keywords)
        if enable_thinking is not None:
            arguments["enable_thinking"] = enable_thinking
        try:
            return template.render(
                messages=[_message(i, message) for i, message in enumerate(_listed(messages))],
                tools=None if tools is None else _tools(tools),
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos,
                eos_token=self._eos,
                **arguments,
            )
        except SecurityError as error:
            raise ModelFileError(f"the file's chat template tries to leave its sandbox: {error}") from error
        except UsageError:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise UsageError(f"the chat template refuses this conversation: {error}") from error

    def splitter(self, prompt: str) -> ReasoningSplitter:
        """Splits the answer to a rendered prompt, by the tags that the template knows."""
        return ReasoningSplitter(prompt, CHANNEL if CHANNEL.open in self._source else THINK)

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Token ids of a rendered prompt; the BOS of the template is not doubled by the tokenizer's own."""
        if self._bos and text.startswith(self._bos):
            return tokenizer.encode(text, add_bos=False)
        return tokenizer.encode(
            text, tokenizer.add_bos
        )  # told, not asked: the file's rule would also end the prompt (EOS)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses arithmetic that builds huge values; Jinja would do it while compiling already, to fold constants."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        for value, times in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)) and isinstance(times, int) and len(value) * times > LONGEST_REPEAT:
                raise SecurityError(f"a repetition of {len(value) * times} items is not allowed")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training masks; here its body is rendered and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ReasoningSplitter:
    """Splits streamed text at reasoning tags. A tag that may still be coming is held back until it is decided.

    `prompt` is the rendered prompt: a template that ends with an open tag has begun the reasoning already.
    """

    def __init__(self, prompt: str = "", tags: Tags = THINK) -> None:
        self._tags = tags
        self._thinking = prompt.rstrip().endswith((tags.open, tags.open + tags.header))
        self._started = self._thinking  # something has been said
        # What is still expected behind an open tag.
        self._header = tags.header if prompt.rstrip().endswith(tags.open) else ""
        self._strip = self._thinking
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What became decided: (content, reasoning)."""
        self._held += text
        content: list[str] = []
        reasoning: list[str] = []
        while self._held and self._skip():
            advance = self._think(reasoning) if self._thinking else self._answer(content)
            if not advance:
                break
        return "".join(content), "".join(reasoning)

    def flush(self) -> tuple[str, str]:
        """What is still held back, at the end."""
        held, self._held = self._held, ""
        if self._header.startswith(held):
            held = ""  # an answer that ends within a tag's header
        return ("", held) if self._thinking else (held, "")

    def _skip(self) -> bool:
        """Drops what belongs to a tag; False while more of it may come."""
        if self._header:
            if self._header.startswith(self._held) and self._held != self._header:
                return False
            self._held = self._held.removeprefix(self._header)
            self._header = ""
        if self._strip:
            self._held = self._held.lstrip("\n")
            self._strip = not self._held
        return bool(self._held)

    def _think(self, reasoning: list[str]) -> bool:
        """Takes reasoning up to its end; True when that was found."""
        at = self._held.find(self._tags.close)
        if at >= 0:
            reasoning.append(self._held[:at].rstrip("\n"))
            self._cross(at + len(self._tags.close), thinking=False)
            return True
        size = _possible_end(self._held, self._tags.close)
        keep = len(self._held) - size
        breaks = keep - len(self._held[:keep].rstrip("\n"))
        self._release(reasoning, keep - breaks)
        return False

    def _answer(self, content: list[str]) -> bool:
        """Takes content up to a tag; True when one was found."""
        tags = self._tags
        if self._started and not tags.anywhere:
            self._release(content, len(self._held))
            return False
        found = {self._held.find(tag): tag for tag in (tags.open, tags.close) if tag in self._held}
        if not tags.anywhere:  # an answer that begins with other text has no reasoning
            begins = self._held.lstrip()
            found = {at: tag for at, tag in found.items() if tag == tags.open and begins.startswith(tag)}
            if not found and not tags.open.startswith(begins):
                self._started = True
                return True
        if found:
            at = min(found)
            if self._started or self._held[:at].strip():
                content.append(self._held[:at])
                self._started = True
            self._cross(at + len(found[at]), thinking=found[at] == tags.open)
            return True
        if tags.anywhere:
            size = len(self._held) - max(_possible_end(self._held, tag) for tag in (tags.open, tags.close))
            if self._started or self._held[:size].strip():
                self._release(content, size)
        return False

    def _cross(self, size: int, thinking: bool) -> None:
        """Goes on behind a tag."""
        self._held = self._held[size:]
        self._thinking, self._strip = thinking, True
        self._started = self._started or not self._tags.anywhere
        self._header = self._tags.header if thinking else ""

    def _release(self, into: list[str], size: int) -> None:
        into.append(self._held[:size])
        self._held = self._held[size:]
        self._started = True


def _possible_end(text: str, tag: str) -> int:
    """Characters at the end that may turn out to be the beginning of a tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)


def _listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError('messages are a list like [{"role": "user", "content": "Hello"}], with one entry or more')
    return messages


def _message(index: int, message: Any) -> dict[str, Any]:
    """A message as templates read it. Content is a text, or a list of text parts, which are joined."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(f"message {index} is {message!r}, expected a mapping with the keys role and content")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise UsageError(
                f"message {index}: content parts are texts like {{'type': 'text', 'text': ...}}, nothing else"
            )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise UsageError(
            f"message {index}: content is {type(content).__name__}, expected a text or a list of text parts"
        )
    return {**message, "content": content}


def _tools(tools: Any) -> list[Any]:
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise UsageError(f"tools is {type(tools).__name__}, expected a list of mappings (JSON schemas of functions)")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise UsageError(
                f"tool {index} is {type(tool).__name__}, expected a mapping (the JSON schema of a function)"
            )
    return list(tools)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter that templates are written for: no HTML escapes, keys in their order, the arguments of json.dumps."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise UsageError(f"the chat template refuses this conversation: {message}")
