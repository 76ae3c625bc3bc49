"""A conversation that ends with an assistant's message is continued there: the prompt ends with that text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.gguf_writer import write_gguf
from tests.test_chat_guard import tokenizer_of
from tests.tiny_models import TinyLlama
from tests.tiny_vocab import TEMPLATE
from tsgg import LLM
from tsgg.chat import ChatTemplate
from tsgg.errors import UsageError
from tsgg.gguf import read_gguf
from tsgg.tokenizer import Tokenizer

HEAD = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
TRIMMING = TEMPLATE.replace("m.content", "m.content | trim")


def begun(text: str | None, **more: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text, **more}]


@pytest.mark.parametrize("text", ["The answer", "two\nlines", "", "Hi", "assistant"])
def test_the_prompt_ends_with_the_last_message(text: str) -> None:
    assert ChatTemplate(TEMPLATE).render(begun(text)).text == HEAD + text


def test_space_at_the_end_stays_also_where_the_template_trims() -> None:
    assert ChatTemplate(TRIMMING).render(begun("  The answer \n")).text == HEAD + "The answer \n"


def test_an_assistant_who_said_nothing_yet_begins() -> None:
    assert ChatTemplate(TEMPLATE).render(begun(None)).text == HEAD


def test_a_message_is_not_continued_on_wish_nor_behind_tool_calls() -> None:
    template, turn = ChatTemplate(TEMPLATE), "<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(begun("so"), continue_final_message=False).text == HEAD + "so" + turn
    assert template.render(begun("so"), add_generation_prompt=False).text == HEAD + "so<|im_end|>\n"
    call = {"function": {"name": "f", "arguments": {}}}
    assert template.render(begun("so", tool_calls=[call])).text == HEAD + "so" + turn
    for messages in (begun("so")[:1], begun("so", tool_calls=[call])):
        with pytest.raises(UsageError, match="not the text of an assistant"):
            template.render(messages, continue_final_message=True)


def test_a_template_that_hides_the_last_message_is_told_of() -> None:
    with pytest.raises(UsageError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}").render(begun("so"))


def test_control_tokens_in_it_stay_plain_text() -> None:
    tokenizer = tokenizer_of("gpt2")
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert template is not None
    prompt = template.render(begun("so <|im_end|>"))
    ids = template.encode(tokenizer, prompt)
    assert prompt.text == HEAD + "so <|im_end|>" == tokenizer.decode(ids)
    assert ids.count(tokenizer.vocabulary.ids["<|im_end|>"]) == 1  # of the user's turn


def test_gemma4_goes_on_behind_its_thoughts(golden_dir: Path) -> None:
    tokenizer = Tokenizer.from_metadata(read_gguf(golden_dir / "vocab" / "ggml-vocab-gemma-4.gguf").metadata)
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert template is not None
    prompt = template.render(begun("<|channel>thought\nwhy<channel|>Four is"))
    assert prompt.text.endswith("<|turn>model\nFour is")
    assert template.splitter(prompt).whole(" it") == (" it", "")


@pytest.mark.parametrize(
    ("source", "text", "answer", "split"),
    [
        (TEMPLATE, "<think>\nTwo and", " two</think>\nFour", ("Four", " two")),
        (TEMPLATE, "<think>a</think>Four", " is it", (" is it", "")),
        (TEMPLATE.replace("{{ m.content", "<think>\n{{ m.content"), "Two and", " two</think>\nFour", ("Four", " two")),
    ],
)
def test_reasoning_that_was_begun_goes_on(source: str, text: str, answer: str, split: tuple[str, str]) -> None:
    template = ChatTemplate(source)
    assert template.splitter(template.render(begun(text))).whole(answer) == split


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    values = tiny_models.metadata(TinyLlama()) | {"tokenizer.chat_template": TEMPLATE}
    path = write_gguf(tmp_path_factory.mktemp("prefill") / "m.gguf", values, list(tiny_models.tensors(TinyLlama())))
    with LLM(path, n_ctx=256, n_threads=1) as llm:
        yield llm


def test_an_answer_that_is_continued_is_the_answer(llm: LLM) -> None:
    """Greedy, and cut at a place where the text gives the same tokens again."""
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "speculation": None}
    prompt = llm.tokenize(HEAD + "the hell")
    expected = llm.generate(prompt, max_tokens=12, **options)
    result = llm.chat(begun("the hell"), max_tokens=12, **options)
    assert result.generation.tokens == expected.tokens and result.content == expected.text
    chunks = list(llm.chat(begun("the hell"), max_tokens=12, stream=True, **options))
    assert tuple(chunk.chunk.token for chunk in chunks) == expected.tokens
