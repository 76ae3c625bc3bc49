"""SamplingParams: every wrong value is refused at the door, in words that name the field, the value and the range."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tsgg.errors import UsageError
from tsgg.sampling import RepetitionGuard, RowSampler, SamplingKeywords, SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", 2.5),
    ("max_tokens", True),
    ("max_tokens", -2),
    ("n", 0),
    ("n", None),
    ("logits_processors", 3),
    ("logits_processors", [len, 3]),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", None),
    ("top_p", 1.01),
    ("top_p", -0.1),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.1),
    ("penalty_last_n", -2),
    ("logit_bias", [1]),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: "big"}),
    ("seed", -2),
    ("seed", 2**64),
    ("logprobs", 21),
    ("logprobs", True),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 7),
    ("stop_token_ids", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "12"),
    ("ignore_eos", 1),
    ("repetition_guard", 3),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}-{value}" for name, value in WRONG])
def test_a_wrong_value_is_a_usage_error_that_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name}.*expected|{name}.*empty"):
        SamplingParams.parse(**{name: value})


def test_the_message_names_value_and_range() -> None:
    with pytest.raises(UsageError, match=r"^top_p is 1\.5; expected a number 0\.0\.\.1\.0$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(UsageError, match=r"repetition_guard\.min_repeats is 1"):
        RepetitionGuard(min_repeats=1)
    with pytest.raises(UsageError, match="penalty_last_n is 0"):
        SamplingParams(penalty_last_n=0, presence_penalty=1)


def test_an_unknown_keyword_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"max_new_tokens.*valid ones: n, max_tokens, temperature") as caught:
        SamplingParams.parse(max_new_tokens=3)
    assert all(item.name in str(caught.value) for item in fields(SamplingParams))
    with pytest.raises(UsageError, match=r"list.*a mapping of its fields"):
        SamplingParams.parse([("top_k", 3)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("temprature", "temperature"), ("topk", "top_k"), ("max_new_tokens", "max_tokens"), ("temp", "temperature")],
)
def test_an_unknown_keyword_names_the_one_that_was_probably_meant(given: str, meant: str) -> None:
    for parse in (lambda: SamplingParams.parse(**{given: 1}), lambda: SamplingParams.parse({given: 1})):
        with pytest.raises(UsageError, match=f"unknown sampling parameter {given}; did you mean '{meant}'"):
            parse()
    with pytest.raises(UsageError, match=r"unknown sampling parameter xyzzy \(valid"):
        SamplingParams.parse(xyzzy=1)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": np.int64(-1)}, {"seed": None}),
        ({"stop": None}, {"stop": ()}),
        ({"stop": np.str_("x")}, {"stop": ("x",)}),
        ({"stop_token_ids": None}, {"stop_token_ids": ()}),
        ({"stop_token_ids": np.array([3, 4])}, {"stop_token_ids": (3, 4)}),
        ({"logit_bias": None}, {"logit_bias": {}}),
        ({"logit_bias": {np.int32(3): np.float32(0.5)}}, {"logit_bias": {3: 0.5}}),
        ({"logits_processors": None}, {"logits_processors": ()}),
        ({"logits_processors": len}, {"logits_processors": (len,)}),
        ({"temperature": np.float32(0.5), "max_tokens": np.uint8(7)}, {"temperature": 0.5, "max_tokens": 7}),
        ({"ignore_eos": np.True_, "repetition_guard": np.False_}, {"ignore_eos": True, "repetition_guard": None}),
    ],
)
def test_minus_one_none_and_numpy_scalars_mean_what_they_mean_elsewhere(given: dict[str, Any], kept: Any) -> None:
    params = SamplingParams.parse(given)
    assert params == SamplingParams.parse(**given)
    for name, value in kept.items():
        found = getattr(params, name)
        assert found == value and type(found) is type(value), name


def test_a_mapping_of_fields_and_none_are_on_top_of_the_given_defaults() -> None:
    defaults = SamplingParams(temperature=0.3, top_k=7)
    assert SamplingParams.parse(None, defaults) == defaults
    assert SamplingParams.parse({"top_k": 9}, defaults, min_p=0.5) == SamplingParams(
        temperature=0.3, top_k=9, min_p=0.5
    )
    assert SamplingParams.parse(SamplingParams(), defaults, min_p=0.5) == SamplingParams(min_p=0.5)


def test_the_typed_keywords_are_the_fields_with_their_types() -> None:
    assert SamplingKeywords.__annotations__.keys() == {item.name for item in fields(SamplingParams)}
    typed = {name: item.__forward_arg__ for name, item in SamplingKeywords.__annotations__.items()}
    assert typed == {item.name: item.type for item in fields(SamplingParams)}


def test_keywords_replace_fields_of_given_parameters() -> None:
    base = SamplingParams(temperature=0.3, stop="x")
    parsed = SamplingParams.parse(base, top_k=np.int64(5), stop=["a", "b"], repetition_guard=True)
    assert (parsed.temperature, parsed.top_k, parsed.stop) == (0.3, 5, ("a", "b"))
    assert parsed.repetition_guard == RepetitionGuard()
    assert type(parsed.top_k) is int
    assert base.stop == ("x",)
    assert SamplingParams.parse(None) == SamplingParams()


def test_ids_outside_the_vocabulary_are_refused_before_anything_is_drawn() -> None:
    with pytest.raises(UsageError, match=r"logit_bias names token 10.*0\.\.9"):
        RowSampler(SamplingParams(logit_bias={10: 1.0}), 10)
    with pytest.raises(UsageError, match="stop_token_ids names token 11"):
        RowSampler(SamplingParams(stop_token_ids=[3, 11]), 10)
    with pytest.raises(UsageError, match="stop_token_ids"):
        RowSampler(SamplingParams(stop="end"), 10)
