"""Results are plain data: they can be pickled, turned into mappings and JSON, and sent between processes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import write_chat_model
from tsgg import LLM
from tsgg.results import ChatResult, GenerationResult
from tsgg.speculative.stats import SpeculationCounters

PLAIN_TYPES = (int, float, str, bool, type(None))
PROMPT = "the hell the hell the hell the"
MESSAGES = [{"role": "user", "content": "the hell"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("results") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, n_ctx=256) as llm:
        yield llm


@pytest.fixture(scope="module", params=["generation", "turn", "chunk", "turn's chunk"])
def result(llm: LLM, request: pytest.FixtureRequest) -> Any:
    keywords: dict[str, Any] = {"max_tokens": 20, "seed": 1, "logprobs": 2, "n": 2, "ignore_eos": True}
    if request.param == "generation":
        return llm.generate(PROMPT, **keywords)
    if request.param == "turn":
        return llm.chat(MESSAGES, **keywords)
    return next(
        llm.stream(PROMPT, **keywords) if request.param == "chunk" else llm.chat(MESSAGES, stream=True, **keywords)
    )


def test_a_result_survives_pickle(result: Any) -> None:
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_result_as_a_mapping_is_made_of_plain_types_and_becomes_json(result: Any) -> None:
    def look(value: Any, at: str) -> None:
        if is_dataclass(value):
            for field in fields(value):
                look(getattr(value, field.name), f"{at}.{field.name}")
        elif type(value) is dict:
            for key, item in value.items():
                look(key, f"key of {at}")
                look(item, f"{at}[{key!r}]")
        elif type(value) is tuple:
            for i, item in enumerate(value):
                look(item, f"{at}[{i}]")
        else:
            assert type(value) in PLAIN_TYPES, f"{at} is a {type(value)}"

    look(result, "result")
    mapping = asdict(result)
    assert json.loads(json.dumps(mapping)).keys() == mapping.keys()


def test_counters_that_nobody_counted_are_plain_data_too() -> None:
    stats = SpeculationCounters().snapshot()
    assert json.loads(json.dumps(asdict(stats)))["silence_reasons"] == {}
    assert pickle.loads(pickle.dumps(stats)) == stats


def _work(path: str) -> tuple[GenerationResult, ChatResult]:
    with LLM(path, n_ctx=256) as llm:
        return llm.generate(PROMPT, max_tokens=8, temperature=0), llm.chat(MESSAGES, max_tokens=8, temperature=0)


def test_a_process_of_a_spawned_pool_returns_results(llm: LLM, path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        text, turn = pool.submit(_work, str(path)).result()
    assert text.tokens == llm.generate(PROMPT, max_tokens=8, temperature=0).tokens
    assert turn.content == llm.chat(MESSAGES, max_tokens=8, temperature=0).content
