"""How an answer is split into reasoning and content: streamed in pieces of any size, and as a whole."""

from __future__ import annotations

import pytest

from tsgg.chat import CHANNEL, THINK, ReasoningSplitter


@pytest.mark.parametrize(
    ("prompt", "answer", "content", "reasoning"),
    [
        ("", "plain < text", "plain < text", ""),
        ("", "<think>\nwhy\n</think>\n\nso", "so", "why"),
        ("assistant\n<think>\n", "why\nnot</think>so", "so", "why\nnot"),
        ("", "a <think>b</think>", "a <think>b</think>", ""),
        ("", "<think>never closed </thin", "", "never closed </thin"),
        ("", "<thi", "<thi", ""),
        ("", "\n<think>a</think>b", "b", "a"),
        ("", "<think>a</think>b\n<think>\nc\n</think>\nd", "b\nd", "a\nc"),  # several blocks
        ("", "<think>a</think>\n\n<think>c</think>d", "d", "a\nc"),
        ("", "b\n  <think>c</think>", "b\n  ", "c"),
        ("a\n<think>\n", "why</think>b\n<think>c</think>\n\nd", "b\nd", "why\nc"),
        ("", "use `<think>` and `</think>`", "use `<think>` and `</think>`", ""),  # the answer speaks of them
        ("", "it ends with </think> there", "it ends with </think> there", ""),
        ("", "x <think> y\n</think>", "x <think> y\n", ""),
        ("", " \n", " \n", ""),
    ],
)
def test_reasoning_is_split_the_same_whatever_the_pieces(
    prompt: str, answer: str, content: str, reasoning: str
) -> None:
    for size in (1, 2, 3, 7, len(answer)):
        splitter = ReasoningSplitter(prompt)
        pieces = [splitter.push(answer[i : i + size]) for i in range(0, len(answer), size)]
        pieces.append(splitter.flush())
        assert "".join(piece[0] for piece in pieces) == content
        assert "".join(piece[1] for piece in pieces) == reasoning


@pytest.mark.parametrize(
    ("prompt", "answer", "content", "reasoning"),
    [
        ("<|turn>model\n", "<|channel>thought\nwhy\nnot<channel|>so", "so", "why\nnot"),
        ("<|turn>model\n", "so, plainly", "so, plainly", ""),
        ("<|turn>model\n", "<|channel>thought\n<channel|>so", "so", ""),
        ("<|turn>model\n<|channel>thought\n<channel|>", "so", "so", ""),
        ("<|turn>model\n<|channel>thought\n", "why<channel|>so", "so", "why"),
        ("", "<|channel>thought\nwhy<channel|>so<channel|>", "so", "why"),  # stray tags
        ("", "<channel|>so<|channel>", "so", ""),
        ("", "<|channel>why<channel|>so", "so", "why"),  # without the channel's name
        ("", "<|channel>thoughtful<channel|>so", "so", "ful"),
        ("", "<|channel>thought\na<channel|>b <|channel>thought\nc<channel|>d", "b d", "a\nc"),
        ("", "<|channel>thought\nnever closed <chann", "", "never closed <chann"),
        ("", "a < b <| c <channel", "a < b <| c <channel", ""),
        ("", "\n<|channel>thought\nwhy\n\n<channel|>\n\nso\n", "so\n", "why"),
    ],
)
def test_thought_channels_are_split_the_same_whatever_the_pieces(
    prompt: str, answer: str, content: str, reasoning: str
) -> None:
    for size in (1, 2, 3, 7, len(answer)):
        splitter = ReasoningSplitter(prompt, CHANNEL)
        pieces = [splitter.push(answer[i : i + size]) for i in range(0, len(answer), size)]
        pieces.append(splitter.flush())
        assert "".join(piece[0] for piece in pieces) == content, size
        assert "".join(piece[1] for piece in pieces) == reasoning, size


LONE = [
    ("why\nnot\n</think>\n\nso", "so", "why\nnot"),
    ("why</think>\nso", "so", "why"),
    ("why\n</think>so\n<think>c</think>d", "so\nd", "why\nc"),
    ("why</think>", "", "why"),
    ("\n</think>\n\nso", "so", ""),
]


@pytest.mark.parametrize(("answer", "content", "reasoning"), LONE)
def test_what_stands_before_a_closing_tag_alone_is_reasoning(answer: str, content: str, reasoning: str) -> None:
    assert ReasoningSplitter().whole(answer) == (content, reasoning)
    assert ReasoningSplitter("", CHANNEL).whole("why<channel|>so") == ("so", "why")


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_in_a_stream_only_the_tag_of_a_lone_closing_one_is_left_out(size: int) -> None:
    answer, splitter = "why\n</think>\n\nso", ReasoningSplitter()
    pieces = [splitter.push(answer[i : i + size]) for i in range(0, len(answer), size)]
    pieces.append(splitter.flush())
    assert "".join(piece[0] for piece in pieces) == "why\nso"
    assert not any(piece[1] for piece in pieces)


def test_a_whole_answer_without_a_lone_closing_tag_is_split_as_its_stream() -> None:
    for prompt, answer in (("", "<think>a</think>b\n<think>c</think>d"), ("<think>", "a</think>b"), ("", "plain")):
        streamed, whole = ReasoningSplitter(prompt), ReasoningSplitter(prompt)
        parts = streamed.push(answer), streamed.flush()
        assert whole.whole(answer) == ("".join(part[0] for part in parts), "".join(part[1] for part in parts))


@pytest.mark.parametrize(
    ("begun", "answer", "content", "reasoning"),
    [
        ("The answer", " is 4", " is 4", ""),
        ("<think>\nTwo and", " two</think>\nFour", "Four", " two"),
        ("<think>a</think>\nFour", " is it", " is it", ""),
        ("<think>a</think>\nFour", "\n<think>b</think>c", "\nc", "b"),
        ("so </thi", "nk>", "nk>", ""),  # of a tag that was cut nothing is known
    ],
)
def test_the_split_goes_on_where_the_beginning_of_the_answer_in_the_prompt_left_it(
    begun: str, answer: str, content: str, reasoning: str
) -> None:
    assert ReasoningSplitter("", THINK, begun).whole(answer) == (content, reasoning)
