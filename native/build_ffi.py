"""Writes the C source of the extension `tsgg._ggml` (cffi, API mode) from declarations.h.

Run by CMakeLists.txt: `python build_ffi.py OUTPUT.c`. The compiler then checks every declaration against ggml's headers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

PREAMBLE = """
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "helpers.h"
#include "tiles.h"
"""


def main(output: str) -> None:
    ffi = FFI()
    source = (Path(__file__).parent / "declarations.h").read_text(encoding="utf-8")
    ffi.cdef("\n".join(line for line in source.splitlines() if not line.lstrip().startswith("//")))
    ffi.set_source("tsgg._ggml", PREAMBLE, py_limited_api=True)
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(sys.argv[1])
