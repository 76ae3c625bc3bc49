"""A file without a tokenizer takes token ids and gives token ids; texts and chat are refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny_models
from tests.gguf_writer import write_gguf
from tests.tiny_models import TinyLlama
from tsgg import LLM, ModelFileError, UsageError
from tsgg.cli import main

PROMPT = [5, 9, 200, 5, 9, 200, 5]
SHAPE = TinyLlama()


def without(folder: Path, **keys: object) -> Path:
    """A tiny file whose tokenizer's keys are `keys` alone."""
    values = {key: value for key, value in tiny_models.metadata(SHAPE).items() if not key.startswith("tokenizer.")}
    values |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return write_gguf(folder / "bare.gguf", values, list(tiny_models.tensors(SHAPE)))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(without(tmp_path_factory.mktemp("bare")), n_ctx=128, n_threads=1) as llm:
        yield llm


def test_token_ids_give_the_tokens_of_the_same_model_with_a_tokenizer(bare: LLM, tmp_path: Path) -> None:
    path = tiny_models.write_tiny(tmp_path / "whole.gguf", SHAPE)
    with LLM(path, n_ctx=128, n_threads=1) as whole:
        for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 2, "logprobs": 2}):
            expected = whole.generate(PROMPT, max_tokens=30, ignore_eos=True, **params)  # type: ignore[arg-type]
            ends = sorted(whole.tokenizer.end_of_generation)
            found = bare.generate(PROMPT, max_tokens=30, logit_bias=dict.fromkeys(ends, -1e9), **params)  # type: ignore[arg-type]
            assert found.tokens == expected.tokens and found.text == ""
            assert [entry.logprob for entry in found.logprobs] == [entry.logprob for entry in expected.logprobs]
    assert [chunk.token for chunk in bare.stream(PROMPT, max_tokens=3, temperature=0)] == list(
        bare.generate(PROMPT, max_tokens=3, temperature=0).tokens
    )


def test_texts_chat_and_stop_strings_are_refused_with_a_sentence(bare: LLM) -> None:
    for attempt in (
        lambda: bare.generate("Hello"),
        lambda: bare.generate(""),
        lambda: bare.stream("Hello"),
        lambda: bare.chat([{"role": "user", "content": "Hi"}]),
        lambda: bare.tokenize("Hello"),
        lambda: bare.detokenize([1, 2]),
        lambda: bare.generate(PROMPT, stop=("x",), max_tokens=3),
    ):
        with pytest.raises(UsageError, match="no tokenizer"):
            attempt()
    assert len(bare.generate(PROMPT, max_tokens=3).tokens) == 3


def test_a_file_that_says_no_vocab_has_every_row_as_a_token_and_its_end(tmp_path: Path) -> None:
    rows = len(tiny_models.vocabulary())
    path = without(tmp_path, model="no_vocab", eos_token_id=7)
    with LLM(path, n_ctx=128, n_threads=1) as llm:
        assert llm.tokenizer.vocab_size == llm.model.vocab_size == rows
        result = llm.generate(PROMPT, max_tokens=9, temperature=0, logit_bias={7: 1e9})
        assert (result.tokens, result.finish_reason, result.stop_reason) == ((7,), "stop", 7)
    with pytest.raises(ModelFileError, match="eos_token_id"):
        LLM(without(tmp_path, model="no_vocab", eos_token_id=rows), n_ctx=128)


def test_half_a_tokenizer_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.model"):
        LLM(without(tmp_path, tokens=tiny_models.vocabulary()), n_ctx=128)


def test_such_a_file_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["inspect", "-m", str(without(tmp_path)), "-c", "128"])
    assert code == 0, capsys.readouterr().err
    assert f"none/-, {len(tiny_models.vocabulary())} tokens" in capsys.readouterr().out
