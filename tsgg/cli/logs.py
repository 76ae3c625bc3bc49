"""tsgg's log on stderr: warnings always, the rest with -v."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("tsgg.cli")


@contextmanager
def logged(verbose: bool) -> Iterator[None]:
    """Shows the log while a command runs; the level of an embedding program's log is put back."""
    log, handler = logging.getLogger("tsgg"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _Format(logging.Formatter):
    """`tsgg: warning: ...` for what everybody sees; the part that speaks for what -v adds."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"tsgg: warning: {text}" if record.levelno >= logging.WARNING else f"{record.name}: {text}"
