"""Speculation on sliding windows changes nothing: every drafter, greedy and sampled, forced and as the governor decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_gemma3 import SAMPLED, generate
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.speculative import CostGovernor, FixedWindow

DRAFTERS = ("ngram", "suffix")
POLICIES: dict[str, type[CostGovernor] | type[FixedWindow]] = {"governed": CostGovernor, "forced": FixedWindow}
TEXTS = ("quote-code", "prose", "long-log", "facts")  # the third is of two windows


@pytest.fixture(scope="module")
def tiny(golden_dir: Path) -> Iterator[Model]:
    with Model(golden_dir / "trunks" / "gemma3.gguf", device="cpu", n_ctx=1024, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def real(gemma3_path: Path) -> Iterator[Model]:
    with Model(gemma3_path, device="cpu", n_ctx=1280) as model:
        yield model


@pytest.fixture(scope="module")
def tiny_sequence(tiny: Model) -> Sequence:
    return tiny.new_sequence()


@pytest.fixture(scope="module")
def real_sequence(real: Model) -> Sequence:
    """One for all tests: each resumes or rolls back what the one before left."""
    return real.new_sequence()


@pytest.fixture(scope="module")
def texts(golden_dir: Path) -> Any:
    return json.loads((golden_dir / "real.json").read_text())["gemma-3-270m-q4_k_m"]


@pytest.mark.parametrize("length", [2, 660])
@pytest.mark.parametrize("how", SAMPLED)
def test_the_tiny_windowed_trunk_gives_the_plain_stream(
    tiny: Model, tiny_sequence: Sequence, how: str, length: int
) -> None:
    """Before the window of four and, from 660 on, past the wrap of its ring of 768 cells.

    A bias makes the stream one of four tokens: there is something to draft.
    """
    prompt = np.random.default_rng(8).integers(20, 300, length).tolist()
    more = {"max_tokens": 250, "logit_bias": dict.fromkeys((31, 32, 33, 34), 3.0)}
    plain = generate(tiny, tiny_sequence, prompt, "off", how, **more)
    for drafter in DRAFTERS:
        for name, policy in POLICIES.items():
            drafted = generate(tiny, tiny_sequence, prompt, drafter, how, policy(), **more)
            assert drafted.cached == length - 1  # resumed at the prompt's last token
            assert drafted.tokens == plain.tokens, f"{drafter}, {name}"
            if name == "forced":  # what the governor does depends on the machine
                assert 0 < drafted.speculation.accepted < drafted.speculation.drafted, drafter


@pytest.mark.parametrize("how", SAMPLED)
@pytest.mark.parametrize("name", TEXTS)
def test_gemma3_270m_gives_the_plain_stream(
    real: Model, real_sequence: Sequence, texts: Any, name: str, how: str
) -> None:
    prompt = texts[name]["prompt"]
    plain = generate(real, real_sequence, prompt, "off", how, max_tokens=16)
    for drafter in DRAFTERS:
        for policy_name, policy in POLICIES.items():
            drafted = generate(real, real_sequence, prompt, drafter, how, policy(), max_tokens=16)
            assert drafted.tokens == plain.tokens, f"{drafter}, {policy_name}"
            if policy_name == "forced" and how == "greedy" and name == "long-log":  # it repeats itself
                assert drafted.speculation.accepted > 0, drafter
