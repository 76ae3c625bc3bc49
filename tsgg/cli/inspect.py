"""`tsgg inspect`: what a file is, what it costs, and what speculation will do with it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tsgg.check_head import TEXT, TOKENS, WINDOW, HeadCheck, check_head
from tsgg.cli.arguments import add_model, print_json
from tsgg.cli.bars import Bars
from tsgg.cli.loading import load
from tsgg.gguf import GGML_TYPES
from tsgg.llm import LLM
from tsgg.memory.memory import full_memory_bytes, memory_bytes
from tsgg.model import Model
from tsgg.platform import resident_memory
from tsgg.probe import RowExactness, probe_rows

HELP = "show a model's architecture, memory, tokenizer, row exactness and speculation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--check-head", action="store_true", help="how often the model agrees with its draft head on a short text"
    )


def run(arguments: argparse.Namespace) -> int:
    with Bars() as bars, load(arguments, bars, n_seq=None) as llm:
        exactness = llm.engine.call(lambda: probe_rows(llm.model))
        numbers, lines = _numbers(llm, exactness, arguments), _lines(llm, exactness, arguments)
        path = llm.model.file.paths[0]
        tokens = llm.tokenizer.encode(TEXT)[:TOKENS] if arguments.check_head else []
    if arguments.check_head:
        check = _check_head(str(path), tokens, arguments)
        lines["head check"] = "no draft head in the file" if check is None else str(check)
        numbers["head_check"] = None if check is None else {**asdict(check), "shares": check.shares}
    if arguments.json:
        print_json(numbers)
    else:
        width = max(map(len, lines))
        for name, value in lines.items():
            print(f"{name:<{width}}  {value}")
    return 0


def _lines(llm: LLM, exactness: RowExactness, arguments: argparse.Namespace) -> dict[str, str]:
    """For people."""
    model, tokenizer = llm.model, llm.tokenizer
    ends = ", ".join(f"{token} {tokenizer.token_text(token)!r}" for token in sorted(tokenizer.end_of_generation))
    held = {name: size for name, size in _held(model).items() if size is not None}
    caches = (
        f"{own / 2**20:.0f} MiB at {context} tokens" + (f" (full: {full / 2**20:.0f})" if own < full else "")
        for context, own, full in _cache(llm, arguments)
    )
    return {
        "file": str(model.file.paths[0]),
        "name": str(model.file.metadata.get("general.name", "-")),
        "architecture": f"{model.arch.name}, {model.arch.layers} layers, embedding {model.arch.embedding}",
        "weights": model.quant_types(),
        "context": f"{model.n_ctx} tokens, trained on {model.arch.context}",
        "device": f"{model.device.name}, {model.n_threads} threads",
        "memory": str(model.plan),
        "bytes": "MiB: " + ", ".join(f"{name} {size / 2**20:.1f}" for name, size in held.items()),
        "cache": ", ".join(caches),
        "tokenizer": f"{tokenizer.kind}/{tokenizer.pre or '-'}, {tokenizer.vocab_size} tokens, "
        f"BOS {'added' if tokenizer.add_bos else 'not added'}",
        "ends at": ends or "-",
        "chat template": "yes" if llm.template is not None else "no",
        "row exactness": str(exactness),
        "draft heads": model.draft_heads(),
        "speculation": llm.speculation_report(),
    }


def _numbers(llm: LLM, exactness: RowExactness, arguments: argparse.Namespace) -> dict[str, Any]:
    """For programs: sizes in bytes, lengths in tokens."""
    model, tokenizer, options = llm.model, llm.tokenizer, llm.speculation
    types: dict[str, int] = {}
    for info in model.file.tensors.values():
        name = GGML_TYPES[info.type].name
        types[name] = types.get(name, 0) + info.nbytes
    return {
        "file": str(model.file.paths[0]),
        "name": model.file.metadata.get("general.name"),
        "architecture": {
            "name": model.arch.name,
            "layers": model.arch.layers,
            "embedding": model.arch.embedding,
        },
        "weights": types,
        "context": {"tokens": model.n_ctx, "trained": model.arch.context, "sequences": model.plan.sequences},
        "device": {"name": model.device.name, "threads": model.n_threads},
        "memory": {**asdict(model.plan), "needed": model.plan.needed},
        "bytes": _held(model),
        "cache": [{"tokens": context, "bytes": own, "full": full} for context, own, full in _cache(llm, arguments)],
        "tokenizer": {
            "kind": tokenizer.kind,
            "pre": tokenizer.pre,
            "tokens": tokenizer.vocab_size,
            "add_bos": tokenizer.add_bos,
            "ends_at": sorted(tokenizer.end_of_generation),
        },
        "chat_template": llm.template is not None,
        "row_exactness": {**asdict(exactness), "rows": exactness.rows, "claimed": exactness.claimed},
        "draft_heads": {"blocks": model.draft_blocks, "refusal": model.head_refusal},
        "speculation": {**asdict(options), "report": llm.speculation_report()},
    }


def _held(model: Model) -> dict[str, int | None]:
    """Bytes that the loaded model holds, by purpose, and those of the process that are resident."""
    return {**model.bytes_by_purpose(), "resident": resident_memory()}


def _cache(llm: LLM, arguments: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Of a context now and of 32k tokens: its length, bytes of a sequence's cache, and those of every position in every layer."""
    layers, kinds = llm.model.arch.attention(), (arguments.cache_type_k, arguments.cache_type_v)
    return [
        (context, memory_bytes(layers, context, 1, *kinds), full_memory_bytes(layers, context, 1, *kinds))
        for context in sorted({llm.model.n_ctx, 32768})
    ]


def _check_head(path: str, tokens: list[int], arguments: argparse.Namespace) -> HeadCheck | None:
    """In a small context of its own, after the model that was inspected is gone; None where the file has no draft head."""
    size = len(tokens) + WINDOW
    with Model(path, device=arguments.device, n_ctx=size, n_threads=arguments.threads) as model:
        head = model.draft_model(arguments.draft_model) if arguments.draft_model else model.draft_head(required=True)
        return None if head is None else check_head(model, model.new_sequence(), head, tokens)
