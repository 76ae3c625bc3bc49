"""Tokenizers from GGUF metadata.

vocab.py        the vocabulary, checked
pretokenize.py  regexes by name
special.py      special tokens in a text
bpe.py, spm.py  merging, by the `tokenizers` and `sentencepiece` libraries
absent.py       a file without a tokenizer
stream.py       text of tokens as they come
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

from tsgg.errors import ModelFileError, UnsupportedError, UsageError
from tsgg.gguf import Metadata
from tsgg.tokenizer.absent import NoText, has_none, no_vocabulary
from tsgg.tokenizer.bpe import ByteLevelBPE, CharacterBPE
from tsgg.tokenizer.special import SpecialTokens
from tsgg.tokenizer.spm import SentencePieceBPE
from tsgg.tokenizer.stream import StreamDecoder
from tsgg.tokenizer.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, read_vocabulary

__all__ = ["StreamDecoder", "Tokenizer"]

KINDS = ("gpt2", "llama", "gemma4")


class Tokenizer:
    """Text to token ids and back, as the model in the file was trained. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, merger: ByteLevelBPE | CharacterBPE | SentencePieceBPE | NoText) -> None:
        self.vocabulary, self._merger = vocabulary, merger
        self.has_text = not isinstance(merger, NoText)
        """Whether there are texts at all: without a tokenizer in the file there are ids only."""
        self.kind, self.pre = vocabulary.kind, vocabulary.pre
        self.vocab_size = len(vocabulary.texts)
        special = vocabulary.special
        self.bos, self.eos, self.eot = special["bos"], special["eos"], special["eot"]
        self.unk, self.pad = special["unk"], special["pad"]
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self.end_of_generation, self.suppressed = vocabulary.end_of_generation, vocabulary.suppressed
        self.chat_templates = vocabulary.chat_templates
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, metadata: Metadata, rows: int = 0) -> Tokenizer:
        """`rows`: of the model's embedding table, where known: ids behind the tokens are padding. A file without a tokenizer
        has a token for each, none with a text: encoding and decoding raise `UsageError` then.

        Raises `UnsupportedError` for a tokenizer or pre-tokenizer that is not implemented, `ModelFileError`.
        """
        if has_none(metadata):
            return cls(no_vocabulary(metadata, rows), NoText())
        kind = metadata.get_str("tokenizer.ggml.model")
        if kind not in KINDS:
            raise UnsupportedError(f"tokenizer.ggml.model is {kind!r}, implemented are {', '.join(KINDS)}")
        vocabulary = read_vocabulary(metadata, rows)
        if kind == "llama":
            return cls(vocabulary, SentencePieceBPE(vocabulary))
        if "tokenizer.ggml.merges" not in metadata:
            raise ModelFileError(f"tokenizer.ggml.merges is missing: a {kind} tokenizer merges by rank")
        merger = ByteLevelBPE if kind == "gpt2" else CharacterBPE
        return cls(vocabulary, merger(vocabulary, metadata))

    def encode(
        self, text: str, add_bos: bool | None = None, parse_special: bool = True, *, seam: str = ""
    ) -> list[int]:
        """Token ids of a text. `add_bos` None follows the file's rule; `parse_special` reads control tokens in the text.

        `seam` is a character that is none of the text: it is left out, and no special token is read across it.

        Raises `UsageError` for text that is not valid Unicode (lone surrogates).
        """
        self._check_text()
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            raise UsageError("the text holds lone surrogates: it is not valid Unicode, decode it properly first")
        ids: list[int] = []
        if (self.add_bos if add_bos is None else add_bos) and self.bos is not None:
            ids.append(self.bos)
        prefix = self.vocabulary.add_space_prefix  # before the first fragment and after every special token
        for fragment, token in (self._special if parse_special else self._user_defined).split(text):
            if token is not None:
                ids.append(token)
                prefix = self.vocabulary.add_space_prefix
            elif fragment := fragment.replace(seam, "") if seam else fragment:
                ids += self._merger.encode(" " + fragment if prefix else fragment)
                prefix = False
        if add_bos is None and self.add_eos and self.eos is not None:
            ids.append(self.eos)
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of text inside an answer: nothing is put before or behind it, and nothing in it becomes one of `marks`."""
        self._check_text()
        ids: list[int] = []
        for fragment, token in self._words.split(text):
            ids += self._merger.encode(fragment) if token is None else (token,)
        if self.marks.isdisjoint(ids):
            return ids
        return [
            token for character in text for token in self._merger.encode(character)
        ]  # merging has arrived at a mark

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of tokens; bytes that are no character become U+FFFD. The space that `encode` put in front is taken off."""
        self._check_text()
        text = self.decode_bytes(ids, skip_special).decode("utf-8", "replace")
        return text[1:] if self.vocabulary.add_space_prefix and text.startswith(" ") else text

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        return b"".join(b"" if skip_special and self.is_special(token) else self.token_bytes(token) for token in ids)

    def token_text(self, token: int) -> str:
        """The token as the file writes it. Raises `UsageError` for an id outside of the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise UsageError(f"token {token} is not in the vocabulary of {self.vocab_size}")
        return self.vocabulary.texts[token]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for in a text."""
        found = self._bytes.get(token)
        if found is None:
            text, kind = self.token_text(token), self.vocabulary.types[token]
            if kind == BYTE:
                found = bytes((int(text[3:5], 16),))
            elif kind in (NORMAL, UNUSED):
                found = self._merger.decode(text)
            else:
                found = text.encode("utf-8", "surrogateescape")
            self._bytes[token] = found
        return found

    def is_special(self, token: int) -> bool:
        """Whether a token is a control mark, not text."""
        return self.vocabulary.types[token] in (CONTROL, UNKNOWN)

    @cached_property
    def control_tokens(self) -> dict[str, list[int]]:
        """Tokens that have no text in an answer, by the text that the file gives them."""
        found: dict[str, list[int]] = {}
        for token, (text, kind) in enumerate(zip(self.vocabulary.texts, self.vocabulary.types, strict=True)):
            if kind in (CONTROL, UNKNOWN):
                found.setdefault(text, []).append(token)
        return found

    @cached_property
    def marks(self) -> frozenset[int]:
        """Tokens that are no text where an answer has to be text of a certain form: control tokens, and user-defined ones that
        look like marks of a conversation (llama.cpp's rule)."""
        vocabulary = self.vocabulary
        return frozenset(
            token
            for token, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
            if kind in (CONTROL, UNKNOWN)
            or (kind == USER_DEFINED and (text in vocabulary.marks or (text.startswith("<") and text.endswith(">"))))
        )

    @cached_property
    def unusable(self) -> frozenset[int]:
        """Tokens that stand for no text: unused ones, and the byte 0xFF, which is in no UTF-8."""
        types = self.vocabulary.types
        return frozenset(
            token
            for token in range(self.vocab_size)
            if types[token] == UNUSED or (token not in self.marks and self.token_bytes(token).startswith(b"\xff"))
        )

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder for tokens as they are generated; control tokens have no text unless asked for."""

        def visible(token: int) -> bytes:
            return b"" if skip_special and self.is_special(token) else self.token_bytes(token)

        return StreamDecoder(visible)

    def _check_text(self) -> None:
        if not self.has_text:
            raise UsageError("the file has no tokenizer: give and take token ids, texts and chat need one")

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self.vocabulary.split_texts(control=True))

    @cached_property
    def _user_defined(self) -> SpecialTokens:
        return SpecialTokens(self.vocabulary.split_texts(control=False))

    @cached_property
    def _words(self) -> SpecialTokens:
        """User-defined tokens that are text."""
        found = self.vocabulary.split_texts(control=False)
        return SpecialTokens({text: token for text, token in found.items() if token not in self.marks})
