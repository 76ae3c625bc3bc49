"""Merging by rank with the `tokenizers` library: `gpt2` (byte-level) and `gemma4` (characters with byte fallback)."""

from __future__ import annotations

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from tsgg.errors import ModelFileError
from tsgg.gguf import Metadata
from tsgg.tokenizer import pretokenize
from tsgg.tokenizer.vocab import Vocabulary

SPACE = "\u2581"  # what stands for a space in SentencePiece-like vocabularies


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
        self._library = Library(_model(vocabulary, metadata, ignore_merges=rules.ignore_merges))
        splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in rules.regexes]
        mapping = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._library.pre_tokenizer = pre_tokenizers.Sequence([*splits, mapping])
        self._bytes = byte_characters()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, text: str) -> bytes:
        """Bytes of a normal token's text; characters outside the table stand for themselves."""
        table = self._bytes
        if all(character in table for character in text):
            return bytes(table[character] for character in text)
        return text.encode("utf-8", "surrogateescape")


class CharacterBPE:
    """`gemma4`: spaces become U+2581, runs of newlines stand apart, pairs of characters merge by rank."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata) -> None:
        self._library = Library(_model(vocabulary, metadata, byte_fallback=True))
        self._library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text.replace(" ", SPACE), add_special_tokens=False).ids
        return ids

    def decode(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")


def _model(
    vocabulary: Vocabulary, metadata: Metadata, *, ignore_merges: bool = False, byte_fallback: bool = False
) -> models.BPE:
    merges = []
    for line in metadata.get_strings("tokenizer.ggml.merges"):
        cut = line.find(" ", 1)
        if cut < 0 or cut == len(line) - 1:
            raise ModelFileError(f"tokenizer.ggml.merges holds {line!r}, expected two texts with a space between them")
        merges.append((line[:cut], line[cut + 1 :]))
    ids = library_ids(vocabulary)
    try:
        return models.BPE(ids, merges, ignore_merges=ignore_merges, byte_fallback=byte_fallback)
    except Exception as error:  # the library raises bare exceptions
        raise ModelFileError(f"tokenizer.ggml.merges does not fit the vocabulary: {error}") from error


def library_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """The vocabulary for a library that wants valid text: a token that is none gets a stand-in that matches nothing."""
    ids = vocabulary.ids
    broken = [text for text in ids if not _is_text(text)]
    if broken:
        ids = dict(ids)
        for text in broken:
            ids[f"\0broken {ids[text]}"] = ids.pop(text)
    return ids


def _is_text(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
