"""A tiny model with a chat template."""

from __future__ import annotations

from pathlib import Path

from tests.gguf_writer import write_gguf
from tests.tiny_models import TinyLlama, metadata, tensors

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<s>assistant\n"


def write_chat_model(path: Path, **more: object) -> Path:
    """`more`: further metadata, with "." written as "__"."""
    values = {key.replace("__", "."): value for key, value in more.items()}
    shape = TinyLlama()
    return write_gguf(path, metadata(shape) | {"tokenizer.chat_template": TEMPLATE} | values, list(tensors(shape)))
