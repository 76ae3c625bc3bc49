"""What a shell expects of a command: an exit status, one line for an error, a quiet end by a signal or a closed pipe."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from tsgg.errors import TsggError

FAILED = 1  # the system refuses something: a full disk, a file that may not be read
MENDABLE = 2  # what the user can mend, like a wrong flag
SIGNALLED = 128  # + the number of the signal
BROKEN_PIPE = SIGNALLED + 13  # as if SIGPIPE had ended the process, which Python ignores


def run(command: Callable[[], int]) -> int:
    """The exit status of a command. What it raises on purpose, and what the system refuses, is one line on stderr.

    `SystemExit` passes through: of argparse's `--help`, and of SIGTERM and SIGHUP, which unwind like an error, so that files
    half written are removed and the model is freed.
    """
    with ExitStack() as stack:
        stack.enter_context(_standard_streams())
        stack.enter_context(_signals())
        try:
            try:
                return command()
            finally:
                sys.stdout.flush()  # a full disk is told here, not while the interpreter ends
        except TsggError as error:
            complain(str(error))
            return MENDABLE
        except KeyboardInterrupt:
            with suppress(OSError):
                print(file=sys.stderr)
            return SIGNALLED + signal.SIGINT
        except BrokenPipeError:
            _discard(sys.stdout)
            return BROKEN_PIPE
        except OSError as error:
            _discard(sys.stdout)
            complain(error.strerror if error.strerror and error.filename is None else str(error))
            return FAILED


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds; nothing where nobody listens."""
    with suppress(OSError):
        print(f"tsgg: {' '.join(message.split())}", file=sys.stderr)


@contextmanager
def _standard_streams() -> Iterator[None]:
    """All three are there, and an encoding that lacks a character escapes it."""
    changed: list[tuple[Any, str | None]] = []
    if None in (sys.stdin, sys.stdout, sys.stderr):  # started with one of them closed (`>&-`)
        _fill_descriptors()
        sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
        sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):  # stderr escapes by itself
        changed.append((sys.stdout, sys.stdout.errors))
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in changed:
            with suppress(OSError):
                stream.reconfigure(errors=errors)


def _fill_descriptors() -> None:
    """No file that is opened later gets the number of a standard stream, into which a library may print."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `SystemExit` of their status on the main thread."""
    numbers = _ENDING if threading.current_thread() is threading.main_thread() else ()
    taken = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]  # `nohup` ignores SIGHUP
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: object) -> NoReturn:
    for each in _ENDING:
        if signal.getsignal(each) is _leave:
            signal.signal(each, signal.SIG_IGN)  # once is enough: what cleans up is not disturbed
    raise SystemExit(SIGNALLED + number)


@contextmanager
def signals_deferred(tell: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP call `tell`, and `SystemExit` is raised at the end of the block.

    For an event loop, which reports an exception raised in the middle of a callback instead of unwinding quietly.
    """
    taken = [number for number in _ENDING if signal.getsignal(number) is _leave]
    came: list[int] = []

    def defer(number: int, frame: object) -> None:
        came.append(number)
        tell()

    for number in taken:
        signal.signal(number, defer)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, _leave)
        if came:
            _leave(came[0], None)


def _discard(stream: Any) -> None:
    """What is left in the stream's buffer goes nowhere: writing it as the interpreter ends would fail again."""
    with suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
