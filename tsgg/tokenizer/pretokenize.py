"""Regexes that cut a text into pieces before byte-pair merging, by the name in `tokenizer.ggml.pre`.

A list is applied in order: each regex cuts every piece further, matches and the gaps between them both stay.
Source: reference tables of the formats; the same expressions as the models were trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsgg.errors import UnsupportedError

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Code points of deepseek-llm's cased letters, in hex: some of these characters have a canonical equivalent that an editor
# may put in their place (U+1F7D, U+212A, ...), which changes the set or empties a range.
_DEEPSEEK_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d "
    "1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 "
    "2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 "
    "2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e "
    "ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 "
    "10cc0-10cf2 118a0-118df 1e900-1e943"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`ignore_merges`: a piece that is itself a token is taken whole. `add_bos`: what holds when the file does not say."""

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    @property
    def cuts_at_newlines(self) -> bool:
        """Whether every newline is a piece of its own, so that a text may be encoded in parts that end with one."""
        return self.regexes[0] == _NEWLINE


def _characters(ranges: str) -> str:
    """The inside of a regex class, from hex code points and ranges of them."""
    ends = (word.split("-") for word in ranges.split())
    return "".join("-".join(chr(int(end, 16)) for end in pair) for pair in ends)


_NEWLINE = r"[\r\n]"
_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_HAN_HANGUL = f"[{_characters('4e00-9fa5 800-4e00 ac00-d7ff')}]+"

PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "falcon-h1": _LLAMA_BPE,
    "midm-2.0": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "qwen2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "megrez": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_characters(_DEEPSEEK_LETTERS)}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _HAN_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((_NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
}


def find(name: str) -> PreTokenizer:
    """The entry of that name; raises `UnsupportedError` that lists the known ones. "" means "default"."""
    if (name or "default") not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not implemented: another one would give wrong tokens. "
            f"Known are {known}"
        )
    return PRE_TOKENIZERS[name or "default"]
