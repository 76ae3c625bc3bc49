"""The prefix tree in a file, for the next process that loads the same model.

    start    magic, version, bytes of the header, nodes
    header   JSON: what the rows are bound to, see `tsgg.fingerprint`
    index    a record for each node, parents before children: parent, tokens, how far rings were written, bytes of its block
    sha256   of all that
    blocks   of each node: token ids (int32), cells lane by lane, the state behind them if there is one
    sha256   of all that

Branches come in the order of their last use, so that a smaller budget takes the end of the file. A file is checked whole before
the tree learns of it, sizes before memory is taken for them. The checksums tell damage; they do not tell who wrote the file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tsgg.engine.records import TOKEN, Record, arrays
from tsgg.errors import OutOfMemoryError, TsggError
from tsgg.memory.rows import RowCopies
from tsgg.models.base import MAX_CONTEXT

MAGIC = b"tsggtree"
VERSION = 1  # another layout, or code that computes other bits from the same file
START = struct.Struct("<8sIII")
INDEX = struct.Struct("<iIIQ")
DIGEST = hashlib.sha256().digest_size
MOST_HEADER = 1 << 20  # bytes
PIECE = 1 << 20  # bytes of a block that nobody wants, read to be checked


def write(path: str | os.PathLike[str], binding: Mapping[str, str], records: Sequence[Record]) -> None:
    """Writes a file that only its owner may read: it holds what people wrote. Until it is whole, one of that name stays.

    Raises `TsggError` where it cannot be written.
    """
    path = Path(path)
    header = json.dumps(binding).encode()
    index = (INDEX.pack(r.parent, len(r.tokens), r.state.highest if r.state else 0, r.nbytes) for r in records)
    with _os_errors(path, "written"), _replacing(path) as file:
        digest = hashlib.sha256()

        def put_out(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        put_out(START.pack(MAGIC, VERSION, len(header), len(records)) + header + b"".join(index))
        put_out(digest.digest())
        for array in itertools.chain.from_iterable(record.arrays() for record in records):
            put_out(_bytes(np.ascontiguousarray(array)))
        file.write(digest.digest())


def read(
    path: str | os.PathLike[str], binding: Mapping[str, str], rows: RowCopies, vocab_size: int, budget: int
) -> list[Record]:
    """What a file holds, of which the branches used last as far as `budget` bytes go.

    Raises `TsggError` for a file that is missing, damaged, cut, of another version or bound to something else, and
    `OutOfMemoryError`.
    """
    path = Path(path)
    with _os_errors(path, "read"):
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise TsggError(f"{path}: is not a file, expected a saved prefix cache")
        with open(path, "rb") as file:
            source = _Source(path, file, found.st_size)
            index = _read_head(source, binding, rows)
            wanted = _used_last(index, budget)
            try:
                records = [_read_block(source, node, rows, vocab_size, i in wanted) for i, node in enumerate(index)]
            except MemoryError as error:
                raise OutOfMemoryError(f"{path}: no memory for {budget} bytes of saved prefixes") from error
            source.check_digest()
    places = {i: place for place, i in enumerate(sorted(wanted))}
    return [
        Record(places.get(node.parent, -1), record.tokens, record.cells, record.state)
        for node, record in zip(index, records, strict=True)
        if record is not None
    ]


@dataclass(frozen=True, slots=True)
class _Indexed:
    """A record of the index, checked."""

    parent: int
    count: int  # tokens
    end: int  # tokens from the root
    highest: int  # of its state; 0: there is none
    nbytes: int  # of its block


class _Source:
    """A file that is read once, from its start to its end, never past it, and digested on the way."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self.path, self._file, self.left = path, file, size
        self._digest = hashlib.sha256()

    def damaged(self, what: str) -> TsggError:
        return TsggError(
            f"{self.path}: {what}: the saved prefix cache is damaged, and nothing of it was used. Delete it"
        )

    def take(self, size: int) -> bytearray:
        data = bytearray(self._checked(size))
        self.fill(memoryview(data))
        return data

    def fill(self, room: memoryview) -> None:
        size, at = self._checked(room.nbytes), 0
        while at < size:
            got = self._file.readinto(room[at:])  # type: ignore[attr-defined]
            if not got:
                raise self.damaged("it became shorter while it was read")
            at += got
        self.left -= size
        self._digest.update(room)

    def skip(self, size: int) -> None:
        room = memoryview(bytearray(min(size, PIECE)))
        while size:
            piece = room[: min(size, PIECE)]
            self.fill(piece)
            size -= piece.nbytes

    def check_digest(self) -> None:
        expected = self._digest.digest()
        if self.take(DIGEST) != expected:
            raise self.damaged("the checksum is wrong")

    def _checked(self, size: int) -> int:
        if size > self.left:
            raise self.damaged(f"it ends {size - self.left} bytes too early")
        return size


def _read_head(source: _Source, binding: Mapping[str, str], rows: RowCopies) -> list[_Indexed]:
    """Everything before the blocks."""
    magic, version, header_bytes, count = START.unpack(source.take(START.size))
    if magic != MAGIC:
        raise TsggError(f"{source.path}: is not a saved prefix cache")
    if version != VERSION:
        raise TsggError(
            f"{source.path}: a saved prefix cache of version {version}, this tsgg reads {VERSION}. Save it again"
        )
    if header_bytes > MOST_HEADER:
        raise source.damaged(f"a header of {header_bytes} bytes")
    header = source.take(header_bytes)
    index = source.take(count * INDEX.size)
    source.check_digest()
    _check_binding(source, header, binding)
    nodes: list[_Indexed] = []
    for parent, tokens, highest, nbytes in INDEX.iter_unpack(index):
        if not -1 <= parent < len(nodes):
            raise source.damaged(f"node {len(nodes)} of {count} has the parent {parent}")
        end = tokens + (nodes[parent].end if parent >= 0 else 0)
        if not tokens or end > MAX_CONTEXT or (highest and not end <= highest <= MAX_CONTEXT):
            raise source.damaged(f"node {len(nodes)} has {tokens} tokens up to {end}, and a state up to {highest}")
        expected = tokens * (TOKEN.itemsize + rows.row_bytes) + (rows.state_bytes(highest) if highest else 0)
        if nbytes != expected:
            raise source.damaged(f"node {len(nodes)} has {nbytes} bytes, expected {expected}")
        nodes.append(_Indexed(parent, tokens, end, highest, nbytes))
    blocks = sum(node.nbytes for node in nodes)
    if blocks + DIGEST != source.left:
        raise source.damaged(f"{source.left} bytes follow the index, expected {blocks + DIGEST}")
    return nodes


def _check_binding(source: _Source, header: bytearray, binding: Mapping[str, str]) -> None:
    try:
        saved = json.loads(header)
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict) or saved.keys() != binding.keys():
        raise source.damaged("the header cannot be read")
    for name, here in binding.items():
        if (there := saved[name]) != here:
            raise TsggError(
                f"{source.path}: another {name}: {ascii(there)[:200]} where it was saved, {ascii(here)[:200]} here. What this "
                "model computes would not be the same bits, so nothing of the file was used. Delete it, or save another one"
            )


def _used_last(index: list[_Indexed], budget: int) -> set[int]:
    """The nodes of the branches that come last, with all that they go on from, as far as the budget of a tree goes."""
    wanted: set[int] = set()
    for last in reversed(range(len(index))):
        path, at = [], last
        while at >= 0 and at not in wanted:
            path.append(at)
            at = index[at].parent
        size = sum(index[i].nbytes - index[i].count * TOKEN.itemsize for i in path)
        if size <= budget:
            wanted.update(path)
            budget -= size
    return wanted


def _read_block(source: _Source, node: _Indexed, rows: RowCopies, vocab_size: int, wanted: bool) -> Record | None:
    if not wanted:
        source.skip(node.nbytes)
        return None
    tokens = np.frombuffer(source.take(node.count * TOKEN.itemsize), TOKEN)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise source.damaged(f"token ids {tokens.min()}..{tokens.max()}, the model has 0..{vocab_size - 1}")
    cells = rows.new_cells(node.count)
    state = rows.new_state(node.end, node.highest) if node.highest else None
    for array in arrays(cells, state):
        source.fill(_bytes(array))
    return Record(node.parent, tokens.tolist(), cells, state)


def _bytes(array: NDArray[Any]) -> memoryview:
    """Of a contiguous array, in place."""
    return array.reshape(-1).view(np.uint8).data


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file beside `path` that takes its place once all went well."""
    if path.is_dir():
        raise TsggError(f"{path}: is a folder, expected a file to write to")
    descriptor, name = mkstemp(dir=path.parent, prefix=".tsgg-", suffix=".part")
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def _os_errors(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise TsggError(f"{path}: cannot be {done} ({getattr(error, 'strerror', None) or error})") from error
