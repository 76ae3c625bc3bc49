"""The header of one GGUF file, checked number by number. Untrusted input is the normal case.

Every count, length, dimension and offset is compared with what the file can hold before it is used, so memory stays
within a small multiple of the header's size and no later stage (ggml, numpy, mmap) meets an impossible number.
Layout: the comment at the top of ggml's gguf.h; limits: ggml.h (GGML_MAX_DIMS, GGML_MAX_NAME) and the GGUF text.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from tsgg.errors import ModelFileError, UnsupportedError
from tsgg.gguf.metadata import Metadata
from tsgg.gguf.types import GGML_TYPES, REMOVED_GGML_TYPES

DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 1 << 21  # a huge page; more would only serve to push the data section around
MAX_DIMS: Final = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES: Final = 63  # GGML_MAX_NAME less its NUL: ggml would cut longer names and so mix tensors up
MAX_KEY_BYTES: Final = 65535  # the GGUF text; keeps error messages and dicts sane
MAX_ELEMENTS: Final = 2**63 - 1  # ggml counts in int64

# The least a thing takes in the file: what bounds the counts before anything is allocated.
_MIN_STRING: Final = 8  # its length
_MIN_KV: Final = 8 + 1 + 4 + 1  # key length, key, type, a one-byte value
_MIN_TENSOR: Final = 8 + 1 + 4 + 4 + 8  # name length, name, dimension count, type, offset

_U64: Final = struct.Struct("<Q")

# GGUF value types
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Final[Mapping[int, np.dtype[np.generic]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies; its bytes are not read."""

    name: str
    type: int  # ggml type id, a key of GGML_TYPES
    shape: tuple[int, ...]  # ggml's ne: elements, fastest dimension first, 1 to 4 of them, none zero
    offset: int  # bytes from the start of its file
    nbytes: int  # bytes; offset + nbytes never passes the end of the file
    file: int  # index into GGUFFile.paths


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """A model file, or all parts of a split one, with every number in its headers checked."""

    paths: tuple[Path, ...]  # in part order
    metadata: Metadata  # of the first part
    tensors: Mapping[str, TensorInfo]  # by name, in file order
    alignment: int  # bytes; every tensor's offset in its file is a multiple of it

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises ModelFileError where it is missing."""
        return self.metadata.architecture


class Header:
    """A cursor over one mapped file; each method reads one thing and leaves the cursor behind it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 8  # magic and version are checked

    def read(self, file: int) -> GGUFFile:
        """The whole header."""
        n_tensors = self.u64("the number of tensors")
        n_kv = self.u64("the number of metadata keys")
        self.check_room(n_kv, _MIN_KV, "metadata keys", self.pos - 8)
        self.check_room(n_tensors, _MIN_TENSOR, "tensors", self.pos - 16)

        values: dict[str, object] = {}
        for _ in range(n_kv):
            at = self.pos
            key = self.name("metadata key", MAX_KEY_BYTES)
            if key in values:
                raise self.error(at, f"the metadata key {_short(key)} occurs twice, expected once")
            values[key] = self.value(key)
        metadata = Metadata(values, str(self.path))
        alignment = metadata.get_int("general.alignment", DEFAULT_ALIGNMENT, low=1, high=MAX_ALIGNMENT)
        if alignment & (alignment - 1):
            raise ModelFileError(
                f"{self.path}: general.alignment is {alignment}, expected a power of two. Convert the model again."
            )

        entries: dict[str, tuple[int, TensorInfo]] = {}  # with the position of the entry, for messages
        for _ in range(n_tensors):
            at = self.pos
            info = self.tensor(file)
            if info.name in entries:
                raise self.error(at, f"the tensor {info.name!r} occurs twice, expected once")
            entries[info.name] = (at, info)
        data_start = -(-self.pos // alignment) * alignment
        tensors = self.place(entries, data_start, alignment)
        return GGUFFile((self.path,), metadata, MappingProxyType(tensors), alignment)

    def value(self, key: str) -> object:
        """A metadata value with its type."""
        at = self.pos
        kind = self.u32(f"the type of {_short(key)}")
        if kind == _ARRAY:
            return self.array(key)
        if kind == _STRING:
            return self.strings(1, key)[0]
        dtype = _NUMBERS.get(kind)
        if dtype is not None:
            return np.frombuffer(self.take(dtype.itemsize, key), dtype)[0].item()
        if kind == _BOOL:
            return self.take(1, key) != b"\0"
        raise self.error(at, f"the metadata key {_short(key)} has the value type {kind}, expected 0 to 12")

    def array(self, key: str) -> object:
        """An array value: numpy for numbers and bools, list[str] for strings."""
        at = self.pos
        kind = self.u32(f"the element type of {_short(key)}")
        count = self.u64(f"the length of {_short(key)}")
        if kind == _STRING:
            self.check_room(count, _MIN_STRING, f"strings in {_short(key)}", self.pos - 8)
            return self.strings(count, key)
        if kind == _ARRAY:
            raise UnsupportedError(
                f"{self.path}: byte {at}: {_short(key)} is an array of arrays, which neither ggml nor tsgg reads. "
                "Convert the model with flat metadata."
            )
        dtype = np.dtype("<u1") if kind == _BOOL else _NUMBERS.get(kind)
        if dtype is None:
            raise self.error(at, f"the array {_short(key)} has the element type {kind}, expected 0 to 12")
        self.check_room(count, dtype.itemsize, f"elements in {_short(key)}", self.pos - 8)
        values = np.frombuffer(self.take(count * dtype.itemsize, key), dtype)  # over bytes: read-only
        if kind == _BOOL:
            values = values != 0
            values.setflags(write=False)
        return values

    def strings(self, count: int, key: str) -> list[str]:
        """`count` strings in a row. The one hot loop: a vocabulary has 262k tokens and as many merges."""
        data, size, pos, length_at = self.data, self.size, self.pos, _U64.unpack_from
        out = []
        for _ in range(count):
            start = pos + 8
            if start > size:
                raise self.truncated(pos, 8, f"a string of {_short(key)}")
            end = start + length_at(data, pos)[0]
            if end > size:
                raise self.truncated(start, end - start, f"a string of {_short(key)}")
            out.append(data[start:end].decode("utf-8", "surrogateescape"))
            pos = end
        self.pos = pos
        return out

    def tensor(self, file: int) -> TensorInfo:
        """One tensor entry; its offset is still relative to the data section (`place` makes it absolute)."""
        name = self.name("tensor name", MAX_NAME_BYTES)
        at = self.pos
        n_dims = self.u32(f"the dimension count of {name!r}")
        if n_dims > MAX_DIMS:
            raise self.error(at, f"the tensor {name!r} has {n_dims} dimensions, expected at most {MAX_DIMS}")
        shape = tuple(self.u64(f"a dimension of {name!r}") for _ in range(n_dims)) or (1,)  # none: a scalar, as in ggml
        elements = prod(shape)
        if not 0 < elements <= MAX_ELEMENTS:
            raise self.error(at, f"the tensor {name!r} has the shape {shape}, expected 1 to 2^63-1 elements")
        at = self.pos
        kind = self.u32(f"the type of {name!r}")
        info = GGML_TYPES.get(kind)
        if info is None:
            raise UnsupportedError(f"{self.path}: byte {at}: the tensor {name!r} has {_unknown_type(kind)}")
        if shape[0] % info.block_size:
            raise self.error(
                at,
                f"the tensor {name!r} of type {info.name} has rows of {shape[0]} elements, "
                f"expected a multiple of {info.block_size}",
            )
        offset = self.u64(f"the offset of {name!r}")
        return TensorInfo(name, kind, shape, offset, elements // info.block_size * info.type_size, file)

    def place(self, entries: Mapping[str, tuple[int, TensorInfo]], start: int, alignment: int) -> dict[str, TensorInfo]:
        """Make offsets absolute; every tensor must lie aligned inside the data section and touch no other."""
        tensors: dict[str, TensorInfo] = {}
        for at, info in entries.values():
            if info.offset % alignment:
                raise self.error(
                    at, f"the tensor {info.name!r} has the offset {info.offset}, expected a multiple of {alignment}"
                )
            begin = start + info.offset
            if begin + info.nbytes > self.size:
                raise self.error(
                    at,
                    f"the tensor {info.name!r} ends at byte {begin + info.nbytes}, but the file ends at {self.size}",
                )
            tensors[info.name] = replace(info, offset=begin)
        in_order = sorted(tensors.values(), key=lambda info: info.offset)
        for left, right in pairwise(in_order):
            if left.offset + left.nbytes > right.offset:
                raise self.error(
                    entries[right.name][0],
                    f"the tensor {right.name!r} starts at byte {right.offset}, inside {left.name!r}, "
                    f"which ends at {left.offset + left.nbytes}",
                )
        return tensors

    def name(self, what: str, limit: int) -> str:
        """A key or tensor name: 1 to `limit` bytes of UTF-8 without NUL (ggml cuts names there)."""
        at = self.pos
        length = self.u64(f"the length of a {what}")
        if not 0 < length <= limit:
            raise self.error(at, f"a {what} of {length} bytes, expected 1 to {limit}")
        raw = self.take(length, f"a {what}")
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(at + 8, f"a {what} holds {raw[:64]!r}, expected UTF-8") from None
        if "\0" in name:
            raise self.error(at + 8, f"the {what} {_short(name)} holds a NUL byte, expected none")
        return name

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number."""
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number."""
        return int.from_bytes(self.take(8, what), "little")

    def take(self, length: int, what: str) -> bytes:
        """The next `length` bytes (`what` they are, for the message when the file ends before)."""
        end = self.pos + length
        if end > self.size:
            raise self.truncated(self.pos, length, what)
        raw = self.data[self.pos : end]
        self.pos = end
        return raw

    def check_room(self, count: int, least: int, what: str, at: int) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything is allocated for it."""
        if count > (self.size - self.pos) // least:
            raise self.error(at, f"{count} {what}, but only {self.size - self.pos} bytes follow")

    def error(self, at: int, found: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: byte {at}: {found}. The file is damaged: download or convert it again.")

    def truncated(self, at: int, length: int, what: str) -> ModelFileError:
        return self.error(at, f"{what} needs {length} bytes, but the file ends at {self.size}")


def _short(name: str) -> str:
    """A key for a message: quoted, escaped, not longer than a line."""
    return repr(name) if len(name) <= 64 else repr(name[:64]) + "..."


def _unknown_type(kind: int) -> str:
    removed = REMOVED_GGML_TYPES.get(kind)
    if removed is not None:
        return f"the type {removed[0]} ({kind}), which ggml has removed. Quantize the model again as {removed[1]}."
    return f"the type id {kind}, unknown to ggml 0.15.3. The file is damaged or needs a newer tsgg."
