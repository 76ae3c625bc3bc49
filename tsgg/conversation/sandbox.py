"""Jinja for templates that nobody trusts: they can read their arguments and nothing else."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tsgg.errors import ModelFileError, UsageError

LONGEST_TEMPLATE = 1 << 20  # characters: no real template comes near, a hostile one would be compiled for minutes
LONGEST_REPEAT = 1 << 16  # items of `text * n`: real templates indent a little, a hostile one would fill the memory
SEAM = "_seam"  # name of the argument that tells filters which character is one (see guard.py)


def compile_template(source: str) -> jinja2.Template:
    """Raises `ModelFileError` when the template is no valid Jinja."""
    if len(source) > LONGEST_TEMPLATE:
        raise ModelFileError(f"the chat template has {len(source)} characters, expected at most {LONGEST_TEMPLATE}")
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:  # nesting too deep for Python's own parser is no TemplateError
        raise ModelFileError(
            f"the file's chat template is broken: {error}. Use generate() with a plain prompt"
        ) from error


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


@jinja2.pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter that templates are written for: no HTML escapes, keys in their order, the arguments of json.dumps."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    seam = context.get(SEAM)
    return re.sub(f"[^\x00-\x7f{seam or ''}]+", _escape, text) if ensure_ascii else text


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def _raise(message: str) -> NoReturn:
    raise UsageError(f"the chat template refuses this conversation: {message}")
