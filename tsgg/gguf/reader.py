"""Opening GGUF files: what is refused at the door, and how the parts of a split model become one `GGUFFile`."""

from __future__ import annotations

import mmap
import os
import re
import stat
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tsgg.errors import ModelFileError, UnsupportedError
from tsgg.gguf.header import GGUFFile, Header, TensorInfo

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
HEADER_BYTES: Final = 24  # magic, version, two counts
_PART_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a GGUF file; any part of a split model leads to all of its parts.

    The file is mapped while its header is parsed and closed again before this returns. Raises ModelFileError (missing,
    unreadable, truncated, malformed) and UnsupportedError (version 1 or unknown, big-endian, nested array, tensor type
    unknown to ggml 0.15.3).
    """
    path = Path(path)
    part = _read_part(path, 0)
    count = part.metadata.get_int("split.count", 1, low=0, high=65535)
    return part if count <= 1 else _join(path, part, count)


def _join(path: Path, given: GGUFFile, count: int) -> GGUFFile:
    """All parts of the split model that `given`, read from `path`, is one of `count` parts of."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{path}: one of {count} parts of a split model, but its name does not end in -NNNNN-of-{count:05d}.gguf. "
            "Give the parts their original names back, all in one folder."
        )
    paths = tuple(path.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}.gguf") for no in range(1, count + 1))
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelFileError(
            f"{path}: {len(missing)} of {count} parts of the split model are missing: {', '.join(missing[:3])}{more}. "
            f"Put all parts into {path.parent}."
        )
    # The first part holds the vocabulary: worth not reading twice. Its tensors already carry the index 0.
    parts = [given if i == 0 and p == path else _read_part(p, i) for i, p in enumerate(paths)]
    tensors: dict[str, TensorInfo] = {}
    for i, part in enumerate(parts):
        found = (part.metadata.get_int("split.no"), part.metadata.get_int("split.count"))
        if found != (i, count):
            raise ModelFileError(
                f"{paths[i]}: holds part {found[0] + 1} of {found[1]}, but its name says part {i + 1} of {count}. "
                "Parts of different models or renamed parts lie here: download them again."
            )
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise ModelFileError(
                f"{paths[i]}: the tensor {min(twice)!r} is in an earlier part too. Download the parts again."
            )
        tensors.update(part.tensors)
    expected = parts[0].metadata.get_int("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ModelFileError(
            f"{paths[0]}: the {count} parts hold {len(tensors)} tensors, split.tensors.count says {expected}. "
            "Download the parts again."
        )
    alignment = min(part.alignment for part in parts)
    return GGUFFile(paths, parts[0].metadata, MappingProxyType(tensors), alignment)


def _read_part(path: Path, file: int) -> GGUFFile:
    """One file on its own; its tensors get `file` as their index."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{path}: cannot be read ({reason}). Check the path and its permissions.") from error
    if stat.S_ISDIR(mode):
        raise ModelFileError(f"{path}: is a directory, expected a .gguf file. Name the file inside it.")
    if not stat.S_ISREG(mode):
        raise ModelFileError(f"{path}: is not a regular file (a pipe or device), expected a .gguf file on disk.")
    try:
        with open(path, "rb") as stream:
            start = stream.read(HEADER_BYTES)
            _check_start(path, start)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return Header(path, data).read(file)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror}). Check the file's permissions.") from error


def _check_start(path: Path, start: bytes) -> None:
    """Refuse what is not GGUF, or not a version and byte order read here, by its first 24 bytes."""
    if start and not start.startswith(MAGIC[: len(start)]):
        raise ModelFileError(
            f"{path}: byte 0: starts with {start[:4]!r}, expected b'GGUF'. This is no GGUF file (perhaps another "
            "format, an error page or a Git LFS pointer saved in its place): download the model itself."
        )
    if len(start) < HEADER_BYTES:
        raise ModelFileError(
            f"{path}: {len(start)} bytes long, expected at least the {HEADER_BYTES} of a GGUF header. "
            "The download broke off: download the file again."
        )
    version = int.from_bytes(start[4:8], "little")
    if version in VERSIONS:
        return
    if 1 <= int.from_bytes(start[4:8], "big") <= max(VERSIONS):
        raise UnsupportedError(
            f"{path}: byte 4: a big-endian GGUF file, expected little-endian. Get the little-endian file or convert it."
        )
    remedy = "Convert the model with a current converter" if version == 1 else "The file is damaged or newer than tsgg"
    raise UnsupportedError(f"{path}: byte 4: GGUF version {version}, expected 2 or 3. {remedy}.")
