"""Devices (hardware that ggml sees) and backends (one executor on a device, not thread-safe, owned by one model)."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

from tsgg import platform
from tsgg.errors import TsggError, UsageError
from tsgg.ggml.interrupt import NATIVE, Interrupt
from tsgg.ggml.library import check_process, ffi, lib, text
from tsgg.ggml.threads import Crew, Pace
from tsgg.settings import settings

_KINDS = {
    lib.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
    lib.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    lib.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    lib.GGML_BACKEND_DEVICE_TYPE_ACCEL: "accel",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of ggml's registry. `handle` is its `ggml_backend_dev_t`; memory is in bytes."""

    name: str
    description: str
    kind: str  # "cpu", "gpu", "igpu" or "accel" (BLAS and the like)
    memory_free: int
    memory_total: int
    handle: Any

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def buffer_type(self) -> Any:
        return lib.ggml_backend_dev_buffer_type(self.handle)

    def extra_buffer_type(self, name: str) -> Any | None:
        """The extra buffer type of that name (`CPU_REPACK`), or None where the device has none."""
        found = lib.tsgg_extra_buffer_type(self.handle, name.encode())
        return None if found == ffi.NULL else found

    def supports(self, node: Any) -> bool:
        """Whether the device computes this op on these types. The CPU says yes to almost anything."""
        return bool(lib.ggml_backend_dev_supports_op(self.handle, node))


def devices() -> list[Device]:
    """All devices in ggml's order: accelerators first, the CPU last."""
    return [_describe(lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count())]


def pick_device(name: str = "auto") -> Device:
    """The device of that name (case does not matter); "auto" is the first GPU, then an integrated one, then the CPU.

    Raises `UsageError` that lists the devices when there is none of that name.
    """
    found = devices()
    wanted = str(name).lower()
    if wanted == "auto":
        for kind in ("gpu", "igpu", "cpu"):
            for device in found:
                if device.kind == kind:
                    return device
    for device in found:
        if device.name.lower() == wanted:
            return device
    raise UsageError(f"no device {name!r}: this build has {', '.join(device.name for device in found)} (and 'auto')")


def _describe(handle: Any) -> Device:
    props = ffi.new("struct ggml_backend_dev_props *")
    lib.ggml_backend_dev_get_props(handle, props)
    free, total = props.memory_free, props.memory_total
    kind = _KINDS.get(props.type, "accel")
    if kind == "cpu":  # ggml reports all physical memory as free
        known = platform.available_memory()
        free = free if known is None else min(known, total or known)
    return Device(text(props.name), text(props.description), kind, free, total, handle)


class Backend:
    """A stream on a device. Free it after every graph and buffer that uses it; a second `close` does nothing."""

    def __init__(self, device: Device, n_threads: int | None = None, interrupt: Interrupt | None = None) -> None:
        """`interrupt` is looked at while a graph runs, where the device's backend can (the CPU's can)."""
        check_process()
        if n_threads is not None and (type(n_threads) is not int or not 1 <= n_threads <= 512):
            raise UsageError(f"n_threads is {n_threads!r}, expected 1 to 512")
        self.device = device
        self.n_threads = n_threads or platform.usable_cores()
        self.handle = lib.ggml_backend_dev_init(device.handle, ffi.NULL)
        if self.handle == ffi.NULL:
            raise TsggError(f"device {device.name} ({device.description}) could not be started")
        self.interrupt = interrupt or Interrupt()
        if NATIVE:
            lib.tsgg_set_interrupt(self.handle, self.interrupt.pointer)
        self._crew: Crew | None = None
        if lib.ggml_backend_is_cpu(self.handle):
            lib.ggml_backend_cpu_set_n_threads(self.handle, self.n_threads)
            if settings.yield_cores:
                self._crew = Crew(self.n_threads, partial(lib.ggml_backend_cpu_set_n_threads, self.handle))
        self._free = weakref.finalize(self, lib.ggml_backend_free, self.handle)

    @property
    def buffer_type(self) -> Any:
        return self.device.buffer_type

    def compute(self, graph: Any, pace: Pace | None = None) -> None:
        """Runs a graph whose tensors are all allocated, and waits for it. The GIL is released meanwhile.

        With the `pace` of a graph that is computed again and again, busy cores are noticed and left alone (`Crew`).
        """
        check_process()
        start = time.perf_counter()
        self.check_status(lib.ggml_backend_graph_compute(self.handle, graph))
        if self._crew is not None and pace is not None:
            self._crew.observe(pace, time.perf_counter() - start)

    def check_status(self, status: int) -> None:
        """Raises `Interrupted` for a computation that was stopped, `TsggError` for one that failed."""
        if status == lib.GGML_STATUS_ABORTED:
            raise self.interrupt.taken()
        if status != lib.GGML_STATUS_SUCCESS:
            raise TsggError(f"ggml could not compute on {self.device.name}: status {status}")

    def synchronize(self) -> None:
        lib.ggml_backend_synchronize(self.handle)

    def close(self) -> None:
        self._free()
