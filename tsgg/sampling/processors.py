"""The caller's own functions in the chain of a row: what they are given, and what is accepted from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import TsggError
from tsgg.sampling.params import LogitsProcessor


class Processors:
    """Of one request. `push` every token that is emitted; `apply` to a row the tokens of which were pushed."""

    def __init__(self, processors: Iterable[LogitsProcessor], prompt: Sequence[int]) -> None:
        self._processors = tuple(processors)
        self._length = len(prompt)
        self._ids = np.empty(2 * self._length + 64, np.int32)
        self._ids[: self._length] = prompt

    def push(self, token: int) -> None:
        if self._length == self._ids.size:  # an array that a function has kept stays as it was
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
        self._ids[self._length] = token
        self._length += 1

    def apply(self, logits: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Writes what the functions make of `logits` [vocab] into `out` [vocab]. Each may change or keep what it is given.

        Raises `TsggError` where one raises, or returns anything else than such a row.
        """
        ids = self._ids[: self._length]
        ids.flags.writeable = False
        row = logits
        for processor in self._processors:
            name = getattr(processor, "__name__", type(processor).__name__)
            try:
                row = np.asarray(processor(ids, np.array(row, np.float32)))
            except BaseException as error:  # an exit too: it would end the engine, and every other request with it
                raise TsggError(f"the logits processor {name} failed: {error!r}") from error
            if row.shape != logits.shape or row.dtype.kind != "f":
                raise TsggError(
                    f"the logits processor {name} returned {row.dtype} of shape {row.shape}; "
                    f"expected floats of shape {logits.shape}"
                )
        np.copyto(out, row, casting="same_kind")
