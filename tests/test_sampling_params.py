"""SamplingParams: every wrong value is refused at the door, in words that name the field, the value and the range."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tsgg.errors import UsageError
from tsgg.sampling import RepetitionGuard, RowSampler, SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", 2.5),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", "hot"),
    ("top_k", -1),
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
    ("seed", -1),
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
    with pytest.raises(UsageError, match=r"max_new_tokens.*valid ones: max_tokens, temperature") as caught:
        SamplingParams.parse(max_new_tokens=3)
    assert all(item.name in str(caught.value) for item in fields(SamplingParams))
    with pytest.raises(UsageError, match="dict"):
        SamplingParams.parse({"top_k": 3})  # type: ignore[arg-type]


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
