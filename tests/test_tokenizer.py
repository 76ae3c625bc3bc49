"""Tokenizers against the ids of another engine, and the rules that no golden file shows."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_vocab import KINDS, byte_level_metadata, extended, sentencepiece_metadata
from tsgg.errors import ModelFileError, TsggError, UnsupportedError, UsageError
from tsgg.gguf import Metadata, read_gguf
from tsgg.tokenizer import Tokenizer
from tsgg.tokenizer.bpe import ByteLevelBPE, byte_characters
from tsgg.tokenizer.pretokenize import PRE_TOKENIZERS
from tsgg.tokenizer.special import SpecialTokens

SMOLLM2_IDS = {
    "Hello world 1234 it's  two": [19556, 905, 216, 33, 34, 35, 36, 357, 506, 216, 827],
    "def f(x):\n    return x+1\n\n\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 27, 33, 16506],
    "naïve café 日本語 🙂": [3546, 46494, 37366, 17097, 241, 115, 40993, 179, 120, 248, 47526],
}


def golden_vocabularies() -> list[str]:
    folder = Path(__file__).resolve().parents[2] / "shared" / "golden" / "vocab"
    return sorted(path.name for path in folder.glob("*.gguf")) or ["absent"]


@pytest.mark.parametrize("name", golden_vocabularies())
def test_every_golden_line_has_the_other_engines_ids(name: str, golden_dir: Path) -> None:
    path = golden_dir / "vocab" / name
    tokenizer = Tokenizer.from_metadata(read_gguf(path).metadata)
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
    for text, line in zip(texts, lines, strict=False):
        expected = [int(word) for word in line.split()]
        assert tokenizer.encode(text, add_bos=False, parse_special=False) == expected, text


@pytest.mark.parametrize("name", golden_vocabularies())
def test_random_unicode_survives_a_round_trip(name: str, golden_dir: Path) -> None:
    tokenizer = Tokenizer.from_metadata(read_gguf(golden_dir / "vocab" / name).metadata)
    for text in random_texts(2000):
        ids = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert tokenizer.decode(ids) == normalised(tokenizer, text)


def test_smollm2_gives_the_reference_ids(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_metadata(read_gguf(smollm2_path).metadata)
    assert {text: tokenizer.encode(text) for text in SMOLLM2_IDS} == SMOLLM2_IDS
    assert tokenizer.end_of_generation == {0, 2, 4}


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_real_prompts_have_the_other_engines_ids(model: str, golden_dir: Path, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"{model}_path")
    answers = json.loads((golden_dir / "real.json").read_text(encoding="utf-8"))
    name = next(key for key in answers if key.replace("-", "").startswith(model))
    tokenizer = Tokenizer.from_metadata(read_gguf(path).metadata)
    for case in answers[name].values():
        assert tokenizer.encode(case["text"]) == case["prompt"]


@pytest.mark.parametrize("metadata", [byte_level_metadata(), sentencepiece_metadata()], ids=["gpt2", "llama"])
def test_streamed_text_is_the_text_decoded_at_once(metadata: Metadata) -> None:
    tokenizer = Tokenizer.from_metadata(metadata)
    generator = random.Random(1)
    for _ in range(300):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randrange(12))]
        stream = tokenizer.stream(skip_special=False)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode_bytes(ids).decode("utf-8", "replace")


def test_a_stream_never_emits_half_a_character() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata())
    stream = tokenizer.stream()
    ids = tokenizer.encode("é🙂")
    assert len(ids) == 6  # this vocabulary has bytes only
    assert [stream.push(token) for token in ids] == ["", "é", "", "", "", "🙂"]
    assert stream.push(ids[0]) == "" and stream.flush() == "\ufffd"


def test_control_tokens_are_read_only_on_request_and_user_defined_ones_always() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata())
    end, user = tokenizer.vocabulary.ids["<|im_end|>"], tokenizer.vocabulary.ids["<tool>"]
    assert tokenizer.encode("<|im_end|><tool>") == [end, user]
    plain = tokenizer.encode("<|im_end|><tool>", parse_special=False)
    assert end not in plain and plain[-1] == user


def test_bos_and_eos_follow_the_file_unless_told_otherwise() -> None:
    values = dict(byte_level_metadata())
    values |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_metadata(Metadata(values))
    assert tokenizer.encode("a")[0] == tokenizer.bos and tokenizer.encode("a")[-1] == tokenizer.eos
    assert tokenizer.bos not in tokenizer.encode("a", add_bos=False)
    assert tokenizer.encode("a", add_bos=True)[0] == tokenizer.bos


def test_sentencepiece_merges_the_best_score_first_and_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata())
    ids = tokenizer.vocabulary.ids
    assert tokenizer.encode("abc", add_bos=False) == [ids["\u2581"], ids["a"], ids["bc"]]  # "bc" scores above "ab"
    assert tokenizer.encode("é", add_bos=False) == [ids["\u2581"], ids["<0xC3>"], ids["<0xA9>"]]
    assert tokenizer.decode(tokenizer.encode("abc é", add_bos=False)) == "abc é"


def test_the_longest_special_token_that_starts_first_wins() -> None:
    special = SpecialTokens({"<a": 1, "<a>": 2, "b": 3, "\n\n": 4, "\n": 5})
    assert list(special.split("x<a><ab\n\n\ny<")) == [
        ("x", None), ("<a>", 2), ("<a", 1), ("b", 3), ("\n\n", 4), ("\n", 5), ("y<", None),
    ]  # fmt: skip


def test_special_tokens_are_cut_out_longest_first_wherever_they_are() -> None:
    """Against the plain algorithm: for each text, longest first, cut every fragment at its occurrences from the left."""
    generator = random.Random(3)
    for _ in range(400):
        words = {"".join(generator.choices("ab<", k=generator.randrange(1, 5))) for _ in range(6)}
        tokens = {word: i for i, word in enumerate(words) if len(word) not in {len(other) for other in words - {word}}}
        text = "".join(generator.choices("ab<c", k=20))
        parts: list[tuple[str, int | None]] = [(text, None)]
        for word in sorted(tokens, key=len, reverse=True):
            cut: list[tuple[str, int | None]] = []
            for piece, token in parts:
                if token is not None:
                    cut.append((piece, token))
                    continue
                for i, plain in enumerate(piece.split(word)):
                    cut += [(word, tokens[word])] if i else []
                    cut += [(plain, None)] if plain else []
            parts = cut
        assert list(SpecialTokens(tokens).split(text)) == parts


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_builds_and_keeps_the_text(pre: str) -> None:
    tokenizer = Tokenizer.from_metadata(Metadata(dict(byte_level_metadata()) | {"tokenizer.ggml.pre": pre}))
    assert tokenizer.add_bos is False  # the file says so
    for text in random_texts(50):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_the_letters_of_deepseek_llm_stand_apart_from_other_characters() -> None:
    """Characters with a canonical twin (Kelvin and ohm signs, accented Greek) are letters of the set too."""
    tokens = [*sorted(byte_characters()), "\u00a7\u0120"]  # the last byte of an Arabic alef, and a space
    values = {key: value for key, value in byte_level_metadata().items() if not key.endswith("token_id")}
    values |= {"tokenizer.ggml.pre": "deepseek-llm", "tokenizer.ggml.tokens": tokens}
    values |= {"tokenizer.ggml.token_type": np.ones(257, np.int32), "tokenizer.ggml.merges": ["\u00a7 \u0120"]}
    tokenizer = Tokenizer.from_metadata(Metadata(values))
    for letter in "K\u2126\u212a\u1f7d\u1fbe\u1fd3\u1fdb":
        assert 256 not in tokenizer.encode(f"\u0627 {letter}"), f"U+{ord(letter):04X} is no letter"
    assert 256 in tokenizer.encode("\u0627 \u2190")  # an arrow is none: the space stays with what is before it


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder"])
def test_a_long_text_is_encoded_as_its_lines_are_cut_by_the_regexes(pre: str) -> None:
    """Encoding in parts must not show: the library's own answer for the whole text is the reference."""
    tokenizer = Tokenizer.from_metadata(Metadata(dict(byte_level_metadata()) | {"tokenizer.ggml.pre": pre}))
    text = "".join(line + end for line in random_texts(1500) for end in ("\n", " the\r\n\n"))
    assert len(text) > 3 * 16384
    assert isinstance(tokenizer._merger, ByteLevelBPE)
    whole = tokenizer._merger._library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, parse_special=False) == whole


def test_a_byte_without_a_token_is_dropped_after_merging() -> None:
    """Otherwise its neighbours, which never touch in the text, would merge. The expected ids are those of another engine."""
    values = dict(byte_level_metadata())
    tokens = list(byte_level_metadata().get_strings("tokenizer.ggml.tokens"))
    tokens[tokens.index("x")] = "<hole>"
    tokenizer = Tokenizer.from_metadata(Metadata(values | {"tokenizer.ggml.tokens": tokens}))
    assert tokenizer.encode("txh th") == [tokens.index(text) for text in ("t", "h", "\u0120", "th")]


def test_a_merge_that_is_listed_twice_keeps_its_first_rank() -> None:
    values = dict(byte_level_metadata())
    tokens = [*byte_level_metadata().get_strings("tokenizer.ggml.tokens"), "bx", "xb"]
    values["tokenizer.ggml.tokens"] = tokens
    values["tokenizer.ggml.token_type"] = np.ones(len(tokens), np.int32)
    values["tokenizer.ggml.merges"] = ["b x", "x b", "b x"]
    tokenizer = Tokenizer.from_metadata(Metadata(values))
    assert tokenizer.encode("bxb") == [tokens.index("bx"), tokens.index("b")]


def test_types_and_ends_are_corrected_by_text() -> None:
    def changed(texts: list[str], eos: str) -> Tokenizer:
        values = dict(byte_level_metadata())
        tokens = [*byte_level_metadata().get_strings("tokenizer.ggml.tokens"), *texts]
        values |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": tokens.index(eos)}
        values["tokenizer.ggml.token_type"] = np.array([1] * (len(tokens) - len(texts)) + [4] * len(texts), np.int32)
        return Tokenizer.from_metadata(Metadata(values))

    tokenizer = changed(["</s>", "<|fim_prefix|>", "<|message|>"], "<|im_end|>")
    ids = tokenizer.vocabulary.ids
    assert {ids["</s>"], ids["<|im_end|>"]} <= tokenizer.end_of_generation
    assert tokenizer.is_special(ids["</s>"]) and tokenizer.is_special(ids["<|fim_prefix|>"])
    assert not tokenizer.is_special(ids["<|message|>"])
    assert tokenizer.encode("</s>") == [ids["</s>"]] != tokenizer.encode("</s>", parse_special=False)

    tokenizer = changed(["<|end|>", "<|return|>", "<|call|>"], "<|return|>")  # `<|end|>` ends a message, not the turn
    ids = tokenizer.vocabulary.ids
    assert ids["<|end|>"] not in tokenizer.end_of_generation
    assert {ids["<|return|>"], ids["<|call|>"]} <= tokenizer.end_of_generation
    assert ids["<|end|>"] in changed(["<|end|>"], "<|im_end|>").end_of_generation
    html = changed(["</s>", "<|tool_response>"], "<|im_end|>")  # there `</s>` is an HTML tag
    assert html.vocabulary.ids["</s>"] not in html.end_of_generation


@pytest.mark.parametrize("metadata", [byte_level_metadata(), sentencepiece_metadata()], ids=["gpt2", "llama"])
def test_token_texts_that_are_no_unicode_do_no_harm(metadata: Metadata) -> None:
    values = dict(metadata)
    tokens = [*metadata.get_strings("tokenizer.ggml.tokens"), "\udcff\udcfe"]  # bytes FF FE, read with surrogateescape
    values["tokenizer.ggml.tokens"] = tokens
    values["tokenizer.ggml.token_type"] = np.append(metadata.get_array("tokenizer.ggml.token_type"), 1).astype(np.int32)
    if "tokenizer.ggml.scores" in values:
        values["tokenizer.ggml.scores"] = np.append(metadata.get_array("tokenizer.ggml.scores"), -9).astype(np.float32)
    tokenizer = Tokenizer.from_metadata(Metadata(values))
    assert tokenizer.decode_bytes([len(tokens) - 1]) == b"\xff\xfe"
    assert tokenizer.decode(tokenizer.encode("abc", add_bos=False)) == "abc"


def extended_tokenizer(
    metadata: Metadata, texts: list[str], kinds: list[int], merges: tuple[str, ...] = ()
) -> Tokenizer:
    return Tokenizer.from_metadata(extended(metadata, texts, kinds, merges))


@pytest.mark.parametrize("kind", KINDS)
def test_of_tokens_with_one_text_the_first_is_encoded_and_all_are_decoded(kind: str) -> None:
    metadata = KINDS[kind]
    plain, count = Tokenizer.from_metadata(metadata), len(metadata.get_strings("tokenizer.ggml.tokens"))
    twice = extended_tokenizer(metadata, ["a", "ab", "c", "c"], [1, 1, 1, 1])
    text = "ab abc cab </s>"
    assert twice.encode(text) == plain.encode(text)  # the scores of the copies would be better ones
    assert twice.decode([count, count + 1, count + 2, count + 3]) == "aabcc"
    assert twice.token_text(count) == "a"


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_end_mark_with_the_same_text_ends_an_answer_too(kind: str) -> None:
    metadata = KINDS[kind]
    count = len(metadata.get_strings("tokenizer.ggml.tokens"))
    tokenizer = extended_tokenizer(metadata, ["<|im_end|>", "<|im_end|>"], [3, 1])
    first = tokenizer.vocabulary.ids["<|im_end|>"]
    assert tokenizer.encode("<|im_end|>", add_bos=False)[-1] == first < count + 1
    assert {first, count + 1} <= tokenizer.end_of_generation and tokenizer.is_special(count + 1)


MARK = "<|>"
PIECES = ["<", "|", ">", "<|", MARK]
PIECE_MERGES = ("< |", "<| >")


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_never_merges_to_a_control_token(kind: str) -> None:
    """Merges lead to the mark's text in each vocabulary: a normal token of that text is met, a control one never."""
    metadata = KINDS[kind]
    pieces = PIECES[3:] if kind == "gpt2" else PIECES  # bytes are there already
    for mark, met in ((1, True), (3, False)):
        tokenizer = extended_tokenizer(metadata, pieces, [1] * (len(pieces) - 1) + [mark], PIECE_MERGES)
        token = tokenizer.vocab_size - 1
        plain = tokenizer.encode(f"a{MARK}b", parse_special=False)
        assert (token in plain) is met
        assert tokenizer.decode(plain, skip_special=True).endswith(f"a{MARK}b")
        assert token in tokenizer.encode(MARK)


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    values = dict(byte_level_metadata()) | {"tokenizer.ggml.pre": "tekken"}
    with pytest.raises(UnsupportedError, match=r"tekken.*smollm"):
        Tokenizer.from_metadata(Metadata(values))


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.model": "bert"},
        {"tokenizer.ggml.tokens": []},
        {"tokenizer.ggml.merges": ["nospace"]},
        {"tokenizer.ggml.merges": ["x\u0100 nothere"]},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.token_type": [1, 1]},
        {"tokenizer.ggml.eos_token_id": 99999},
        {"tokenizer.ggml.bos_token_id": "one"},
    ],
)
def test_contradictory_metadata_is_refused(change: dict[str, object]) -> None:
    values = dict(byte_level_metadata()) | {
        key: np.array(value, np.int32) if key.endswith("token_type") else value for key, value in change.items()
    }
    values = {key: value for key, value in values.items() if value is not None}
    with pytest.raises(TsggError):
        Tokenizer.from_metadata(Metadata(values))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scores", np.zeros(3, np.float32), "scores has 3 entries"),
        ("scores", np.full(265, np.nan, np.float32), "not finite"),
        ("token_type", np.full(265, 6, np.int32), "type byte"),
        ("unknown_token_id", 265, "265 tokens"),
    ],
)
def test_contradictory_scores_types_and_ids_are_refused(key: str, value: object, message: str) -> None:
    values = dict(sentencepiece_metadata()) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_metadata(Metadata(values))


def test_missing_scores_are_refused() -> None:
    values = {key: value for key, value in sentencepiece_metadata().items() if not key.endswith("scores")}
    with pytest.raises(ModelFileError, match="scores"):
        Tokenizer.from_metadata(Metadata(values))


def test_text_that_is_not_unicode_and_ids_outside_are_usage_errors() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata())
    with pytest.raises(UsageError, match="surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(UsageError, match="vocabulary"):
        tokenizer.decode([10**6])


def random_texts(count: int) -> list[str]:
    generator = random.Random(7)
    ranges = [
        (0x20, 0x7F), (0x20, 0x7F), (0x9, 0xE), (0xA0, 0x250), (0x370, 0x600), (0x4E00, 0x4F00), (0x1F600, 0x1F640),
    ]  # fmt: skip
    texts = []
    for _ in range(count):
        low, high = generator.choice(ranges), generator.choice(ranges)
        size = generator.randrange(30)
        texts.append("".join(chr(generator.randrange(*generator.choice((low, high)))) for _ in range(size)))
    return texts


def normalised(tokenizer: Tokenizer, text: str) -> str:
    """U+2581 stands for a space in some vocabularies; nothing else changes."""
    return text if tokenizer.kind == "gpt2" else text.replace("\u2581", " ")
