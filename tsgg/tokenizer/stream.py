"""Text of tokens as they come: half a character is held back until it is whole or known to be broken."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Bytes of tokens in, whole characters out. All pushes and the flush together are what decoding at once gives."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes: empty while a character is unfinished, U+FFFD for bytes that are none."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """What is held back, at the end of the stream."""
        return self._decoder.decode(b"", final=True)
