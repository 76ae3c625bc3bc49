"""Tiny vocabularies for tests that run without any model file."""

from __future__ import annotations

import numpy as np

from tsgg.gguf import Metadata
from tsgg.tokenizer.bpe import byte_characters

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_metadata() -> Metadata:
    """`gpt2`: the 256 bytes, two merges, ChatML marks (control) and one user-defined token."""
    characters = sorted(byte_characters(), key=lambda character: byte_characters()[character])
    marks = ["<|im_start|>", "<|im_end|>", "<tool>"]
    tokens = [*characters, "th", "the", *marks]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    return Metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.merges": ["t h", "th e"],
            "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
            "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }
    )


def sentencepiece_metadata() -> Metadata:
    """`llama`: specials, byte tokens, a few letters and two overlapping merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "c", "ab", "bc"]
    types = [2, 3, 3] + [6] * 256 + [1] * 6
    scores = [0.0] * 259 + [-3.0, -4.0, -5.0, -6.0, -2.0, -1.0]
    return Metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.scores": np.array(scores, np.float32),
        }
    )


def character_metadata() -> Metadata:
    """`gemma4`: specials, byte tokens, a few letters and two merges."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [3, 3, 3, 2] + [6] * 256
    letters = ["\u2581", "a", "b", "c", "ab", "bc", "\n"]
    return Metadata(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": [*tokens, *letters],
            "tokenizer.ggml.token_type": np.array(types + [1] * len(letters), np.int32),
            "tokenizer.ggml.merges": ["a b", "b c"],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
        }
    )


def extended(metadata: Metadata, texts: list[str], kinds: list[int], merges: tuple[str, ...] = ()) -> Metadata:
    """`metadata` with more tokens behind its own."""
    values = dict(metadata)
    values["tokenizer.ggml.tokens"] = [*metadata.get_strings("tokenizer.ggml.tokens"), *texts]
    types = metadata.get_array("tokenizer.ggml.token_type")
    values["tokenizer.ggml.token_type"] = np.array([*types, *kinds], np.int32)
    if "tokenizer.ggml.scores" in metadata:
        scores = metadata.get_array("tokenizer.ggml.scores")
        values["tokenizer.ggml.scores"] = np.array([*scores, *range(len(texts))], np.float32)
    else:
        values["tokenizer.ggml.merges"] = [*metadata.get_strings("tokenizer.ggml.merges"), *merges]
    return Metadata(values)


KINDS = {"gpt2": byte_level_metadata(), "llama": sentencepiece_metadata(), "gemma4": character_metadata()}
"""A vocabulary of every kind of tokenizer."""
