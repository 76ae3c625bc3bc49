"""The fields of `SamplingParams` as keywords of a call, for type checkers and editors: a typo is seen before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from tsgg.sampling.params import LogitsProcessor, RepetitionGuard


class SamplingKeywords(TypedDict, total=False):
    """What each means, and its range, stands in `SamplingParams`."""

    n: int
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float] | None
    logits_processors: Iterable[LogitsProcessor] | LogitsProcessor | None
    seed: int | None
    logprobs: int | None
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    ignore_eos: bool
    repetition_guard: RepetitionGuard | bool | None
    json_schema: Mapping[str, Any] | str | bool | None
    regex: str | None
    grammar: str | None
    choice: Iterable[str] | None
