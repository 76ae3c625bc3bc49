"""Calls as type checkers see them: `.ci/typecheck` runs mypy on this, nothing runs it.

A line with an ignore must be an error, and no other may: mypy reports an ignore that nothing needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tsgg import LLM, ChatResult, Chunk, GenerationResult, SamplingParams
from tsgg.results import ChatChunk


def prefer_digits(ids: NDArray[np.int32], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return logits


def results_have_their_types(llm: LLM, params: SamplingParams) -> None:
    one: GenerationResult = llm.generate("a", params, max_tokens=3, seed=None, stop=["b"], logit_bias={1: 0.5})
    ids: GenerationResult = llm.generate([1, 2], {"top_k": 3}, n=2, logits_processors=prefer_digits)
    array: GenerationResult = llm.generate(np.array([1, 2]), speculation=None)
    several: list[GenerationResult] = llm.generate(["a", "b"], temperature=0, logits_processors=[prefer_digits])
    id_lists: list[GenerationResult] = llm.generate([[1, 2], [3]], top_k=-1)
    mixed: list[GenerationResult] = llm.generate(("a", [3], np.array([4])), logprobs=2)
    chunks: Iterator[Chunk] = llm.stream("a", repetition_guard=True)
    turn: ChatResult = llm.chat([{"role": "user", "content": "a"}], ignore_eos=True)
    turns: Iterator[ChatChunk] = llm.chat([{"role": "user", "content": "a"}], stream=True, min_p=0.1)
    print(one, ids, array, several, id_lists, mixed, chunks, turn, turns)


def a_typo_in_a_keyword_is_an_error(llm: LLM) -> None:
    llm.generate("a", temprature=1)  # type: ignore[call-overload]
    llm.stream("a", max_token=1)  # type: ignore[call-arg]
    llm.chat([], topk=1)  # type: ignore[call-overload]
    LLM("a", n_contex=1)  # type: ignore[arg-type]


def a_value_of_another_type_is_an_error(llm: LLM) -> None:
    llm.generate("a", temperature="hot")  # type: ignore[call-overload]
    llm.stream("a", seed=1.5)  # type: ignore[arg-type]
    llm.chat([], logits_processors=3)  # type: ignore[call-overload]
    llm.generate(3)  # type: ignore[call-overload]
