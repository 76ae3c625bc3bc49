"""Weights of a model: checked against what the architecture declares, then placed.

On the CPU a model of up to COPY_UP_TO bytes is copied into memory with huge pages, where the system has them: every step reads
all of it, and walking the page tables of a mapping took 7 % of a decode step of SmolLM2 135M (5 % of Gemma 3 270M). A tensor of
a larger one, and a table of which a step reads single rows, stays where the file's mapping has it (no copy), except
* Q4_0, IQ4_NL and MXFP4 matrices, which go to a CPU_REPACK buffer: faster, and their rows stay exact
  (Q4_K would be faster there too, but its rows then depend on how many there are); of a table of these types that is the LM
  head too, a second copy goes there, for rows cannot be gathered from it;
* Q4_1 matrices, which are regrouped into tiles (`tsgg.tiles`); a table that is the LM head too has a second copy there as well;
* a tensor whose address in the mapping is not aligned, which is copied.
On other devices everything is copied, and a table that the device cannot gather rows from stays in the mapping.

Copied matrices that are multiplied by the same rows (q, k and v; gate and up) become one: a decode step of SmolLM2 135M was 4 %
faster with 90 products less, one of Gemma 3 270M 1 %.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsgg import tiles
from tsgg.errors import ModelFileError, UnsupportedError
from tsgg.ggml import buffers
from tsgg.ggml.buffers import F32, I32, Tensor, TensorSet
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Device
from tsgg.ggml.library import ffi, lib
from tsgg.gguf import GGML_TYPES, GGUFFile, TensorInfo
from tsgg.models.base import TensorSpec
from tsgg.platform import huge_pages
from tsgg.settings import settings

log = logging.getLogger("tsgg.weights")

REPACKED_TYPES = (lib.GGML_TYPE_Q4_0, lib.GGML_TYPE_IQ4_NL, lib.GGML_TYPE_MXFP4)
COPY_UP_TO = 1 << 30  # bytes: beyond, loading would take longer than half a second, and the memory is not shared
AROUND = 1 << 17  # bytes that the system maps around a page that is read: 64 KiB, doubled for good measure
ALIGNMENT = 32  # bytes, what ggml's CPU kernels assert


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor of the file goes: "mapped", "repacked", "tiled", "copied" (device memory) or "host" (gathered here)."""

    info: TensorInfo
    spec: TensorSpec
    where: str
    parts: tuple[TensorInfo, ...] = ()  # of the file, whose rows `info` joins in this order; () = it is the file's own

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """What is read from the file."""
        return self.parts or (self.info,)


def check(file: GGUFFile, specs: Iterable[TensorSpec]) -> list[tuple[TensorInfo, TensorSpec]]:
    """The file's tensors for the architecture's declarations.

    Raises `ModelFileError` for one that is missing or has another shape, `UnsupportedError` for a type that its use
    does not allow.
    """
    found = []
    for spec in specs:
        info = file.tensors.get(spec.name)
        if info is None:
            if spec.optional:
                continue
            raise ModelFileError(f"{file.paths[0].name}: tensor {spec.name} is missing, the architecture needs it")
        shape = info.shape + (1,) * (len(spec.shape) - len(info.shape))
        matches = len(shape) == len(spec.shape) or all(n == 1 for n in shape[len(spec.shape) :])
        if not matches or any(want not in (0, got) for got, want in zip(shape, spec.shape, strict=False)):
            expected = " x ".join(str(n) if n else "any" for n in spec.shape)
            got = " x ".join(map(str, info.shape))
            raise ModelFileError(f"{file.paths[0].name}: tensor {spec.name} has shape {got}, expected {expected}")
        if spec.role == "vector" and info.type != F32:
            kind = GGML_TYPES[info.type].name
            raise UnsupportedError(f"{file.paths[0].name}: tensor {spec.name} is {kind}, norms and biases must be F32")
        if spec.role != "vector" and info.type != F32 and lib.ggml_get_type_traits(info.type).to_float == ffi.NULL:
            kind = GGML_TYPES[info.type].name
            raise UnsupportedError(f"{file.paths[0].name}: tensor {spec.name} is {kind}, which cannot be computed with")
        found.append((info, spec))
    return found


def plan(pairs: Iterable[tuple[TensorInfo, TensorSpec]], device: Device) -> list[Placement]:
    """Decides where every tensor goes. Allocates nothing."""
    repack = device.extra_buffer_type("CPU_REPACK") if device.is_cpu and settings.repack else None
    pairs = list(pairs)
    names = {spec.name for _, spec in pairs}
    tied = "output.weight" not in names
    size = sum(info.nbytes for info, _ in pairs)
    maps = settings.mmap if settings.mmap is not None else size > COPY_UP_TO or not huge_pages()
    placements = []
    for info, spec in pairs:
        head = None  # a tied head: the table again, as a matrix
        if tied and spec.name == "token_embd.weight" and spec.role == "table":
            head = replace(spec, name="output.weight", role="matrix")
        layout = (
            None if head is None else _layout(info, head, device, repack)
        )  # a table's rows cannot be gathered from it
        where = "copied"
        if device.is_cpu:
            whole = spec.role != "table" or (head is not None and layout is None)
            stays = settings.mmap is not False and (maps or not whole)
            where = "mapped" if stays and info.offset % ALIGNMENT == 0 else "copied"
            where = _layout(info, spec, device, repack) or where
        elif spec.role == "table" and not _gathers(info, device):
            where = "host"
        placements.append(Placement(info, spec, where))
        if head is not None and (layout is not None or where == "host"):
            placements.append(Placement(info, head, layout or "copied"))
    return _join(placements)


def _join(placements: list[Placement]) -> list[Placement]:
    """Matrices that may be rows of one are, where they are copied anyway and agree in type and place.

    Of a matrix of which a part is missing or differs the others stay alone, too.
    """
    groups: dict[str, list[Placement]] = {}
    for item in placements:
        if item.spec.joins:
            groups.setdefault(item.spec.joins, []).append(item)
    joined: dict[str, Placement] = {}
    for name, items in groups.items():
        first = items[0]
        alike = {(item.where, item.info.type, item.info.shape[0], len(item.info.shape)) for item in items}
        if (
            len(items) > 1
            and alike == {(first.where, first.info.type, first.info.shape[0], 2)}
            and first.where != "mapped"
        ):
            parts = tuple(item.info for item in items)
            shape = (first.info.shape[0], sum(part.shape[1] for part in parts))
            info = replace(first.info, name=name, shape=shape, nbytes=sum(part.nbytes for part in parts))
            joined[name] = Placement(info, replace(first.spec, name=name, shape=shape), first.where, parts)
    # Each matrix stands where its first part stood.
    seen: set[str] = set()
    result = []
    for item in placements:
        name = item.spec.joins
        if name not in joined:
            result.append(item)
        elif name not in seen:
            seen.add(name)
            result.append(joined[name])
    return result


def _layout(info: TensorInfo, spec: TensorSpec, device: Device, repack: Any) -> str | None:
    """Where a tensor goes that is not multiplied by as the file has it: "repacked", "tiled" or None."""
    if spec.role not in ("matrix", "experts") or not settings.repack:
        return None
    if repack is not None and info.type in REPACKED_TYPES and _runs_repacked(info, spec, device, repack):
        return "repacked"
    return "tiled" if device.is_cpu and spec.role == "matrix" and tiles.fits(info) else None


class ModelWeights:
    """Placed tensors by name (`tsgg.models.base.Weights`). Owns the file's mappings; freed by `close`."""

    def __init__(
        self,
        file: GGUFFile,
        placements: list[Placement],
        device: Device,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress(done, total)` counts bytes that are copied. Raises `OutOfMemoryError`."""
        self.device = device
        self._maps = [_map(path) for path in file.paths]
        self._tensors: dict[str, Tensor] = {}
        self._sets: list[TensorSet] = []
        self._host: dict[Any, TensorInfo] = {}
        self._repacked: set[Any] = set()
        self._tiled: set[Any] = set()
        try:
            self._place(placements, progress or (lambda done, total: None))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def scalar(self, name: str) -> float | None:
        """The value of an F32 tensor of one element."""
        tensor = self._tensors.get(name)
        return None if tensor is None else float(buffers.read(tensor).reshape(-1)[0])

    @property
    def files(self) -> tuple[memoryview, ...]:
        """The bytes of the model's files, part by part, as they were opened."""
        return tuple(self._maps)

    def repacked(self, tensor: Tensor) -> bool:
        return tensor in self._repacked

    def tiled(self, tensor: Tensor) -> bool:
        """Whether products with it are `GraphBuilder.mul_tiles`."""
        return tensor in self._tiled

    def host_table(self, tensor: Tensor) -> bool:
        """Whether rows of this table are gathered on the host because the device cannot."""
        return tensor in self._host

    def gather_table(self, table: Tensor, ids: list[int], out: NDArray[np.float32]) -> None:
        """Rows `ids` of one of the host's tables, dequantized into `out` [rows, columns]."""
        info = self._host[table]
        row = info.nbytes // info.shape[1]
        memory = ffi.from_buffer(self._maps[info.file]) + info.offset
        convert = lib.ggml_get_type_traits(info.type).to_float
        for i, token in enumerate(ids):
            target = ffi.cast("float *", ffi.from_buffer(out[i]))
            if info.type == F32:
                ffi.memmove(target, memory + token * row, row)
            else:
                convert(memory + token * row, target, info.shape[0])

    def close(self) -> None:
        """Frees device memory, then the mappings; a second call does nothing."""
        self._tensors.clear()
        for tensors in self._sets:
            tensors.close()
        self._sets.clear()
        for mapping in self._maps:
            mapping.release()
        self._maps.clear()

    def _place(self, placements: list[Placement], progress: Callable[[int, int], None]) -> None:
        groups: dict[str, list[Placement]] = {}
        for placement in placements:
            groups.setdefault(placement.where, []).append(placement)
        if mapped := groups.get("mapped"):
            tensors = self._new_set(mapped)
            bases = [tensors.map_host(memory, memory) for memory in self._maps]
            for item in mapped:
                buffer, base = bases[item.info.file]
                buffers.place(self._tensors[item.spec.name], buffer, base + item.info.offset)
        for item in groups.get("host", []):
            tensors = self._new_set([item])  # a description only: rows are gathered by `gather_table`
            self._host[self._tensors[item.spec.name]] = item.info
        total = sum(item.info.nbytes for where in ("repacked", "tiled", "copied") for item in groups.get(where, []))
        done = 0
        for where in ("repacked", "tiled", "copied"):
            if not (group := groups.get(where)):
                continue
            repack = self.device.extra_buffer_type("CPU_REPACK")
            self._new_set(group).allocate(
                repack if where == "repacked" else self.device.buffer_type, weights=True, clear=False
            )
            for item in group:
                tensor = self._tensors[item.spec.name]
                pieces = [self._maps[part.file][part.offset : part.offset + part.nbytes] for part in item.sources]
                whole = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
                if where == "tiled":
                    whole = tiles.regroup(item.info, whole)
                    self._tiled.add(tensor)
                elif where == "repacked":
                    self._repacked.add(tensor)
                buffers.write(tensor, whole)
                del whole, pieces
                for part in item.sources:
                    self._leave_pages(part)
                done += item.info.nbytes
                progress(done, total)

    def _leave_pages(self, part: TensorInfo) -> None:
        """What was copied need not stay resident in the mapping too: pages that are read again come back from the file.

        After each tensor: after the last one all of a file would have been resident twice for a moment. The system maps some
        pages around each that is read, so that those before and behind the tensor go as well.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        mapping = self._maps[part.file].obj
        assert isinstance(mapping, mmap.mmap)
        first = max(0, part.offset - AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, first, min(part.offset + part.nbytes + AROUND, len(mapping)) - first)

    def _new_set(self, group: list[Placement]) -> TensorSet:
        tensors = TensorSet(len(group))
        self._sets.append(tensors)
        for item in group:
            self._tensors[item.spec.name] = tensors.new(item.info.type, item.info.shape, item.spec.name)
        return tensors


def _map(path: Any) -> memoryview:
    with open(path, "rb") as handle:
        return memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))


def _runs_repacked(info: TensorInfo, spec: TensorSpec, device: Device, repack: Any) -> bool:
    """Asks the device about a product with this weight in a repack buffer, on descriptions alone."""
    g = GraphBuilder(capacity=16)
    weight = lib.ggml_new_tensor(g.ctx, info.type, len(info.shape), list(info.shape))
    buffer = lib.ggml_backend_buft_alloc_buffer(repack, 0)
    weight.buffer = buffer
    try:
        if spec.role == "experts":
            x = g.input("x", F32, info.shape[0], 1, 4)
            return device.supports(g.mul_mat_id(weight, x, g.input("ids", I32, 1, 4)))
        return device.supports(g.mul_mat(weight, g.input("x", F32, info.shape[0], 4)))
    finally:
        g.close()
        lib.ggml_backend_buffer_free(buffer)


def _gathers(info: TensorInfo, device: Device) -> bool:
    g = GraphBuilder(capacity=16)
    table = lib.ggml_new_tensor(g.ctx, info.type, len(info.shape), list(info.shape))
    supported = device.supports(g.get_rows(table, g.input("ids", I32, 4)))
    g.close()
    return supported
