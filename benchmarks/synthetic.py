"""`python -m benchmarks synthetic KIND OUT`: a big GGUF file with the hyper-parameters of a real model and random weights.

Such a file costs a step exactly what the real one costs, whatever it says. Kinds stand in modules of this package named
synthetic_FAMILY, each with a table KINDS. Needs the package `gguf`. One tensor is in memory at a time.
"""

from __future__ import annotations

import argparse
import math
import pkgutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import benchmarks
from tsgg.errors import UsageError
from tsgg.ggml.library import ffi, lib
from tsgg.gguf import GGML_TYPES, read_gguf
from tsgg.tokenizer.bpe import byte_characters

Array = NDArray[np.float32]
Fill = Callable[[np.random.Generator, int, tuple[int, int]], Array]  # generator, first row, (rows, columns) -> values

TYPE_IDS = {info.name.lower(): number for number, info in GGML_TYPES.items()}
PIECE = 1 << 23  # elements made and quantised at once: 32 MiB of floats
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NORMAL, CONTROL, UNUSED = 1, 3, 5  # token types


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]  # ne: the fastest dimension first
    type: str = "f32"  # a name of tsgg.gguf.types, in any case
    fill: Fill | None = None  # None: normal, with a deviation of one over the root of the columns


@dataclass(frozen=True, slots=True)
class Recipe:
    """A file to be written."""

    architecture: str
    metadata: Mapping[str, object]  # without the tokenizer; bool, int (u32), float (f32), str or a list of one of them
    tensors: Sequence[Tensor]
    vocab: int  # tokens, those that stand for nothing too
    pre: str  # pre-tokenizer of the vocabulary that is made up


@dataclass(frozen=True, slots=True)
class Options:
    """What a kind may be told."""

    type: str  # of the matrices
    noise: float | None  # accepting kinds: how far the draft head is from the trunk; None is the kind's own


Kind = tuple[str, Callable[[Options], Recipe]]  # summary, maker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = _kinds()
    summary = "; ".join(f"{name}: {text}" for name, (text, _) in kinds.items())
    parser.add_argument("kind", choices=kinds, metavar="KIND", help=summary)
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write")
    parser.add_argument("--type", default="q8_0", help="type of the matrices, such as q8_0, q4_K, f16 [%(default)s]")
    parser.add_argument("--noise", type=float, help="accepting kinds: more of it, less accepted [the kind's own]")
    parser.add_argument("--tokenizer", type=Path, metavar="GGUF", help="take the vocabulary of this file [made up]")


def main(arguments: argparse.Namespace) -> int:
    recipe = _kinds()[arguments.kind][1](Options(arguments.type, arguments.noise))
    size = write(arguments.out, recipe, arguments.tokenizer)
    print(f"{arguments.out}: {size / 2**20:.0f} MiB")
    return 0


def normal(deviation: float, mean: float = 0.0) -> Fill:
    """Independent values of a normal distribution."""

    def fill(generator: np.random.Generator, _first: int, shape: tuple[int, int]) -> Array:
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        return values

    return fill


def write(path: Path, recipe: Recipe, tokenizer: Path | None = None) -> int:
    """Writes the file, of which it returns the bytes. Same recipe, same file.

    Raises `UsageError` without the package `gguf`, or for a type or a shape that cannot be written.
    """
    try:
        import gguf
    except ImportError:
        raise UsageError("synthetic files are written with the package gguf: `pip install gguf`") from None
    kinds = [_type_of(tensor) for tensor in recipe.tensors]
    writer = gguf.GGUFWriter(path, recipe.architecture)
    vocabulary = (
        made_up_vocabulary(recipe.vocab, recipe.pre) if tokenizer is None else _vocabulary_of(tokenizer, recipe)
    )
    for key, value in {"general.name": path.stem, **recipe.metadata, **vocabulary}.items():
        _add(writer, key, value)
    for tensor, kind in zip(recipe.tensors, kinds, strict=True):
        shape = [*tensor.shape[:0:-1], _row_bytes(tensor, kind)]
        raw = gguf.GGMLQuantizationType(kind)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(recipe.tensors, kinds, strict=True):
        writer.write_tensor_data(_encoded(tensor, kind))
    writer.close()
    return path.stat().st_size


# -- tensors -----------------------------------------------------------------------------------------------------------


def _type_of(tensor: Tensor) -> int:
    kind = TYPE_IDS.get(tensor.type.lower())
    if kind is None or lib.ggml_quantize_requires_imatrix(kind):
        raise UsageError(f"{tensor.name}: type {tensor.type!r}: expected one such as f32, f16, q8_0, q6_K, q4_K, q4_0")
    if tensor.shape[0] % GGML_TYPES[kind].block_size:
        block = GGML_TYPES[kind].block_size
        raise UsageError(f"{tensor.name}: rows of {tensor.shape[0]} are no whole blocks of {block} ({tensor.type})")
    return kind


def _row_bytes(tensor: Tensor, kind: int) -> int:
    info = GGML_TYPES[kind]
    return tensor.shape[0] // info.block_size * info.type_size


def _encoded(tensor: Tensor, kind: int) -> NDArray[np.uint8]:
    """All bytes of the tensor: `[rows, bytes of a row]`."""
    columns, rows = tensor.shape[0], math.prod(tensor.shape[1:])
    generator = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    fill = tensor.fill or normal(columns**-0.5)
    out = np.empty((rows, _row_bytes(tensor, kind)), np.uint8)
    step = max(1, PIECE // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        values = np.ascontiguousarray(fill(generator, first, (count, columns)), np.float32)
        source, target = ffi.from_buffer("float[]", values), ffi.from_buffer("char[]", out[first : first + count])
        lib.ggml_quantize_chunk(kind, source, target, 0, count, columns, ffi.NULL)
    return out


# -- metadata ----------------------------------------------------------------------------------------------------------


def made_up_vocabulary(size: int, pre: str) -> dict[str, object]:
    """Byte-level tokenizer metadata: the 256 bytes, one merge, marks of turns, and tokens that stand for nothing."""
    characters = sorted(byte_characters(), key=lambda character: byte_characters()[character])
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*characters, "th", *marks]
    types = [NORMAL] * (len(tokens) - len(marks)) + [CONTROL] * len(marks)
    unused = size - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *(f"[{i}]" for i in range(unused))],
        "tokenizer.ggml.token_type": [*types, *[UNUSED] * unused],
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _vocabulary_of(path: Path, recipe: Recipe) -> dict[str, object]:
    """The tokenizer metadata of another file, with tokens that stand for nothing up to the recipe's size."""
    metadata = read_gguf(path).metadata
    values: dict[str, Any] = {key: metadata[key] for key in metadata if key.startswith("tokenizer.")}
    values = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}
    tokens = values.get("tokenizer.ggml.tokens", [])
    unused = recipe.vocab - len(tokens)
    if not tokens or unused < 0:
        raise UsageError(f"{path} has a vocabulary of {len(tokens)} tokens, expected 1 to {recipe.vocab}")
    padding: dict[str, list[Any]] = {
        "tokens": [f"[{i}]" for i in range(unused)],
        "token_type": [UNUSED] * unused,
        "scores": [0.0] * unused,
    }
    for name, more in padding.items():
        if (key := f"tokenizer.ggml.{name}") in values:
            values[key] = [*values[key], *more]
    return values


def _add(writer: Any, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _kinds() -> dict[str, Kind]:
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks.")]
    families = [import_module(name) for name in names if name.startswith("benchmarks.synthetic_")]
    return {name: kind for family in families for name, kind in family.KINDS.items()}
