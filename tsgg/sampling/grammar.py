"""What an answer must look like, as llguidance reads it: a JSON schema, regular expression, grammar or choice becomes a grammar."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tsgg.errors import UsageError
from tsgg.sampling.constraint_fields import ConstraintText

# JSON as json.dumps writes it, on one line: models know it well, the separators are forced tokens, and an answer cannot go on
# for ever with spaces. A schema's own "x-guidance" comes before this.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_SHOWN = 600  # characters of an error of llguidance


def source(constraint: ConstraintText) -> str:
    """The grammar for `LLMatcher`. Raises `UsageError` for one that cannot be read; most faults show when it is compiled."""
    kind, text = constraint
    try:
        if kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(text, JSON_LAYOUT))  # type: ignore[arg-type]
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        if kind == "choice":
            return str(LLMatcher.grammar_from_regex("|".join(map(literal, json.loads(text)))))
        return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
    except Exception as error:  # the converter of GBNF raises bare exceptions
        raise UsageError(f"{kind} cannot be read: {shown(str(error))}") from None


def literal(text: str) -> str:
    """A regular expression, in the syntax of Rust's regex crate, that only `text` matches."""
    return re.sub(r"[^0-9A-Za-z]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def holding(pattern: str, part: str) -> str:
    """The grammar of the texts that match a regular expression and hold `part`."""
    return str(
        LLMatcher.grammar_from_lark(f"start: T\nT: /{regex_to_lark(pattern, '')}/ & /(?s:.*){literal(part)}(?s:.*)/")
    )


def shown(error: str) -> str:
    """An error of llguidance on one line."""
    line = " ".join(error.split())
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]} ..."
