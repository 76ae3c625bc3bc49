"""Stops a computation from another thread: a flag in C that ggml's CPU backend looks at after every node of a graph.

No Python runs in the threads that compute, and looking costs two loads a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tsgg.errors import Interrupted
from tsgg.ggml.library import ffi, lib

NATIVE = hasattr(
    lib, "tsgg_set_interrupt"
)  # an editable install may hold an extension that is older than these sources


class Interrupt:
    """A request to stop, shared by the backends of one model. One request stops one computation."""

    __slots__ = ("pointer",)

    def __init__(self) -> None:
        self.pointer: Any = ffi.new("struct tsgg_interrupt *") if NATIVE else SimpleNamespace(armed=0, countdown=0)

    def request(self, after: int = 0) -> None:
        """The computation that runs now stops at its next node, or `after` nodes later; where none runs, the next one does.

        May be called from any thread and from a signal handler.
        """
        self.pointer.countdown = after + 1

    def clear(self) -> None:
        """Forgets a request that has stopped nothing yet."""
        self.pointer.countdown = 0

    def check(self) -> None:
        """Takes a request that stops whatever comes next: raises `Interrupted`."""
        if self.pointer.countdown == 1:
            raise self.taken()

    def taken(self) -> Interrupted:
        """The error for a computation that stopped; the request is done."""
        self.clear()
        return Interrupted("the computation was interrupted: nothing that was committed before it has changed")

    @contextmanager
    def armed(self) -> Iterator[None]:
        """What is computed inside can be interrupted. Elsewhere a request waits: a state half copied would be lost."""
        self.pointer.armed = 1
        try:
            yield
        finally:
            self.pointer.armed = 0
