"""The fields of `SamplingParams` that constrain an answer, checked and brought to one form each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from tsgg.errors import UsageError

Kind = Literal["json_schema", "regex", "grammar", "choice"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "grammar", "choice")
ANY_OBJECT = '{"type":"object"}'


class ConstraintText(NamedTuple):
    """What an answer must look like, as text: equal texts compile to equal grammars."""

    kind: Kind
    text: str
    """A JSON schema, a regular expression, a grammar, or a JSON list of the strings to choose from."""


def json_schema(value: object) -> str | None:
    """A schema as compact JSON text. True and an empty schema ask for any JSON object; None and False for nothing."""
    if value is None or value is False:
        return None
    if value is True:
        return ANY_OBJECT
    expected = "expected a JSON schema (a mapping or its JSON text), or True for any JSON object"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"json_schema is no JSON ({error or 'nested too deeply'}); {expected}") from None
        if value is True:
            return ANY_OBJECT
    if not isinstance(value, Mapping):
        raise UsageError(f"json_schema is {value!r}; {expected}")
    if not value:
        return ANY_OBJECT
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"json_schema cannot be written as JSON ({error or 'nested too deeply'}); {expected}"
        ) from None


def pattern(name: str, value: object) -> str | None:
    """A regular expression or a grammar, as it was given."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name} is {value!r}; expected a text that is not empty, or None")
    _check_unicode(name, value)
    return value


def choice(value: object) -> tuple[str, ...] | None:
    """The strings to choose from, each once."""
    if value is None:
        return None
    expected = "expected a list of strings, one of which is to be the answer"
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UsageError(f"choice is {value!r}; {expected}")
    texts = tuple(dict.fromkeys(value))
    if not texts:
        raise UsageError(f"choice is empty; {expected}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise UsageError(f"choice holds {text!r}; {expected}, none of them empty")
        _check_unicode("choice", text)
    return texts


def one_of(fields: Mapping[Kind, object]) -> ConstraintText | None:
    """The constraint among the checked fields. Raises `UsageError` where there are several."""
    given: list[tuple[Kind, object]] = [(kind, value) for kind, value in fields.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(kind for kind, _ in given)} are given; expected one of them at most")
    for kind, value in given:
        return ConstraintText(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return None


def _plain(value: object) -> object:
    """Mappings that are no dict, and tuples of them: json writes only its own types."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} holds a lone surrogate at character {error.start}: it is not valid Unicode") from None
