"""Texts that the user gives: prompts from flags, files and standard input."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tsgg.errors import UsageError

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


def read_prompt(text: str | None, file: str | None = None) -> str:
    """The prompt of -p or -f; "-" reads standard input to its end. Of a file, one line break at the end is no part of it.

    Raises `UsageError` where both or none are given, for what cannot be read and for what is not UTF-8.
    """
    if (text is None) == (file is None):
        raise UsageError("give one prompt: -p TEXT, -p - for standard input, or -f FILE")
    if file == "-" or text == "-":
        return decoded(read_stdin(), "standard input")
    if file is not None:
        try:
            data = Path(file).read_bytes()
        except OSError as error:
            raise UsageError(f"prompt file {file}: {error.strerror or error}") from error
        return decoded(data, f"prompt file {file}")
    return checked(str(text), "the prompt")


def read_stdin() -> bytes:
    """Standard input to its end, whatever encoding the environment names."""
    binary = getattr(sys.stdin, "buffer", None)
    return binary.read() if binary is not None else sys.stdin.read().encode()


def checked(text: str, what: str) -> str:
    """A text of the command line; raises `UsageError` for bytes that are not UTF-8, which Python smuggles through."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not UTF-8 (at character {error.start})") from None
    return text


def unescape(text: str) -> str:
    r"""\n, \t, \r, \\, \', \", \uHHHH and \xHH (a byte) become what they mean; a backslash before anything else stays.

    Raises `UsageError` where bytes given as \xHH are not UTF-8.
    """
    try:
        return _ESCAPE.sub(lambda match: _unescaped(match[1]), text).encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise UsageError(f"the escapes in {text!r} do not give UTF-8") from None


def _unescaped(code: str) -> str:
    if code[0] in "xu" and len(code) > 1:
        value = int(code[1:], 16)
        return chr(value) if code[0] == "u" or value < 0x80 else chr(0xDC00 + value)  # decoded with its neighbours
    return _NAMED.get(code, f"\\{code}")


def decoded(data: bytes, what: str) -> str:
    """UTF-8 without one line break at its end; raises `UsageError`."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 (at byte {error.start})") from None
    text = text.replace("\r\n", "\n")
    return text.removesuffix("\n")
