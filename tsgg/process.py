"""What must stand in the environment before a native library loads. Imported first of all, by `tsgg/__init__.py`."""

from __future__ import annotations

import os

from tsgg import platform

SPINCOUNT = "1000"  # long enough to catch the next node's barrier, short enough to give a shared core back

# libgomp reads its settings when it is loaded, by whoever comes first (tokenizer libraries bring it too). With its default
# the spinning barrier collapses a hundredfold beside a busy process.
gomp_came_too_early = (
    bool(platform.mapped_libraries("libgomp"))
    and "GOMP_SPINCOUNT" not in os.environ
    and "OMP_WAIT_POLICY" not in os.environ
)
os.environ.setdefault("GOMP_SPINCOUNT", SPINCOUNT)
os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assert would fork a debugger
