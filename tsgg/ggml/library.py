"""Loads the extension that holds ggml, once, and checks it: version, CPU features, the process around it.

ggml's log is routed into `logging`, and a forked child gets an error instead of a hang. What must be set before the
libraries load is in `tsgg.process`.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform

from tsgg import process
from tsgg.errors import TsggError
from tsgg.ggml import variants
from tsgg.settings import settings

GGML_VERSION = "0.15.3"

log = logging.getLogger("tsgg.ggml")

try:
    variant = variants.load(settings.cpu)
    from tsgg._ggml import ffi as ffi  # "as": re-exported
    from tsgg._ggml import lib as lib
except ImportError as error:  # pragma: no cover - a broken installation
    raise TsggError(f"the extension tsgg._ggml does not load ({error}): reinstall tsgg with `pip install`") from error

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


def check_process() -> None:
    """Raises `TsggError` in a forked child: ggml's thread team did not survive the fork, computing would hang."""
    if _forked:
        raise TsggError(
            "tsgg was loaded before this process was forked: start workers by 'spawn', or import tsgg in them"
        )


def cpu_features() -> dict[str, str]:
    """Features that ggml's CPU backend was built with and this machine has, for example {"AVX2": "1", ...}."""
    entries = ffi.new("struct ggml_backend_feature[64]")
    count = min(64, lib.tsgg_cpu_features(entries, 64))
    return {text(entries[i].name): text(entries[i].value) for i in range(count)}


def text(pointer: object) -> str:
    """A C string as str; NULL is the empty string."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


_LEVELS = {
    lib.GGML_LOG_LEVEL_DEBUG: logging.DEBUG,
    lib.GGML_LOG_LEVEL_INFO: logging.DEBUG,  # ggml's INFO is chatter about itself, not about the user's model
    lib.GGML_LOG_LEVEL_WARN: logging.WARNING,
    lib.GGML_LOG_LEVEL_ERROR: logging.ERROR,
}
_level = logging.DEBUG
_partial = ""


@ffi.def_extern(onerror=lambda *_: None)  # type: ignore[untyped-decorator]
def tsgg_log(level: int, message: object, _user: object) -> None:
    """ggml's log callback: pieces (level CONT) are joined into lines."""
    global _level, _partial
    if level != lib.GGML_LOG_LEVEL_CONT:
        _level = _LEVELS.get(level, logging.DEBUG)
    *lines, _partial = (_partial + text(message)).split("\n")
    for line in lines:
        if line.strip():
            log.log(_level, "%s", line)


def _verify() -> None:
    version = text(lib.ggml_version())
    if version != GGML_VERSION:
        raise TsggError(f"the extension holds ggml {version}, tsgg needs {GGML_VERSION}: reinstall tsgg")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if x86 and variant == variants.NATIVE and "AVX2" not in cpu_features():
        log.warning(
            "this build of ggml has no AVX2: decoding will be many times slower. Rebuild tsgg on this machine "
            "(pip install --no-binary tsgg --no-cache-dir tsgg) without SOURCE_DATE_EPOCH in the environment"
        )
    if process.gomp_came_too_early:
        log.warning(
            "libgomp was loaded before tsgg, so GOMP_SPINCOUNT=%s comes too late: beside busy processes decoding may "
            "collapse. Import tsgg first, or set GOMP_SPINCOUNT=%s in the environment",
            process.SPINCOUNT,
            process.SPINCOUNT,
        )


lib.ggml_log_set(lib.tsgg_log, ffi.NULL)
atexit.register(lib.ggml_log_set, ffi.NULL, ffi.NULL)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
_verify()
