"""Tables with more rows than the vocabulary has tokens: the rows behind the tokens change nothing. Fewer rows are refused.

The same model without the padding is what a padded one is compared with, bit for bit. The padding is loud: were it a choice,
most tokens would come from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny_gemma4, tiny_models, tiny_qwen35
from tests.gguf_writer import Tensor, write_gguf
from tsgg import LLM, ModelFileError, UsageError
from tsgg.model import Model
from tsgg.speculative.protocol import Batch, HeadRows, Want

PADDING = 40
PADDED = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
PROMPT = list(range(30, 60))
ALL = Want("all", "all")


def padded(tensors: Iterable[Tensor]) -> list[Tensor]:
    """PADDING rows more in every tensor that has a row for each token. All are F32."""
    result = []
    for name, ne, kind, raw in tensors:
        if name in PADDED:
            loud = np.random.default_rng(5).standard_normal((PADDING, ne[0])).astype(np.float32) * 9
            ne, raw = (ne[0], ne[1] + PADDING), raw + loud.tobytes()
        result.append((name, ne, kind, raw))
    return result


def pair_of_files(folder: Path, metadata: dict[str, object], tensors: list[Tensor]) -> tuple[Path, Path]:
    """The file as it is, and with padding."""
    return (
        write_gguf(folder / "plain.gguf", metadata, tensors),
        write_gguf(folder / "padded.gguf", metadata, padded(tensors)),
    )


@pytest.fixture
def llamas(tmp_path: Path) -> tuple[Path, Path]:
    shape = tiny_models.TinyLlama()
    return pair_of_files(tmp_path, tiny_models.metadata(shape), list(tiny_models.tensors(shape)))


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "seed": 3},
    "logprobs": {"temperature": 0.8, "seed": 4, "logprobs": 5},
    "penalties": {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "top_p": 0.9},
}


@pytest.mark.parametrize(
    "speculation", [None, {"type": "ngram", "adaptive": False, "draft": 5}], ids=["plain", "verify"]
)
def test_padding_is_never_drawn_and_changes_no_stream(llamas: tuple[Path, Path], speculation: object) -> None:
    answers = []
    for path in llamas:
        with LLM(path, n_ctx=256, n_threads=1, speculation=speculation) as llm:
            results = [llm.generate(PROMPT, max_tokens=60, ignore_eos=True, **case) for case in CASES.values()]
            answers.append([(result.tokens, result.text, result.logprobs) for result in results])
    assert answers[0] == answers[1]


def test_a_row_of_logits_has_a_column_for_every_token_and_none_for_padding(llamas: tuple[Path, Path]) -> None:
    with Model(llamas[1], n_ctx=64, n_threads=1) as model:
        assert model.vocab_size == len(tiny_models.vocabulary())
        rows = model.forward(Batch((model.new_sequence(),), np.array([[1, 2, 3]], np.int32), ALL))
        assert {rows.logits(0, i).shape for i in range(3)} == {(model.vocab_size,)}


def test_a_prompt_may_not_hold_padding(llamas: tuple[Path, Path]) -> None:
    count = len(tiny_models.vocabulary())
    with LLM(llamas[1], n_ctx=64, n_threads=1) as llm, pytest.raises(UsageError, match=f"0..{count - 1}"):
        llm.generate([1, count], max_tokens=1)


def test_a_draft_head_in_the_file_drafts_tokens_only(tmp_path: Path) -> None:
    shape = tiny_qwen35.TinyQwen35(nextn=1)
    drafts = []
    for path in pair_of_files(tmp_path, tiny_qwen35.metadata(shape), list(tiny_qwen35.tensors(shape))):
        with Model(path, n_ctx=128, n_threads=1) as model:
            head = model.draft_head()
            assert head is not None
            drafts.append(head.draft([rows_behind(model)], 8, 0.0))
    assert drafts[0] == drafts[1] and len(drafts[0][0].tokens) == 8


def test_a_draft_head_in_a_file_of_its_own_drafts_tokens_only(tmp_path: Path) -> None:
    shape = tiny_gemma4.TinyGemma4()
    target = tiny_gemma4.target_metadata(shape), list(tiny_gemma4.target_tensors(shape))
    drafter = tiny_gemma4.assistant_metadata(shape), list(tiny_gemma4.assistant_tensors(shape))
    drafts = []
    for change in (list, padded):
        trunk = write_gguf(tmp_path / "target.gguf", target[0], change(target[1]))
        other = write_gguf(tmp_path / "assistant.gguf", drafter[0], change(drafter[1]))
        with Model(trunk, n_ctx=128, n_threads=1) as model:
            drafts.append(model.draft_model(other).draft([rows_behind(model)], 8, 0.0))
    assert drafts[0] == drafts[1] and len(drafts[0][0].tokens) == 8


def rows_behind(model: Model) -> HeadRows:
    """PROMPT in memory, as a draft head is told of it."""
    sequence = model.new_sequence()
    rows = model.forward(Batch((sequence,), np.array([PROMPT[:-1]], np.int32), ALL))
    features = np.array(rows.hidden(0))
    sequence.commit(len(PROMPT) - 1)
    return HeadRows(sequence, features, np.array(PROMPT[1:], np.int32), 0)


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_fewer_rows_than_tokens_are_refused_at_load(tmp_path: Path, speculation: str) -> None:
    shape = tiny_models.TinyLlama()
    values, count = tiny_models.metadata(shape), len(tiny_models.vocabulary())
    values["tokenizer.ggml.tokens"] = [*tiny_models.vocabulary(), "one more"]
    values["tokenizer.ggml.token_type"] = [1] * (count + 1)
    path = write_gguf(tmp_path / "m.gguf", values, list(tiny_models.tensors(shape)))
    with pytest.raises(ModelFileError, match=f"{count + 1} tokens and token_embd.weight has {count} rows"):
        LLM(path, n_ctx=64, speculation=speculation)


def test_suppressed_tokens_of_a_file_may_name_padding(tmp_path: Path) -> None:
    shape, count = tiny_models.TinyLlama(), len(tiny_models.vocabulary())
    values = tiny_models.metadata(shape) | {"tokenizer.ggml.suppress_tokens": [65, count, count + PADDING - 1]}
    path = write_gguf(tmp_path / "m.gguf", values, padded(tiny_models.tensors(shape)))
    with LLM(path, n_ctx=64, n_threads=1) as llm:
        assert llm.tokenizer.suppressed == {65}
        assert len(llm.generate(PROMPT, max_tokens=5, ignore_eos=True).tokens) == 5
