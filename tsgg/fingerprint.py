"""What the bits of a cell follow from beside its tokens: where all of it is equal, rows that one process computed serve another."""

from __future__ import annotations

import hashlib
import platform
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from tsgg.ggml import library
from tsgg.ggml.buffers import CACHE_TYPES
from tsgg.memory.rows import RowCopies
from tsgg.model import Model
from tsgg.settings import settings
from tsgg.weights import check, plan

SAMPLE = (
    4096  # bytes, of either end of every tensor: whole files of many gigabytes would take longer to read than to load
)


def fingerprint(model: Model, rows: RowCopies) -> dict[str, str]:
    """Names, as an error message would use them, with values that are equal or different.

    Contexts, slots, threads and the place of a weight in memory are not among them: they change no bit.
    """
    libc = " ".join(platform.libc_ver()) or platform.platform()
    return {
        "model file": _model_file(model),
        "architecture": model.arch.name,
        "cache type": _cache_types(model),
        "cache layout": rows.layout,
        "device": f"{model.device.name} ({model.device.description})",
        "processor": ", ".join(f"{name}={value}" for name, value in sorted(library.cpu_features().items())),
        "build of ggml": f"{library.GGML_VERSION} {library.variant} {_extension()}",
        "choice of repacked weights": _repacked(model),
        "TS_PAIR_ROWS": str(int(settings.pair_rows)),
        "version of tsgg": version("tsgg"),
        "C library": libc,  # sines of positions, exponentials of states
        "byte order": sys.byteorder,
    }


def _model_file(model: Model) -> str:
    """SHA-256 over all headers, sizes, and both ends of every tensor, of the files that are mapped: one of the same name may
    have come in their place."""
    digest = hashlib.sha256()
    for number, memory in enumerate(model.weights.files):
        tensors = [info for info in model.file.tensors.values() if info.file == number]
        header = min((info.offset for info in tensors), default=len(memory))
        digest.update(f"{len(memory)} {header} ".encode())
        digest.update(memory[:header])
        for info in sorted(tensors, key=lambda info: info.offset):
            end = info.offset + info.nbytes
            digest.update(memory[info.offset : min(end, info.offset + SAMPLE)])
            digest.update(memory[max(info.offset, end - SAMPLE) : end])
    return digest.hexdigest()


def _cache_types(model: Model) -> str:
    names = {kind: name for name, kind in CACHE_TYPES.items()}
    arenas = model.memory.arenas.items()
    return ", ".join(f"{name} {names[arena.type_k]}/{names[arena.type_v]}" for name, arena in arenas)


def _repacked(model: Model) -> str:
    """Products of repacked weights, and of those in tiles, are other kernels', exact too, but not the same bits."""
    placements = plan(check(model.file, model.arch.tensors()), model.device)
    names = sorted(part.name for item in placements if item.where in ("repacked", "tiled") for part in item.sources)
    return f"{len(names)} {hashlib.sha256(' '.join(names).encode()).hexdigest()[:16]}" if names else "none"


@lru_cache(maxsize=1)
def _extension() -> str:
    """Of the kernels: another compiler, or other flags, may round otherwise."""
    path = sys.modules["tsgg._ggml"].__file__
    assert path is not None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
