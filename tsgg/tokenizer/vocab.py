"""A file's vocabulary, checked: token texts, their types and scores, special ids and the end-of-generation set."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tsgg.errors import ModelFileError
from tsgg.gguf import Metadata
from tsgg.tokenizer import pretokenize

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKENS = 1 << 24

# Texts that mark the end of an answer whatever the file's ids say: converters often name only one of them.
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# The first that is found: fill-in-the-middle markers between files and repositories end an answer too.
MIDDLE_TEXTS = (
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
MIDDLE_KEYS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
# Fill-in-the-middle markers inside a file: control, whatever type the file gives them.
MARK_TEXTS = (
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>",
)  # fmt: skip
# Headers of the channels of an answer: without them in the text nobody could tell reasoning from the answer.
CHANNEL_TEXTS = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>")


@dataclass(frozen=True)
class Vocabulary:
    """Everything about tokens that a file says. `texts[id]` is in the file's own encoding (see the tokenizer's kind)."""

    kind: str  # tokenizer.ggml.model
    pre: str  # tokenizer.ggml.pre, "" when absent
    texts: list[str]
    types: list[int]  # the file's, corrected by text: an end mark is control
    scores: list[float]  # empty when the file has none
    ids: dict[str, int]  # of a text that several tokens have the first
    special: dict[str, int | None]  # bos, eos, eot, eom, unk, pad
    end_of_generation: frozenset[int]
    suppressed: frozenset[int]  # never to be drawn: placeholders of images and sounds in text models
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_templates: dict[str, str]  # by name, that of the unnamed one is "default"

    @cached_property
    def marks(self) -> frozenset[str]:
        """Texts with which a conversation is built: control tokens, and user-defined ones that look like `<|channel>`."""
        types = self.types
        return frozenset(
            text
            for text, token in self.ids.items()
            if types[token] in (CONTROL, UNKNOWN) or (types[token] == USER_DEFINED and _looks_like_a_mark(text))
        )

    def split_texts(self, control: bool) -> dict[str, int]:
        """Tokens that are cut out of a text before anything else: user-defined ones, and on request the control ones."""
        wanted = (USER_DEFINED, CONTROL, UNKNOWN) if control else (USER_DEFINED,)
        types = self.types
        return {text: token for text, token in self.ids.items() if types[token] in wanted and text}


def token_count(metadata: Metadata, rows: int) -> int:
    """Tokens of a model whose embedding table has `rows` rows: those behind the tokens are padding, which nothing may draw.

    Without a tokenizer every row is a token. Raises `ModelFileError` for a token without a row.
    """
    texts = metadata.get_strings("tokenizer.ggml.tokens", None)
    if texts is None:
        return rows
    if not 0 < len(texts) <= rows:
        raise ModelFileError(
            f"the vocabulary has {len(texts)} tokens and token_embd.weight has {rows} rows, expected a row for every token: "
            "the file is damaged or was converted with another model's tokenizer, convert it again"
        )
    return len(texts)


def read_vocabulary(metadata: Metadata, rows: int = 0) -> Vocabulary:
    """Reads `tokenizer.*` of a model whose embedding table has `rows` rows, where that is known.

    Raises `ModelFileError` for metadata that contradicts itself.
    """
    texts = metadata.get_strings("tokenizer.ggml.tokens")
    count = len(texts)
    if not 0 < count <= MAX_TOKENS:
        raise ModelFileError(f"tokenizer.ggml.tokens has {count} entries, expected 1 to {MAX_TOKENS}")
    ids = dict(zip(reversed(texts), range(count - 1, -1, -1), strict=True))
    types = _per_token(metadata, "token_type", count, "iu") or [NORMAL] * count
    kind = metadata.get_str("tokenizer.ggml.model")
    _check_bytes(texts, types)
    pre = metadata.get_str("tokenizer.ggml.pre", "")
    special = {name: named_token(metadata, key, count) for name, key in _SPECIAL_KEYS.items()}
    if kind == "llama":  # SentencePiece's defaults
        for name, default in (("bos", 1), ("eos", 2), ("unk", 0)):
            if f"tokenizer.ggml.{_SPECIAL_KEYS[name]}" not in metadata and default < count:
                special[name] = default
    sentence_piece = kind == "llama"
    bos_default = kind != "gpt2" or pretokenize.find(pre).add_bos
    ends = _ends(metadata, ids, special, count)
    _correct_types(types, ids, ends)
    for token, text in enumerate(texts) if len(ids) < count else ():
        if ids[text] in ends:  # a second end mark, drawn, ends the answer as the first does
            ends |= {token}
            types[token] = CONTROL
    add_bos = metadata.get_bool("tokenizer.ggml.add_bos_token", bos_default)
    return Vocabulary(
        kind=kind,
        pre=pre,
        texts=texts,
        types=types,
        scores=_per_token(metadata, "scores", count, "f") or [],
        ids=ids,
        special=special,
        end_of_generation=ends,
        suppressed=_suppressed(metadata, count, max(count, rows)),
        add_bos=add_bos or kind == "gemma4",  # files of this family say false and mean true
        add_eos=metadata.get_bool("tokenizer.ggml.add_eos_token", False),
        add_space_prefix=metadata.get_bool("tokenizer.ggml.add_space_prefix", sentence_piece),
        chat_templates=_templates(metadata),
    )


def _looks_like_a_mark(text: str) -> bool:
    return text.startswith(("<|", "<\uff5c")) or text.endswith(("|>", "\uff5c>"))


def _templates(metadata: Metadata) -> dict[str, str]:
    """The unnamed template first."""
    key = "tokenizer.chat_template"
    names = sorted(name for name in metadata if name.startswith(f"{key}."))
    found = {"default": metadata.get_str(key, "")} | {name[len(key) + 1 :]: metadata.get_str(name) for name in names}
    return {name: source for name, source in found.items() if source}


_SPECIAL_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
_EOT_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
)  # fmt: skip


def named_token(metadata: Metadata, key: str, count: int) -> int | None:
    """The token that `tokenizer.ggml.<key>` names. Raises `ModelFileError` for one outside a vocabulary of `count`."""
    full = f"tokenizer.ggml.{key}"
    if full not in metadata:
        return None
    token = metadata.get_int(full)
    if token == 0xFFFFFFFF or token == -1:  # a converter's "none"
        return None
    if not 0 <= token < count:
        raise ModelFileError(f"{full} is {token}, but the vocabulary has {count} tokens")
    return token


def _suppressed(metadata: Metadata, count: int, rows: int) -> frozenset[int]:
    """Padding, which some files name, is never drawn anyway."""
    key = "tokenizer.ggml.suppress_tokens"
    tokens = metadata.get_array(key, None)
    if tokens is None:
        return frozenset()
    if tokens.dtype.kind not in "iu" or any(not 0 <= int(token) < rows for token in tokens):
        raise ModelFileError(f"{key} names tokens outside the vocabulary of {count}: convert the model again")
    return frozenset(token for token in tokens.tolist() if token < count)


def _ends(metadata: Metadata, ids: dict[str, int], special: dict[str, int | None], count: int) -> frozenset[int]:
    if special["eot"] is None:
        special["eot"] = min((ids[text] for text in _EOT_TEXTS if text in ids), default=None)
    if special["eom"] is None:
        special["eom"] = ids.get("<|eom_id|>")
    ends = {special["eos"], special["eot"], special["eom"]}
    ends |= {ids[text] for text in END_TEXTS if text in ids}
    for key, texts in zip(MIDDLE_KEYS, MIDDLE_TEXTS, strict=True):
        token = named_token(metadata, key, count)
        if token is None:
            token = min((ids[text] for text in texts if text in ids), default=None)
        ends.add(token)
    if "<|tool_response>" in ids and "</s>" in ids and ids["</s>"] != special["eos"]:
        ends.discard(ids["</s>"])  # there `</s>` is an HTML tag
    if {"<|call|>", "<|return|>"} <= ids.keys() or {"<|calls|>", "<|flush|>"} <= ids.keys():
        end = ids.get("<|end|>")  # there `<|end|>` closes one message of several in a turn
        ends -= {end} - {special["eos"]}
    return frozenset(token for token in ends if token is not None)


def _correct_types(types: list[int], ids: dict[str, int], ends: frozenset[int]) -> None:
    """Types by text: converters leave marks as normal or user-defined, and a prompt's plain text would then end a turn."""
    for token in ends:
        types[token] = CONTROL
    for text in MARK_TEXTS:
        if text in ids:
            types[ids[text]] = CONTROL
    for text in CHANNEL_TEXTS:
        if text in ids:
            types[ids[text]] = USER_DEFINED


def _check_bytes(texts: list[str], types: list[int]) -> None:
    for text, kind in zip(texts, types, strict=True):
        if kind == BYTE and not re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            raise ModelFileError(f"token {text!r} has type byte, expected a text like <0x0A>: convert the model again")


def _per_token(metadata: Metadata, name: str, count: int, kinds: str) -> list[Any] | None:
    full = f"tokenizer.ggml.{name}"
    if full not in metadata:
        return None
    array = metadata.get_array(full)
    if len(array) != count or np.asarray(array).dtype.kind not in kinds:
        raise ModelFileError(f"{full} has {len(array)} entries, expected a number for each of {count} tokens")
    if not np.isfinite(array).all():  # merging by score would never settle on an order
        raise ModelFileError(f"{full} holds numbers that are not finite: the file is damaged, convert the model again")
    values: list[Any] = np.asarray(array).tolist()
    return values
