"""Every error that tsgg raises on purpose.

One base class, so that a caller can catch everything with `except TsggError`; a subclass only where a caller would
act differently. A message says what was found, what was expected and what to do next.
"""

from __future__ import annotations


class TsggError(Exception):
    """Base of every error that tsgg raises on purpose."""


class ModelFileError(TsggError):
    """A file is truncated, malformed or inconsistent with itself: nothing in it was used."""


class UnsupportedError(TsggError):
    """The input is well formed, but tsgg does not implement it (architecture, tensor type, pre-tokenizer, ...)."""


class UsageError(TsggError):
    """An argument, flag, option or environment variable is wrong or contradicts another."""


class ContextFullError(TsggError):
    """The sequence has no room for the rows that were asked for."""


class OutOfMemoryError(TsggError):
    """The memory plan does not fit the device, or the device refused an allocation."""


class Interrupted(TsggError):
    """A computation was asked to stop and did, with nothing changed: whoever asked knows why, and may run it again."""
