"""Chat templates: the file's own Jinja text, in a sandbox, and the split of an answer into reasoning and content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
OPEN, CLOSE = "<think>", "</think>"


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
    """Splits streamed text at <think> tags. A tag that may still be coming is held back until it is decided.

    `prompt` is the rendered prompt: a template that ends with an open tag has begun the reasoning already.
    """

    def __init__(self, prompt: str = "") -> None:
        tail = prompt.rstrip()
        self._thinking = tail.endswith(OPEN)
        self._started = self._thinking  # only an answer that begins with the tag has reasoning
        self._held = ""
        self._strip = self._thinking  # line breaks next to a tag belong to it

    def push(self, text: str) -> tuple[str, str]:
        """What became decided: (content, reasoning)."""
        self._held += text
        content = reasoning = ""
        while self._held:
            if self._strip:
                self._held = self._held.lstrip("\n")
                if not self._held:
                    break
                self._strip = False
            if not self._thinking and self._started:
                content, self._held = content + self._held, ""
                break
            if not self._started:
                stripped = self._held.lstrip()
                if stripped.startswith(OPEN):
                    self._held = stripped[len(OPEN) :]
                    self._thinking = self._started = self._strip = True
                elif OPEN.startswith(stripped):
                    break  # white space, or the beginning of a tag
                else:
                    self._started = True
                continue
            at = self._held.find(CLOSE)
            if at >= 0:
                reasoning += self._held[:at].rstrip("\n")
                self._held = self._held[at + len(CLOSE) :]
                self._thinking, self._strip = False, True
                continue
            keep = _possible_end(self._held)
            reasoning, self._held = (
                reasoning + self._held[: len(self._held) - keep],
                self._held[len(self._held) - keep :],
            )
            break
        return content, reasoning

    def flush(self) -> tuple[str, str]:
        """What is still held back, at the end."""
        held, self._held = self._held, ""
        return ("", held) if self._thinking else (held, "")


def _possible_end(text: str) -> int:
    """Characters at the end that may turn out to be line breaks before a closing tag, or part of the tag."""
    for size in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if CLOSE.startswith(text[-size:]):
            return size + len(text[:-size]) - len(text[:-size].rstrip("\n"))
    return len(text) - len(text.rstrip("\n"))


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
