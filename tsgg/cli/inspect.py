"""`tsgg inspect`: what a file is, what it costs, and what speculation will do with it."""

from __future__ import annotations

import argparse
from typing import Any

from tsgg.check_head import TEXT, TOKENS, WINDOW, check_head
from tsgg.cli.arguments import add_model, print_json
from tsgg.cli.bars import Bars
from tsgg.cli.loading import load
from tsgg.llm import LLM
from tsgg.memory.memory import full_memory_bytes, memory_bytes
from tsgg.model import Model
from tsgg.platform import resident_memory
from tsgg.probe import probe_rows

HELP = "show a model's architecture, memory, tokenizer, row exactness and speculation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--check-head", action="store_true", help="how often the model agrees with its draft head on a short text"
    )


def run(arguments: argparse.Namespace) -> int:
    with Bars() as bars, load(arguments, bars, n_seq=None) as llm:
        report = _report(llm, arguments)
        path, tokens = llm.model.file.paths[0], llm.tokenizer.encode(TEXT)[:TOKENS]
    if arguments.check_head:
        report["head check"] = _check_head(str(path), tokens, arguments)
    if arguments.json:
        print_json(report)
    else:
        width = max(map(len, report))
        for name, value in report.items():
            print(f"{name:<{width}}  {value}")
    return 0


def _report(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = llm.model, llm.tokenizer
    ends = ", ".join(f"{token} {tokenizer.token_text(token)!r}" for token in sorted(tokenizer.end_of_generation))
    return {
        "file": str(model.file.paths[0]),
        "name": str(model.file.metadata.get("general.name", "-")),
        "architecture": f"{model.arch.name}, {model.arch.layers} layers, embedding {model.arch.embedding}",
        "weights": model.quant_types(),
        "context": f"{model.n_ctx} tokens, trained on {model.arch.context}",
        "device": f"{model.device.name}, {model.n_threads} threads",
        "memory": str(model.plan),
        "bytes": _bytes(model, arguments.json),
        "cache": _cache(llm, arguments),
        "tokenizer": f"{tokenizer.kind}/{tokenizer.pre or '-'}, {tokenizer.vocab_size} tokens, "
        f"BOS {'added' if tokenizer.add_bos else 'not added'}",
        "ends at": ends or "-",
        "chat template": "yes" if llm.template is not None else "no",
        "row exactness": str(llm.engine.call(lambda: probe_rows(model))),
        "draft heads": model.draft_heads(),
        "speculation": llm.speculation_report(),
    }


def _bytes(model: Model, numbers: bool) -> dict[str, int | None] | str:
    """What the loaded model holds, by purpose, and what of the process is resident."""
    sizes: dict[str, int | None] = {**model.bytes_by_purpose(), "resident": resident_memory()}
    if numbers:
        return sizes
    known = {name: size for name, size in sizes.items() if size is not None}
    return "MiB: " + ", ".join(f"{name} {size / 2**20:.1f}" for name, size in known.items())


def _cache(llm: LLM, arguments: argparse.Namespace) -> str:
    """Bytes of the cache now and at 32k tokens, beside what a cache of every position in every layer would take."""
    layers, kinds = llm.model.arch.attention(), (arguments.cache_type_k, arguments.cache_type_v)
    sizes = []
    for context in sorted({llm.model.n_ctx, 32768}):
        own, full = (count(layers, context, 1, *kinds) / 2**20 for count in (memory_bytes, full_memory_bytes))
        sizes.append(f"{own:.0f} MiB at {context} tokens" + (f" (full: {full:.0f})" if own < full else ""))
    return ", ".join(sizes)


def _check_head(path: str, tokens: list[int], arguments: argparse.Namespace) -> str:
    """In a small context of its own, after the model that was inspected is gone."""
    size = len(tokens) + WINDOW
    with Model(path, device=arguments.device, n_ctx=size, n_threads=arguments.threads) as model:
        head = model.draft_model(arguments.draft_model) if arguments.draft_model else model.draft_head(required=True)
        if head is None:
            return "no draft head in the file"
        return str(check_head(model, model.new_sequence(), head, tokens))
