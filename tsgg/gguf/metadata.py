"""Metadata of a GGUF file: a read-only mapping with typed getters that say what is wrong with a value.

Values are Python int, float, bool and str; arrays of numbers and bools are read-only numpy arrays, arrays of strings
are list[str]. Text that is not UTF-8 is decoded with "surrogateescape": `text.encode("utf-8", "surrogateescape")`
gives the file's bytes back, and two different byte strings never become the same token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import ModelFileError

_D = TypeVar("_D")


class _Required:
    """Type of the marker for "no default: the key must be there"."""


_REQUIRED: Final = _Required()


class Metadata(Mapping[str, object]):
    """The key-value section of a GGUF file.

    Every getter takes a key and a default. Without a default a missing key raises ModelFileError; a value of another
    type always does, naming the key, the type found and the type expected.
    """

    def __init__(self, values: Mapping[str, object], source: str = "metadata") -> None:
        """`source` (a file name) opens every error message."""
        self._values = dict(values)
        self._source = source

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metadata({self._source}, {len(self)} keys)"

    @property
    def architecture(self) -> str:
        """`general.architecture`: printable, never empty. Raises ModelFileError."""
        name = self.get_str("general.architecture")
        if not name or not name.isprintable():
            raise ModelFileError(
                f"{self._source}: general.architecture is {name[:64]!r}, expected a name such as 'llama'. "
                "The file is damaged: download or convert it again."
            )
        return name

    @overload
    def get_int(self, key: str, *, low: int | None = None, high: int | None = None) -> int: ...
    @overload
    def get_int(self, key: str, default: _D, *, low: int | None = None, high: int | None = None) -> int | _D: ...
    def get_int(
        self, key: str, default: object = _REQUIRED, *, low: int | None = None, high: int | None = None
    ) -> object:
        """An integer, refused outside [low, high] (a default is not checked)."""
        if self._absent(key, default):
            return default
        value = self._values[key]
        if not isinstance(value, int) or isinstance(value, bool):
            self._wrong_type(key, "an integer")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
            raise ModelFileError(f"{self._source}: {key} is {value}, expected {bounds}. Convert the model again.")
        return value

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: _D) -> float | _D: ...
    def get_float(self, key: str, default: object = _REQUIRED) -> object:
        """A finite float; an integer value is converted."""
        if self._absent(key, default):
            return default
        value = self._values[key]
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self._wrong_type(key, "a float")
        if not math.isfinite(value):
            raise ModelFileError(
                f"{self._source}: {key} is {value}, expected a finite number. Convert the model again."
            )
        return float(value)

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: _D) -> bool | _D: ...
    def get_bool(self, key: str, default: object = _REQUIRED) -> object:
        """A bool; integers are refused."""
        if self._absent(key, default):
            return default
        if not isinstance(value := self._values[key], bool):
            self._wrong_type(key, "a bool")
        return value

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: _D) -> str | _D: ...
    def get_str(self, key: str, default: object = _REQUIRED) -> object:
        """A string; bytes that are not UTF-8 appear as lone surrogates (see the module's docstring)."""
        if self._absent(key, default):
            return default
        if not isinstance(value := self._values[key], str):
            self._wrong_type(key, "a string")
        return value

    @overload
    def get_array(self, key: str) -> NDArray[Any]: ...
    @overload
    def get_array(self, key: str, default: _D) -> NDArray[Any] | _D: ...
    def get_array(self, key: str, default: object = _REQUIRED) -> object:
        """A read-only array [n] of numbers or bools, in the file's dtype. For strings see `get_strings`."""
        if self._absent(key, default):
            return default
        if not isinstance(value := self._values[key], np.ndarray):
            self._wrong_type(key, "an array of numbers")
        return value

    @overload
    def get_strings(self, key: str) -> list[str]: ...
    @overload
    def get_strings(self, key: str, default: _D) -> list[str] | _D: ...
    def get_strings(self, key: str, default: object = _REQUIRED) -> object:
        """An array of strings. The list is shared: do not change it."""
        if self._absent(key, default):
            return default
        if not isinstance(value := self._values[key], list):
            self._wrong_type(key, "an array of strings")
        return value

    def _absent(self, key: str, default: object) -> bool:
        if key in self._values:
            return False
        if default is _REQUIRED:
            raise ModelFileError(
                f"{self._source}: the metadata key {key} is missing. "
                "The file was made for something else or by an old converter: convert the model again."
            )
        return True

    def _wrong_type(self, key: str, expected: str) -> NoReturn:
        found = _type_name(self._values[key])
        raise ModelFileError(f"{self._source}: {key} is {found}, expected {expected}. Convert the model again.")


def _type_name(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype.name}"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    names = {bool: "a bool", int: "an integer", float: "a float", str: "a string"}
    return names.get(type(value), type(value).__name__)
