"""Chat templates: what they may see, what they may do, and how an answer is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tiny_vocab import byte_level_metadata
from tsgg.chat import ChatPrompt, ChatTemplate
from tsgg.errors import ModelFileError, TsggError, UsageError
from tsgg.gguf import Metadata, read_gguf
from tsgg.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
SMOLLM2_CHAT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198, 1,
    4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip


def test_the_template_of_smollm2_gives_the_reference_ids(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_metadata(read_gguf(smollm2_path).metadata)
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert template is not None
    text = template.render([{"role": "user", "content": "What is the capital of France?"}])
    assert template.encode(tokenizer, text) == SMOLLM2_CHAT


def test_bos_is_not_doubled() -> None:
    values = dict(byte_level_metadata()) | {"tokenizer.ggml.add_bos_token": True}
    values["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer.from_metadata(Metadata(values))
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert template is not None
    ids = template.encode(tokenizer, template.render(USER))
    assert ids.count(tokenizer.bos or -1) == 1 and ids[0] == tokenizer.bos
    assert template.encode(tokenizer, ChatPrompt("Hi"))[0] == tokenizer.bos


def test_keywords_tools_and_thinking_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ mood }} {{ tools | tojson }} {{ add_generation_prompt }}")
    prompt = template.render(USER, tools=[{"name": "a<b"}], enable_thinking=False, mood="calm")
    assert prompt.text == 'False calm [{"name": "a<b"}] True'


def test_tojson_keeps_order_and_characters() -> None:
    template = ChatTemplate("{{ value | tojson }}|{{ value | tojson(indent=1) }}")
    assert template.render(USER, value={"b": "é&", "a": 1}).text == '{"b": "é&", "a": 1}|{\n "b": "é&",\n "a": 1\n}'
    template = ChatTemplate("{{ value | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}")
    assert template.render(USER, value={"b": "é", "a": 1}).text == '{"a":1,"b":"\\u00e9"}'


def test_strftime_now_and_loop_controls_work() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render(USER).text) == 4
    assert (
        ChatTemplate("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render(USER).text
        == "1"
    )


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]).text == "ab"


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)


@pytest.mark.parametrize("source", ["{% for %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * (1 << 20) + "x"])
def test_a_broken_template_is_refused_when_it_is_used_and_not_before(source: str) -> None:
    template = ChatTemplate(source)  # the model must stay usable for plain prompts
    with pytest.raises(ModelFileError, match=r"broken|characters"):
        template.render(USER)


def test_a_chat_prompt_never_ends_with_eos() -> None:
    values = dict(byte_level_metadata()) | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_metadata(Metadata(values))
    template = ChatTemplate.from_tokenizer(tokenizer)
    assert template is not None
    assert tokenizer.encode("Hi")[-1] == tokenizer.eos  # the file's rule, for plain prompts
    assert template.encode(tokenizer, ChatPrompt("Hi")) == [tokenizer.bos, *tokenizer.encode("Hi", add_bos=False)]


def test_generation_tags_show_their_body() -> None:
    assert ChatTemplate("a{% generation %}{{ messages[0].content }}{% endgeneration %}b").render(USER).text == "aHib"


@pytest.mark.parametrize("tools", ["a tool", {"name": "x"}, [1], 3])
def test_tools_of_the_wrong_shape_are_usage_errors(tools: object) -> None:
    with pytest.raises(UsageError, match="tool"):
        ChatTemplate("x").render(USER, tools=tools)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set x = messages.append(1) %}{{ messages | length }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__.os }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TsggError):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "messages", ["Hi", [], {}, [1], [{"role": 1, "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 3}],
                 [{"role": "user", "content": [{"type": "image"}]}]],
)  # fmt: skip
def test_messages_of_the_wrong_shape_are_usage_errors(messages: object) -> None:
    with pytest.raises(UsageError):
        ChatTemplate("x").render(messages)  # type: ignore[arg-type]


GEMMA4 = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"
)


def test_the_tags_are_those_that_the_template_knows() -> None:
    template = ChatTemplate(GEMMA4)
    answer = "<|channel>thought\nwhy<channel|>so"
    assert template.splitter(template.render(USER, enable_thinking=True)).push(answer) == ("so", "why")
    assert template.splitter(template.render(USER, enable_thinking=False)).push("so") == ("so", "")
    plain = ChatTemplate("{{ messages[0].content }}")
    assert plain.splitter(ChatPrompt("Hi")).push("<think>why</think>so") == ("so", "why")
    assert plain.splitter(ChatPrompt("Hi")).push(answer) == (answer, "")


def test_gemma4_ends_generation_by_its_texts_and_channels_stay_visible(golden_dir: Path) -> None:
    """Ids of the real vocabulary: reference/gemma.md, sections 4.3 and 4.5."""
    tokenizer = Tokenizer.from_metadata(read_gguf(golden_dir / "vocab" / "ggml-vocab-gemma-4.gguf").metadata)
    assert tokenizer.end_of_generation == {1, 106, 50}
    ids = tokenizer.encode("<|channel>thought\nwhy<channel|>so<turn|>", add_bos=False)
    assert (ids[0], ids[-1], ids.count(101)) == (100, 106, 1)
    assert tokenizer.decode(ids, skip_special=True) == "<|channel>thought\nwhy<channel|>so"


def test_tokens_that_a_file_suppresses_are_known(golden_dir: Path) -> None:
    values = dict(read_gguf(golden_dir / "trunks" / "gemma4-e.gguf").metadata)
    key = "tokenizer.ggml.suppress_tokens"
    assert Tokenizer.from_metadata(Metadata(values)).suppressed == frozenset()
    values[key] = np.array([3, 299], np.int32)
    assert Tokenizer.from_metadata(Metadata(values)).suppressed == {3, 299}
    for wrong in (np.array([300], np.int32), np.array([-1], np.int32), np.array([1.0], np.float32)):
        with pytest.raises(ModelFileError, match=r"suppress_tokens names tokens outside the vocabulary of 300"):
            Tokenizer.from_metadata(Metadata(values | {key: wrong}))
