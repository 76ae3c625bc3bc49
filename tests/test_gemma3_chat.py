"""Gemma 3's turns: text and ids of a conversation, and where an answer ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tsgg import LLM, UsageError
from tsgg.chat import ChatTemplate

# The released instruct files are not at hand; this states their documented turns: assistant is `model`, a system text goes in
# front of the first user's, contents are trimmed, and turns must alternate.
TEMPLATE = """\
{{ bos_token }}
{%- if messages[0].role == 'system' -%}
    {%- set prefix, turns = messages[0].content + '\n\n', messages[1:] -%}
{%- else -%}
    {%- set prefix, turns = '', messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' + (prefix if loop.first else '') }}
    {%- if message.content is string -%}
        {{ message.content | trim }}
    {%- else -%}
        {%- for part in message.content -%}{{ part.text | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
CONVERSATION = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": " What is 2 + 2?\n"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And  <b>3</b>\n\n- twice?"},
]
TEXT = (
    "<bos><start_of_turn>user\nAnswer in one line.\n\nWhat is 2 + 2?<end_of_turn>\n"
    "<start_of_turn>model\nFour.<end_of_turn>\n"
    "<start_of_turn>user\nAnd  <b>3</b>\n\n- twice?<end_of_turn>\n"
    "<start_of_turn>model\n"
)
# Of TEXT by llama.cpp b11434, with special tokens parsed.
IDS = [
    2, 105, 2364, 107, 7925, 528, 886, 1757, 236761, 108, 3689, 563, 236743, 236778, 900, 236743, 236778, 236881, 106, 107,
    105, 4368, 107, 26391, 236761, 106, 107,
    105, 2364, 107, 3133, 138, 200, 236800, 209, 108, 236772, 10911, 236881, 106, 107,
    105, 4368, 107,
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(gemma3_path: Path) -> Iterator[LLM]:
    with LLM(gemma3_path, device="cpu", n_ctx=256, speculation=None) as llm:
        yield llm


def test_a_conversation_has_the_documented_text_and_the_ids_of_another_engine(llm: LLM) -> None:
    template = ChatTemplate(TEMPLATE, bos="<bos>")
    prompt = template.render(CONVERSATION)
    assert prompt.text == TEXT
    assert template.encode(llm.tokenizer, prompt) == IDS  # one BOS, though tokenizer and template both give one


def test_turns_that_do_not_alternate_are_refused_in_the_templates_words() -> None:
    with pytest.raises(UsageError, match="must alternate"):
        ChatTemplate(TEMPLATE).render([CONVERSATION[1], CONVERSATION[3]])


def test_the_base_model_has_no_template_and_says_what_to_do(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"no chat template: use generate\(\)"):
        llm.chat(CONVERSATION)


@pytest.mark.parametrize(("token", "text"), [(1, "<eos>"), (106, "<end_of_turn>"), (212, "</s>")])
def test_an_answer_ends_at_each_end_of_generation_token_and_does_not_show_it(llm: LLM, token: int, text: str) -> None:
    assert llm.tokenizer.token_text(token) == text
    answer = llm.generate(IDS, max_tokens=8, temperature=0, logit_bias={token: 1000.0})
    assert (answer.tokens, answer.text, answer.finish_reason, answer.stop_reason) == ((token,), "", "stop", token)
    more = llm.generate(IDS, max_tokens=3, temperature=0, logit_bias={token: 1000.0}, ignore_eos=True)
    assert len(more.tokens) == 3 and token not in more.tokens and more.finish_reason == "length"
