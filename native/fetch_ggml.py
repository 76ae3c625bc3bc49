"""Obtains the pinned sdist that carries unpatched ggml, checks its sha256 and unpacks ggml out of it.

Run by CMakeLists.txt: `python fetch_ggml.py DESTINATION`. The archive is found, in this order: in the file named by the
environment variable TSGG_GGML_SDIST (for builds without network), else through pip, which every build environment of
tsgg has. Only `vendor/ggml` is unpacked; an existing unpacked tree is used as it is.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

PACKAGE = "ggml-python"
VERSION = "0.0.45"
SHA256 = "10aac52075cf3c7ef2b00d6c35b1c23f7b018dbeff8ae8df67339b4be1166f05"
PREFIX = PurePosixPath("ggml_python-0.0.45/vendor/ggml")


def download(folder: Path) -> Path:
    """Fetches the sdist into `folder` by pip and returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", PACKAGE, "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode != 0 or not found:
        sys.exit(
            f"tsgg: pip could not fetch {PACKAGE}=={VERSION}, whose sdist carries the ggml sources.\n{done.stderr.strip()}\n"
            "Without network, set TSGG_GGML_SDIST to that sdist's path."
        )
    return found[0]


def unpack(archive: Path, destination: Path) -> None:
    """Unpacks regular files under PREFIX into `destination`; refuses an archive whose sha256 is another."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(f"tsgg: {archive.name} has sha256 {digest}, expected {SHA256}: not the pinned ggml sources")
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not member.isfile() or PREFIX not in path.parents or ".." in path.parts:
                continue
            target = destination / path.relative_to(PREFIX)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            target.write_bytes(content.read())


def main(destination: Path) -> None:
    stamp = destination / ".sha256"
    if stamp.is_file() and stamp.read_text() == SHA256:
        return
    given = os.environ.get("TSGG_GGML_SDIST")
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(given) if given else download(Path(folder)), destination)
    stamp.write_text(SHA256)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
