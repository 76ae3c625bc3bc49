"""What `LLM` takes, and which sampling parameters a call has that does not give them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import write_chat_model
from tsgg import LLM, SamplingParams, UsageError
from tsgg.gguf import Metadata
from tsgg.sampling import file_defaults

PROMPT = "the hell the hell the hell the"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(
        tmp_path_factory.mktemp("arguments") / "tiny.gguf",
        general__sampling__temp=0.0,
        general__sampling__penalty_repeat=1.5,
    )


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, n_ctx=256) as llm:
        yield llm


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [("n_contex", "n_ctx"), ("model_path", "model"), ("max_model_len", "n_ctx"), ("max_num_seqs", "n_seq")],
)
def test_an_unknown_argument_names_the_one_that_was_probably_meant(given: str, meant: str) -> None:
    with pytest.raises(
        UsageError, match=rf"LLM\(\) has no argument {given}; did you mean '{meant}'\? \(valid ones: model, "
    ):
        LLM("no such file", **{given: 3})  # type: ignore[arg-type]


def test_no_layers_on_the_gpu_is_the_cpu_and_all_of_them_is_the_device(path: Path) -> None:
    for layers in (0, -1):
        with LLM(path, n_ctx=64, n_gpu_layers=layers, device="auto" if layers == 0 else "cpu") as llm:
            assert llm.model.device.is_cpu


def test_a_number_of_layers_is_taken_with_a_sentence(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tsgg"), LLM(path, n_ctx=64, n_gpu_layers=20, device="cpu"):
        pass
    assert "n_gpu_layers=20: a model lies on one device with all its layers" in caplog.text


@pytest.mark.parametrize("layers", [-2, "all", 1.0, True])
def test_layers_that_are_no_number_are_refused(layers: Any) -> None:
    with pytest.raises(UsageError, match=r"n_gpu_layers is .*expected -1 \(all\) or 0"):
        LLM("no such file", n_gpu_layers=layers)


def test_no_layers_on_a_device_that_is_named_is_a_contradiction() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        LLM("no such file", n_gpu_layers=0, device="CUDA0")


# -- defaults of sampling ----------------------------------------------------------------------------------------------


def test_a_file_recommends_what_its_keys_say_and_the_rest_is_stated() -> None:
    keys = {
        "general.sampling.temp": 0.6000000238418579,  # 0.6 as float32
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.949999988079071,
        "general.sampling.min_p": 0,
        "general.sampling.penalty_last_n": -1,
        "general.sampling.penalty_repeat": 1.0499999523162842,
        "general.name": "tiny",
    }
    assert file_defaults(Metadata(keys)) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, penalty_last_n=-1, repetition_penalty=1.05
    )
    assert file_defaults(Metadata({})) == SamplingParams()


@pytest.mark.parametrize("value", [-1.0, float("nan"), 1e30, "hot", True, [1]], ids=repr)
def test_a_recommendation_out_of_range_is_left_out_with_a_warning(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    metadata = Metadata({"general.sampling.temp": value, "general.sampling.top_k": 7})
    assert file_defaults(metadata) == SamplingParams(top_k=7)
    assert "general.sampling.temp is left out: temperature is" in caplog.text


def test_a_recommended_sampler_that_does_not_exist_here_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tsgg"):
        assert file_defaults(Metadata({"general.sampling.mirostat": 2})) == SamplingParams()
    assert "general.sampling.mirostat = 2 is left out" in caplog.text


def test_calls_have_what_the_file_recommends_and_what_they_say_on_top_of_it(llm: LLM) -> None:
    assert llm.defaults == SamplingParams(temperature=0.0, repetition_penalty=1.5)
    whole = {"temperature": 0, "repetition_penalty": 1.5, "max_tokens": 30, "ignore_eos": True}
    expected = llm.generate(PROMPT, SamplingParams(**whole)).tokens
    few: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    assert llm.generate(PROMPT, **few).tokens == llm.generate(PROMPT, few).tokens == expected
    assert tuple(chunk.token for chunk in llm.stream(PROMPT, **few)) == expected
    plain = llm.generate(PROMPT, repetition_penalty=1, **few).tokens
    assert plain == llm.generate(PROMPT, SamplingParams(temperature=0, **few)).tokens != expected
    messages = [{"role": "user", "content": PROMPT}]
    turn, same = llm.chat(messages, **few), llm.chat(messages, SamplingParams(**whole))
    assert turn.generation.tokens == same.generation.tokens


def test_parameters_given_as_an_object_are_all_that_counts(llm: LLM) -> None:
    drawn = llm.generate(PROMPT, SamplingParams(seed=1, max_tokens=30, ignore_eos=True)).tokens
    assert drawn == llm.generate(
        PROMPT, temperature=0.8, repetition_penalty=1, seed=1, max_tokens=30, ignore_eos=True
    ).tokens  # fmt: skip
