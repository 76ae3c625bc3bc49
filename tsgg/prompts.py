"""What a caller may give as a prompt, or as several: texts, and token ids in lists, tuples and numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import TsggError, UsageError

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]

EXPECTED = "a prompt is a text or a list of token ids; several prompts are a list of these"


def is_batch(value: object) -> bool:
    """Whether this is several prompts: a list or tuple with a text or a list in it."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, Sequence) or (isinstance(item, np.ndarray) and item.ndim > 0) for item in value
    )


def token_ids(prompt: object, encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens of one prompt; `encode` serves texts. Raises `UsageError` for what is no prompt, and what `encode` raises."""
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or (prompt.size and prompt.dtype.kind not in "iu"):
            raise UsageError(
                f"{EXPECTED}, got an array of {prompt.dtype} with shape {prompt.shape}; for the rows of a matrix give list(array)"
            )
        return [int(item) for item in prompt]
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise UsageError(f"{EXPECTED}, got {type(prompt).__name__}")
    for place, item in enumerate(prompt):
        if not _is_id(item):
            raise UsageError(f"{EXPECTED}, got {item!r} at place {place} of a list")
    return [int(item) for item in prompt]


@contextmanager
def naming(index: int | None) -> Iterator[None]:
    """An error inside tells of which prompt of several it is; of the only one (None) it stays as it is."""
    try:
        yield
    except TsggError as error:
        if index is None:
            raise
        raise type(error)(f"prompt {index}: {error}") from error


def _is_id(item: object) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, (bool, np.bool_))
