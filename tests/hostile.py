"""Mutated files, and a runner that loads them in a child process and says what became of each.

    outcomes = run_in_child("tests.test_gguf:load", chain(truncations(data, header), flips(data, 2000, seed=1)))
    assert not [outcome for outcome in outcomes if not outcome.passed]

A loader passes on a mutated file when it loads it or raises a TsggError. Any other exception, a signal, an exit, a hang
or memory out of proportion is a failure, and it is attributed to the file that was being loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tsgg.errors import TsggError

IMPORT_TIMEOUT_S = 120.0  # a cold import of the package on a busy machine


@dataclass(frozen=True, slots=True)
class HostileFile:
    """One mutated file."""

    label: str  # what was done to it
    data: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a loader made of one file."""

    label: str  # of the file
    kind: str  # "loaded", "refused" (TsggError), "raised" (any other exception), "died" or "hung"
    detail: str  # the exception's type and text, or how the child ended

    @property
    def passed(self) -> bool:
        """Whether an untrusted file may end like this."""
        return self.kind in ("loaded", "refused")


def truncations(data: bytes, header: int, *, in_data: int = 200, seed: int = 0) -> Iterator[HostileFile]:
    """`data` cut at every length inside its header (bytes [0, header)) and at `in_data` seeded lengths behind it."""
    rng = random.Random(seed)
    lengths = [*range(header), *sorted(rng.sample(range(header, len(data)), min(in_data, len(data) - header)))]
    for length in lengths:
        yield HostileFile(f"cut at {length} of {len(data)}", data[:length])


def flips(data: bytes, n: int, seed: int, *, within: int | None = None) -> Iterator[HostileFile]:
    """`data` with one bit flipped, `n` times: seeded positions in its first `within` bytes (all of it by default)."""
    rng = random.Random(seed)
    for _ in range(n):
        at, bit = rng.randrange(len(data) if within is None else within), rng.randrange(8)
        mutated = bytearray(data)
        mutated[at] ^= 1 << bit
        yield HostileFile(f"bit {bit} of byte {at} flipped", bytes(mutated))


def run_in_child(
    callable_path: str, files: Iterable[HostileFile], *, memory_mb: int | None = 64, timeout_s: float = 20.0
) -> list[Outcome]:
    """Call `callable_path` ("package.module:function", taking a path) on each file, in a child process.

    One child serves many files; a new one starts when it dies or hangs for more than `timeout_s`. `memory_mb` is what
    the child may map on top of what it holds after its imports (None: no limit; no limit where the system has none).
    Files are taken one at a time, so a generator of large files needs no more memory than one of them.
    """
    outcomes = []
    child: _Child | None = None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        for number, file in enumerate(files):
            # A name of its own for each file: a mapping that a loader leaked must not see the next file's bytes.
            path = Path(folder) / f"{number}.gguf"
            path.write_bytes(file.data)
            if child is None:
                child = _Child(callable_path, memory_mb)
                stack.callback(child.stop)
            kind, detail = child.load(path, timeout_s)
            outcomes.append(Outcome(file.label, kind, detail))
            if kind in ("died", "hung"):
                child.stop()
                child = None
            with contextlib.suppress(OSError):  # Windows keeps a file that a leaked mapping holds
                path.unlink()
    return outcomes


class _Child:
    """A process that loads files on request."""

    def __init__(self, callable_path: str, memory_mb: int | None) -> None:
        context = get_context("spawn")  # a fork would inherit the parent's threads and memory
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(callable_path, memory_mb, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        kind, detail = self._receive(IMPORT_TIMEOUT_S)
        if kind != "ready":
            raise RuntimeError(f"the child could not import {callable_path}: {kind} {detail}")

    def load(self, path: Path, timeout_s: float) -> tuple[str, str]:
        """Outcome kind and detail for one file."""
        with contextlib.suppress(ConnectionError):  # it died since its last answer: _receive says so
            self._connection.send(str(path))
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> tuple[str, str]:
        try:
            if not self._connection.poll(timeout_s):
                return "hung", f"no answer within {timeout_s} s"
            kind, detail = self._connection.recv()
            return kind, detail
        except (EOFError, ConnectionError):
            self._process.join(10)
            return "died", f"exit code {self._process.exitcode} (negative: a signal)"

    def stop(self) -> None:
        """End the process and free its pipe; may be called twice."""
        self._connection.close()
        self._process.kill()
        self._process.join(10)


def _serve(callable_path: str, memory_mb: int | None, connection: Connection) -> None:
    """The child's side: load what is asked for until the pipe closes."""
    try:
        module, _, name = callable_path.partition(":")
        load: Callable[[str], object] = getattr(importlib.import_module(module), name)
        _limit_memory(memory_mb)
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", ""))
    with contextlib.suppress(EOFError):  # the parent has closed its end
        while True:
            connection.send(_outcome(load, connection.recv()))


def _outcome(load: Callable[[str], object], path: str) -> tuple[str, str]:
    try:
        try:
            load(path)
            return "loaded", ""
        except TsggError as error:
            text = f"{type(error).__name__}: {error}"
            text.encode()  # a message with lone surrogates would crash whoever prints it
            return "refused", text
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error!a}"


def _limit_memory(memory_mb: int | None) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    status = Path("/proc/self/statm")
    if memory_mb is None or not status.exists():  # macOS has the call but does not enforce it
        return
    held = int(status.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + memory_mb * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]))
