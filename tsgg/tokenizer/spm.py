"""`llama`: SentencePiece's byte-pair merging by score, done by the sentencepiece library on a model made in memory."""

from __future__ import annotations

import struct

from sentencepiece import SentencePieceProcessor

from tsgg.errors import ModelFileError
from tsgg.tokenizer.bpe import SPACE, library_ids
from tsgg.tokenizer.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, Vocabulary

# Field numbers of sentencepiece_model.proto, the only ones that encoding reads.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNK_ID, _BOS_ID, _EOS_ID, _PAD_ID = 3, 35, 40, 41, 42, 43
_DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE_SPACES = 3, 4, 5
_MODEL_BPE = 2


class SentencePieceBPE:
    """Characters merge while the joined text is a token, highest score first, leftmost on ties; the rest becomes bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.scores:
            raise ModelFileError("tokenizer.ggml.scores is missing: a `llama` tokenizer merges by score")
        self._library = SentencePieceProcessor()
        try:
            self._library.LoadFromSerializedProto(_proto(vocabulary))
        except Exception as error:  # the library raises bare exceptions
            raise ModelFileError(f"the vocabulary is no SentencePiece model: {error}") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.EncodeAsIds(text)
        return ids

    def decode(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")


def _proto(vocabulary: Vocabulary) -> bytes:
    """The model as sentencepiece reads it. User-defined tokens are plain pieces: they were cut out before. No merge arrives
    at a control token."""
    unknown = vocabulary.special["unk"]
    unknown = 0 if unknown is None else unknown
    texts = sorted(library_ids(vocabulary).items(), key=lambda item: item[1])
    parts = []
    for (text, token), score in zip(texts, vocabulary.scores, strict=True):
        byte = vocabulary.types[token] == BYTE and text == vocabulary.texts[token]
        kind = UNKNOWN if token == unknown else BYTE if byte else CONTROL if text in vocabulary.marks else NORMAL
        raw = text.encode()
        body = b"\x0a" + _varint(len(raw)) + raw + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes((kind,))
        parts.append(b"\x0a" + _varint(len(body)) + body)
    has_bytes = BYTE in vocabulary.types
    none = (1 << 64) - 1  # -1
    trainer = _number(_MODEL_TYPE, _MODEL_BPE) + _number(_BYTE_FALLBACK, has_bytes) + _number(_UNK_ID, unknown)
    trainer += b"".join(_number(field, none) for field in (_BOS_ID, _EOS_ID, _PAD_ID))
    normalizer = _number(_DUMMY_PREFIX, 0) + _number(_EXTRA_SPACES, 0) + _number(_ESCAPE_SPACES, 1)
    parts += [_message(_TRAINER, trainer), _message(_NORMALIZER, normalizer)]
    return b"".join(parts)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
