"""Synthetic benchmark files: what they declare is what they hold, and they load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="synthetic files are written with it")

from benchmarks.synthetic import Recipe, Tensor, normal, write
from benchmarks.synthetic_qwen35 import recipe
from tests.test_check_head import SMALL
from tsgg import LLM
from tsgg.errors import UsageError
from tsgg.gguf import GGML_TYPES, read_gguf


def types_of(path: Path) -> dict[str, str]:
    return {name: GGML_TYPES[info.type].name for name, info in read_gguf(path).tensors.items()}


def test_a_file_of_the_q4_k_mix_generates(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, recipe(replace(SMALL, layers=8, type="q4_K", echo=None)))
    types = types_of(path)
    assert types["blk.3.attn_q.weight"] == "q4_K" and types["output.weight"] == "q6_K"
    assert {types[f"blk.{i}.ffn_down.weight"] for i in range(9)} == {"q4_K", "q6_K"}
    assert types["blk.0.attn_norm.weight"] == types["blk.0.ssm_a"] == "f32"
    with LLM(path, n_ctx=128, n_threads=1) as llm:
        assert llm.model.arch.layers == 8 and llm.model.draft_head() is not None
        assert len(llm.generate("Hello there", max_tokens=5, ignore_eos=True).tokens) == 5


def test_values_are_those_that_were_asked_for_whatever_the_order_of_tensors(tmp_path: Path) -> None:
    def counted(_: np.random.Generator, first: int, shape: tuple[int, int]) -> np.ndarray:
        return np.arange(first * shape[1], (first + shape[0]) * shape[1], dtype=np.float32).reshape(shape)

    tensors = [
        Tensor("a", (32, 3), "f32", counted),
        Tensor("b", (64, 5), "f16", normal(2.0, 1.0)),
        Tensor("c", (32, 2)),
    ]
    data = {}
    for number, order in enumerate((tensors, tensors[::-1])):
        path = tmp_path / f"{number}.gguf"
        write(path, Recipe("none", {}, order, 300, "qwen35"))
        infos = read_gguf(path).tensors
        data[number] = {name: path.read_bytes()[info.offset :][: info.nbytes] for name, info in infos.items()}
    assert data[0] == data[1]
    assert np.frombuffer(data[0]["a"], "<f4").tolist() == list(range(96))
    assert abs(np.frombuffer(data[0]["b"], "<f2").astype(np.float64).mean() - 1) < 0.5


def test_a_vocabulary_of_another_file_is_taken_and_filled_up(tmp_path: Path, golden_dir: Path) -> None:
    path = tmp_path / "m.gguf"
    small = recipe(replace(SMALL, layers=4, noise=0.1))
    source = golden_dir / "trunks" / "qwen35-dense.gguf"
    write(path, small, tokenizer=source)
    held, wanted = (read_gguf(p).metadata for p in (path, source))
    tokens = held.get_strings("tokenizer.ggml.tokens")
    assert len(tokens) == SMALL.vocab and tokens[:200] == wanted.get_strings("tokenizer.ggml.tokens")[:200]
    assert held.get_int("tokenizer.ggml.eos_token_id") == wanted.get_int("tokenizer.ggml.eos_token_id")
    with pytest.raises(UsageError, match="expected 1 to 10"):
        write(path, replace(small, vocab=10), tokenizer=source)


@pytest.mark.parametrize(
    ("tensor", "words"), [(Tensor("t", (32, 1), "q9"), "q9"), (Tensor("t", (48, 1), "q8_0"), "blocks")]
)
def test_a_tensor_that_cannot_be_written_is_refused_by_name(tmp_path: Path, tensor: Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=f"^t: .*{words}"):
        write(tmp_path / "m.gguf", Recipe("none", {}, [tensor], 300, "qwen35"))
    assert not (tmp_path / "m.gguf").exists()
