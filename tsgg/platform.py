"""What depends on the operating system: usable cores, free memory, mapped libraries. The only module that asks it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def usable_cores() -> int:
    """Threads worth starting: the least of physical cores, CPU affinity and cgroup quota; at least 1."""
    limits = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    for limit in (_physical_cores(), _cgroup_quota()):
        if limit is not None:
            limits.append(limit)
    return max(1, min(limits))


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping (least of system and cgroup), or None where it is not known."""
    found = [value for value in (_meminfo_available(), _cgroup_free()) if value is not None]
    return min(found) if found else None


def resident_memory() -> int | None:
    """Bytes of this process that lie in memory, pages of mapped files among them; None where the system does not tell."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return None


def state_folder() -> Path:
    """Where the user's programs keep what they remember."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def huge_pages() -> bool:
    """Whether the system hands out huge pages to memory that asks for them (Linux)."""
    return "[always]" in (modes := _read("/sys/kernel/mm/transparent_hugepage/enabled")) or "[madvise]" in modes


def mapped_libraries(word: str) -> list[str]:
    """Paths of the libraries in this process whose file name holds `word`; empty where the system does not tell."""
    lines = _read("/proc/self/maps").splitlines()
    paths = {line.split(None, 5)[5] for line in lines if line.count("/")}
    return sorted(path for path in paths if word in path.rsplit("/", 1)[-1])


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _physical_cores() -> int | None:
    if sys.platform == "darwin":
        import ctypes

        count, size = ctypes.c_int(0), ctypes.c_size_t(4)
        libc = ctypes.CDLL(None)
        for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):  # performance cores first: the others only stall
            if libc.sysctlbyname(name, ctypes.byref(count), ctypes.byref(size), None, 0) == 0 and count.value > 0:
                return count.value
        return None
    pairs: set[tuple[str, str]] = set()
    physical = core = ""
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "physical id":
            physical = value
        elif key.strip() == "core id":
            core = value
            pairs.add((physical, core))
    return len(pairs) or None


def _cgroup_quota() -> int | None:
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if not period:  # cgroup v1
        quota, period = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return max(1, int(cores)) if cores > 0 else None


def _meminfo_available() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_free() -> int | None:
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(limit_path).strip(), _read(used_path).strip()
        if limit.isdecimal() and used.isdecimal():
            return max(0, int(limit) - int(used))
    return None
