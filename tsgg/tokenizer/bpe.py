"""Merging by rank with the `tokenizers` library: `gpt2` (byte-level) and `gemma4` (characters with byte fallback)."""

from __future__ import annotations

import re

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from tsgg.errors import ModelFileError
from tsgg.gguf import Metadata
from tsgg.tokenizer import pretokenize
from tsgg.tokenizer.vocab import Vocabulary

SPACE = "\u2581"  # what stands for a space in SentencePiece-like vocabularies
_NEVER = "\U0010ffff\U0010ffff"  # a code point that is no character, twice
_PART = re.compile(r"[\s\S]{1,16384}[^\n]*\n?")  # several regexes over one long text cost twice the time per byte
_SURROGATE = re.compile("[\ud800-\udfff]")


def byte_characters() -> dict[str, int]:
    """GPT-2's table: the character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelBPE:
    """`gpt2`: a text is cut by the pre-tokenizer's regexes, its bytes become characters, pairs merge by rank."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        rules = pretokenize.find(vocabulary.pre)
        self._bytes, self._in_parts = byte_characters(), rules.cuts_at_newlines
        hidden, self._size = hidden_texts(vocabulary), len(vocabulary.texts)
        ids = library_ids(vocabulary, hidden)
        # A byte without a token gets a stand-in past the end: unknown to the library, it would vanish before merging and
        # its neighbours would merge across the hole. `encode` drops it afterwards.
        self._holes = [character for character in self._bytes if character not in ids]
        ids = ids | {character: self._size + i for i, character in enumerate(self._holes)}
        self._library = Library(_model(ids, metadata, hidden, ignore_merges=rules.ignore_merges))
        splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in rules.regexes]
        mapping = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._library.pre_tokenizer = pre_tokenizers.Sequence([*splits, mapping])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _PART.findall(text) if self._in_parts else (text,):
            ids += _fast_ids(self._library, part)
        return [token for token in ids if token < self._size] if self._holes else ids

    def decode(self, text: str) -> bytes:
        """Bytes of a normal token's text; characters outside the table stand for themselves."""
        table = self._bytes
        if all(character in table for character in text):
            return bytes(table[character] for character in text)
        return text.encode("utf-8", "surrogateescape")


class CharacterBPE:
    """`gemma4`: spaces become U+2581, runs of newlines stand apart, pairs of characters merge by rank."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        hidden = hidden_texts(vocabulary)
        self._library = Library(_model(library_ids(vocabulary, hidden), metadata, hidden, byte_fallback=True))
        self._library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")

    def encode(self, text: str) -> list[int]:
        return _fast_ids(self._library, text.replace(" ", SPACE))

    def decode(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")


def _fast_ids(library: Library, text: str) -> list[int]:
    """Only the batch call leaves out the offsets of tokens in the text, which nobody reads: half of the time."""
    ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _model(
    ids: dict[str, int],
    metadata: Metadata,
    hidden: frozenset[str],
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
) -> models.BPE:
    """`hidden`: texts that merging must not arrive at (`hidden_texts`)."""
    merges = []
    for line in dict.fromkeys(metadata.get_strings("tokenizer.ggml.merges")):  # of equal lines the first gives the rank
        left, space, right = line.partition(" ")
        if not left:  # the text on the left begins with a space
            left, space, right = line[1:].partition(" ")
            left = " " + left
        if not space or not right:
            raise ModelFileError(f"tokenizer.ggml.merges holds {line!r}, expected two texts with a space between them")
        if not hidden or hidden.isdisjoint((left, right, left + right)):
            merges.append((left, right))
    try:
        return models.BPE(ids, merges, ignore_merges=ignore_merges, byte_fallback=byte_fallback)
    except Exception as error:  # the library raises bare exceptions
        raise ModelFileError(f"tokenizer.ggml.merges does not fit the vocabulary: {error}") from error


def hidden_texts(vocabulary: Vocabulary) -> frozenset[str]:
    """Texts that are cut out before merging where they are wished for; plain text must never merge to one."""
    return frozenset(text for text in vocabulary.marks if len(text) > 1)


def library_ids(vocabulary: Vocabulary, hidden: frozenset[str] = frozenset()) -> dict[str, int]:
    """The vocabulary for a library that wants one valid text per token: an empty, broken or hidden one, and one that a token
    before it has, gets a stand-in that is never met."""
    texts, ids = vocabulary.texts, vocabulary.ids
    apart = set(hidden)
    if _SURROGATE.search("".join(ids)) or "" in ids:
        apart.update(text for text in ids if not text or _SURROGATE.search(text))
    if not apart and len(ids) == len(texts):
        return ids
    return {
        f"{_NEVER}{token}{_NEVER}"
        if text in apart or ids[text] != token
        else text: token  # no pair joins to the stand-in
        for token, text in enumerate(texts)
    }
