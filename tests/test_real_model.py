"""SmolLM2-135M against what another engine says of the same file (golden real.json): ids, likelihood, best tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trunk_steps import Array, decode, same_bits, step
from tsgg.gguf import read_gguf
from tsgg.model import Model
from tsgg.tokenizer import Tokenizer

TEXTS = ("quote-code", "prose", "facts")  # the fourth, a log of 1067 tokens, is only tokenized: its rows take too long
CLEAR = (
    1.0  # a top-two margin above it leaves no doubt: quantized products of two engines differ by up to 0.8 in a logit
)
CHUNK = 512


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((golden_dir / "real.json").read_text())["smollm2-135m-instruct-q4_1"]
    return answers


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[Model]:
    with Model(smollm2_path, n_ctx=600, cache_type_k="f32", cache_type_v="f32") as model:  # as the golden engine had it
        yield model


@pytest.fixture(scope="module")
def rows(model: Model, golden: dict[str, Any]) -> dict[str, Array]:
    """Logits of every prompt and of its golden continuation, teacher-forced, in chunks as a prefill takes them."""
    found = {}
    for name in TEXTS:
        tokens = golden[name]["prompt"] + golden[name]["greedy"]
        sequence = model.new_sequence()
        chunks = [step(model, sequence, tokens[start : start + CHUNK]) for start in range(0, len(tokens), CHUNK)]
        found[name] = np.concatenate(chunks)
        model.release(sequence)
    return found


@pytest.mark.parametrize("name", [*TEXTS, "long-log"])
def test_a_prompt_is_tokenized_alike(smollm2_path: Path, golden: dict[str, Any], name: str) -> None:
    tokenizer = Tokenizer.from_metadata(read_gguf(smollm2_path).metadata)
    assert tokenizer.encode(golden[name]["text"], add_bos=False, parse_special=True) == golden[name]["prompt"]


@pytest.mark.parametrize("name", TEXTS)
def test_the_likelihood_of_a_prompt_is_within_one_percent(
    golden: dict[str, Any], rows: dict[str, Array], name: str
) -> None:
    prompt = golden[name]["prompt"]
    logits = rows[name][: len(prompt) - 1].astype(np.float64)
    likelihood = logits[np.arange(len(logits)), prompt[1:]] - np.log(np.exp(logits).sum(1))
    assert -likelihood.mean() == pytest.approx(golden[name]["nll_per_token"], rel=0.01)


@pytest.mark.parametrize("name", TEXTS)
def test_the_best_token_agrees_wherever_the_margin_is_clear(
    golden: dict[str, Any], rows: dict[str, Array], name: str
) -> None:
    entry = golden[name]
    first = len(entry["prompt"]) - 1
    greedy, margins = np.array(entry["greedy"]), np.array(entry["margin"])
    best = rows[name][first : first + len(greedy)].argmax(1)
    clear = margins > CLEAR
    assert clear.sum() > 50
    assert np.flatnonzero(clear & (best != greedy)).tolist() == []
    assert np.mean(best == greedy) > 0.95


@pytest.mark.parametrize("name", TEXTS)
def test_the_largest_logits_of_the_last_prompt_rows_agree(
    golden: dict[str, Any], rows: dict[str, Array], name: str
) -> None:
    entry = golden[name]
    last = rows[name][len(entry["prompt"]) - 8 : len(entry["prompt"])]
    ours = np.take_along_axis(last, np.array(entry["top10_last8"]), 1)
    difference = np.abs(ours - np.array(entry["top10_logits_last8"]))
    assert difference.max() < 1.0 and difference.mean() < 0.4


def test_plain_decoding_equals_a_verify_and_the_prefill(
    model: Model, golden: dict[str, Any], rows: dict[str, Array]
) -> None:
    entry = golden["facts"]
    tokens = entry["prompt"] + entry["greedy"][:12]
    sequence = model.new_sequence()
    step(model, sequence, tokens[:-12])
    alone = decode(model, sequence, tokens[-12:])
    sequence.truncate(len(tokens) - 12)
    assert same_bits(step(model, sequence, tokens[-12:]), alone)
    model.release(sequence)
    assert same_bits(rows["facts"][len(tokens) - 12 : len(tokens)], alone)
