"""A stop string that is a control token's text matches that token, which has no text of its own in an answer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiny_models import TinyLlama, vocabulary, write_tiny
from tsgg import LLM

PROMPT = "the hell the hell the"
MARK, END = vocabulary().index("<s>"), vocabulary().index("</s>")
WINDOWS = [None, {"type": "ngram", "adaptive": False, "draft": 4}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny(tmp_path_factory.mktemp("stop") / "tiny.gguf", TinyLlama())
    with LLM(path, n_ctx=128, n_threads=1) as llm:
        yield llm


@pytest.mark.parametrize("speculation", WINDOWS, ids=["plain", "verify"])
def test_a_stop_string_that_is_a_control_token_ends_the_answer_at_it(llm: LLM, speculation: object) -> None:
    common = {"temperature": 1.0, "seed": 6, "max_tokens": 60, "ignore_eos": True, "logit_bias": {MARK: 9.0}}
    whole = llm.generate(PROMPT, speculation=speculation, **common)  # type: ignore[arg-type]
    place = whole.tokens.index(MARK)  # it comes, and is not an end by itself
    stopped = llm.generate(PROMPT, stop=("never", "<s>"), speculation=speculation, **common)  # type: ignore[arg-type]
    assert stopped.tokens == whole.tokens[: place + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "<s>")
    assert whole.text.startswith(stopped.text) and "<s>" not in stopped.text


def test_an_end_mark_that_is_a_stop_string_too_ends_the_answer_even_with_ignore_eos(llm: LLM) -> None:
    for ignore in (False, True):
        result = llm.generate(
            PROMPT, temperature=0, max_tokens=9, stop="</s>", ignore_eos=ignore, logit_bias={END: 1e9}
        )
        assert (result.tokens, result.stop_reason) == ((END,), "</s>")


def test_of_several_tokens_with_the_text_each_ends_the_answer(llm: LLM) -> None:
    assert llm.tokenizer.control_tokens == {"<s>": [MARK], "</s>": [END], "<|end|>": [END + 1]}


def test_the_text_typed_in_letters_is_a_stop_string_as_before(llm: LLM) -> None:
    ids = llm.tokenize("<s>", parse_special=False)
    step = iter(ids)

    def spell(_: object, row: NDArray[np.float32]) -> NDArray[np.float32]:
        row[next(step)] = 1e9
        return row

    result = llm.generate(
        PROMPT, temperature=0, max_tokens=9, stop=("<s>",), logits_processors=(spell,), speculation=None
    )
    assert (result.tokens, result.text, result.stop_reason) == (tuple(ids), "", "<s>")
