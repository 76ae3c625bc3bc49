"""A tiny GGUF writer for tests, independent of tsgg: whole files, or the pieces to build a malformed one from.

Layout: the comment at the top of ggml's gguf.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

Tensor = tuple[str, Sequence[int], int, bytes]  # name, ne (fastest dimension first), ggml type id, raw bytes

BOOL, STRING, ARRAY = 7, 8, 9
F32 = 0  # ggml type id
_GGUF_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11, "f8": 12, "b1": BOOL}


def gguf_bytes(metadata: Mapping[str, object], tensors: Iterable[Tensor] = (), *, version: int = 3) -> bytes:
    """A whole file. Types: see `typed`. The alignment is metadata's `general.alignment`, else 32."""
    tensors = list(tensors)
    alignment = int(metadata.get("general.alignment", 32))  # type: ignore[call-overload]
    entries, data = b"", b""
    for name, ne, kind, raw in tensors:
        entries += tensor_entry(name, ne, kind, len(data))
        data += _padded(raw, alignment)
    pairs = b"".join(key_value(key, value) for key, value in metadata.items())
    head = header(len(tensors), len(metadata), version) + pairs + entries
    return (_padded(head, alignment) if tensors else head) + data


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Iterable[Tensor] = ()) -> Path:
    """Write `gguf_bytes` and give the path back."""
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def f32(name: str, values: ArrayLike) -> Tensor:
    """An F32 tensor from an array in numpy order (slowest dimension first)."""
    array = np.asarray(values, "<f4")
    return name, array.shape[::-1], F32, array.tobytes()


def header(n_tensors: int, n_kv: int, version: int = 3) -> bytes:
    """The first 24 bytes."""
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_kv)


def string(text: str | bytes) -> bytes:
    """A length and the text."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def key_value(key: str, value: object) -> bytes:
    """One metadata entry."""
    kind, payload = typed(value)
    return string(key) + struct.pack("<I", kind) + payload


def typed(value: object) -> tuple[int, bytes]:
    """GGUF value type and payload.

    Python ints become u32, or i32 / u64 / i64 where they must; floats f32; str and bytes strings; numpy scalars and
    arrays keep their type; a list becomes an array of strings, i32, f32 or bool.
    """
    if isinstance(value, (bool, np.bool_)):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, (str, bytes)):
        return STRING, string(value)
    if isinstance(value, np.generic):
        return _GGUF_TYPES[value.dtype.str[1:]], value.tobytes()
    if isinstance(value, int):
        small = -(2**31) <= value < 2**32
        dtype = ("<u4" if small else "<u8") if value >= 0 else ("<i4" if small else "<i8")
        return typed(np.dtype(dtype).type(value))
    if isinstance(value, float):
        return typed(np.float32(value))
    if isinstance(value, np.ndarray):
        return ARRAY, struct.pack("<IQ", _GGUF_TYPES[value.dtype.str[1:]], value.size) + value.tobytes()
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (str, bytes)):
            return ARRAY, struct.pack("<IQ", STRING, len(value)) + b"".join(map(string, value))
        array = np.asarray(value)
        return typed(array if array.dtype == bool else array.astype("<i4" if array.dtype.kind == "i" else "<f4"))
    raise TypeError(f"no GGUF type for {type(value).__name__}")


def tensor_entry(name: str | bytes, ne: Sequence[int], kind: int, offset: int) -> bytes:
    """One entry of the tensor directory; `offset` counts from the start of the data section."""
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def _padded(raw: bytes, alignment: int) -> bytes:
    return raw + bytes(-len(raw) % alignment)
