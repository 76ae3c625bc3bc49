"""Whether the machine is quiet enough to time anything, and what it is."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from tsgg.errors import UsageError
from tsgg.ggml.library import cpu_features
from tsgg.platform import usable_cores

BUSY_SHARE = 0.15  # of all cores, used by others while this process sleeps


def require_quiet(force: bool = False) -> None:
    """Raises `UsageError` when others use the processors: a figure taken beside them is noise."""
    share = _busy_share(1.0)
    if share is not None and share > BUSY_SHARE and not force:
        raise UsageError(f"other processes use {share:.0%} of the processors: wait, or measure anyway with --force")


def describe_machine() -> dict[str, object]:
    """Conditions that belong beside every figure."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": usable_cores(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "features": [name for name, value in cpu_features().items() if value == "1"],
        "spincount": os.environ.get("GOMP_SPINCOUNT"),
    }


def _busy_share(seconds: float) -> float | None:
    """Share of all processors in use during the next `seconds`, or None where the system does not tell."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return 1.0 - (after[0] - before[0]) / (after[1] - before[1])


def _ticks() -> tuple[int, int] | None:
    """(idle, all) ticks of all processors since start."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    fields = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
