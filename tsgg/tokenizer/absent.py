"""What stands for the tokenizer of a file that has none: token ids in, token ids out."""

from __future__ import annotations

from tsgg.gguf import Metadata
from tsgg.tokenizer.vocab import Vocabulary, named_token

MODELS = ("no_vocab", "none")  # what converters write for a file without a vocabulary


class NoText:
    """Merges nothing, and shows nothing."""

    def encode(self, text: str) -> list[int]:
        return []

    def decode(self, text: str) -> bytes:
        return b""


def has_none(metadata: Metadata) -> bool:
    """Whether a file comes without a tokenizer."""
    kind = "tokenizer.ggml.model"
    return metadata.get_str(kind) in MODELS if kind in metadata else "tokenizer.ggml.tokens" not in metadata


def no_vocabulary(metadata: Metadata, rows: int) -> Vocabulary:
    """`rows` tokens without a text; of marks only the end, where the file names it."""
    eos = named_token(metadata, "eos_token_id", rows)
    return Vocabulary(
        kind="none",
        pre="",
        texts=[""] * rows,
        types=[1] * rows,
        scores=[],
        ids={},
        special=dict.fromkeys(("bos", "eot", "eom", "unk", "pad")) | {"eos": eos},
        end_of_generation=frozenset() if eos is None else frozenset({eos}),
        suppressed=frozenset(),
        add_bos=False,
        add_eos=False,
        add_space_prefix=False,
        chat_templates={},
    )
