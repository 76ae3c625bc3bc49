"""`python -m benchmarks diagnose`: how far a verify row is from the one-row decode of the same position, teacher-forced.

For every row count the rows of a text are forwarded in windows, and their logits compared with those of single rows:
largest difference, argmax flips, and the margin (top two) at a flip. On the CPU all of it is zero; elsewhere this is the
bound that README states. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.workloads import CODE
from tsgg.gguf import Metadata
from tsgg.model import Model
from tsgg.pull import resolve_model
from tsgg.speculative.protocol import Batch, Want
from tsgg.tokenizer import Tokenizer

ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="path or name [smollm2-135m]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--tokens", type=int, default=96, help="rows of text compared [%(default)s]")
    parser.add_argument("--context", type=int, default=64, help="tokens before them [%(default)s]")


def main(arguments: argparse.Namespace) -> int:
    kind = arguments.cache_type
    with Model(
        resolve_model(arguments.model), device=arguments.device, n_ctx=1024, cache_type_k=kind, cache_type_v=kind
    ) as model:
        ids = _text(model.file.metadata, arguments.context + arguments.tokens)
        single = _rows(model, ids, arguments.context, 1)
        report: dict[str, Any] = {}
        for rows in ROWS:
            report[str(rows)] = _compare(_rows(model, ids, arguments.context, rows), single)
            entry = report[str(rows)]
            print(f"{rows:3} rows: largest difference {entry['largest']:.3g}, {entry['flips']} of {len(single)} argmax flips"
                  + (f", largest margin lost {entry['margin']:.3g}" if entry["flips"] else ""))  # fmt: skip
        print(json.dumps({"device": model.device.name, "cache": kind, "rows": report}))
    return 0


def _text(metadata: Metadata, length: int) -> list[int]:
    ids = Tokenizer.from_metadata(metadata).encode(CODE)
    return (ids * (1 + length // len(ids)))[:length]


def _rows(model: Model, ids: list[int], context: int, rows: int) -> NDArray[np.float32]:
    """[tokens, vocab] logits of the text behind `context`, `rows` at a time."""
    sequence = model.new_sequence()
    model.forward(Batch((sequence,), np.array([ids[:context]]), Want(logits="none")))
    sequence.commit(context)
    found = []
    for start in range(context, len(ids), rows):
        window = ids[start : start + rows]
        answer = model.forward(Batch((sequence,), np.array([window]), Want(logits="all")))
        found += [answer.logits(0, row).copy() for row in range(len(window))]
        sequence.commit(len(window))
    model.release(sequence)
    return np.stack(found)


def _compare(rows: NDArray[np.float32], single: NDArray[np.float32]) -> dict[str, float]:
    top = np.sort(single, axis=1)[:, -2:]
    flips = rows.argmax(axis=1) != single.argmax(axis=1)
    margins = (top[:, 1] - top[:, 0])[flips]
    return {
        "largest": float(np.abs(rows - single).max()),
        "flips": int(flips.sum()),
        "margin": float(margins.max()) if flips.any() else 0.0,
    }
