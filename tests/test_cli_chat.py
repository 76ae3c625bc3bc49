"""`tsgg chat` over the lines of a pipe, and what its commands do to the conversation."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripted_chat import ScriptedLLM
from tsgg.cli import chat, main
from tsgg.cli.conversation import Conversation
from tsgg.cli.writer import Writer
from tsgg.errors import UsageError

Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def llm() -> ScriptedLLM:
    return ScriptedLLM()


@pytest.fixture
def talk(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Runs a chat over lines; gives its status, its answers and what it says."""
    monkeypatch.setattr(chat, "load", lambda arguments, bars: llm)

    def run(*lines: str | bytes, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        data = b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        status = main(["chat", *flags])
        return status, *capsys.readouterr()

    return run


def test_every_line_of_a_pipe_is_a_turn_and_answers_alone_are_on_stdout(talk: Talk) -> None:
    assert talk("hello", "", "grüße", "last without a line break") == (
        0,
        "echo 'hello' of 1\necho 'grüße' of 3\necho 'last without a line break' of 5\n",
        "",
    )


def test_a_line_may_be_longer_than_a_terminals_buffer(talk: Talk, llm: ScriptedLLM) -> None:
    talk("x" * 100_000)
    assert llm.asked[0][0][-1]["content"] == "x" * 100_000


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("full", "the context holds 8: shorten it (here: /new begins afresh, /undo takes a turn back)"),
        ("late", "the engine's step failed"),
        (b"\xff\n", "not UTF-8"),
        ("/nope", "no command /nope"),
        ("/undo", "nothing has been asked"),
        ("/regen", "nothing has been asked"),
        ("/load /absent.json", "cannot load /absent.json"),
        ("/save", "name a file"),
    ],
)
def test_an_error_is_one_line_the_turn_was_never_there_and_the_conversation_goes_on(
    bad: str | bytes, words: str, talk: Talk
) -> None:
    status, out, err = talk(bad, "hello")
    assert status == 2  # a script is told that a line of it failed
    assert out.endswith("echo 'hello' of 1\n") and words in err
    assert err.startswith("tsgg: ") and err.count("\n") == 1


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(talk: Talk) -> None:
    assert "did you mean '/regen'?" in talk("/regn")[2]


def test_a_line_that_begins_with_two_slashes_says_one(talk: Talk) -> None:
    assert talk("//help", "///x")[1] == "echo '/help' of 1\necho '//x' of 3\n"


def test_help_lists_every_command(talk: Talk) -> None:
    err = talk("/help")[2]
    for name in ("/new", "/undo", "/regen", "/system", "/save", "/load", "/stats", "/help", "/quit", "//"):
        assert f"{name} " in err or f"{name}..." in err


def test_new_forgets_everything_but_the_system_message(talk: Talk, llm: ScriptedLLM) -> None:
    assert talk("a", "/new", "b", flags=("--system", "be brief"))[1] == "echo 'a' of 2\necho 'b' of 2\n"
    assert llm.asked[-1][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "b"}]


def test_undo_takes_the_last_turn_back_and_shows_it(talk: Talk) -> None:
    _, out, err = talk("a", "b", "/undo", "c", "/undo", "/undo", "d")
    assert out.splitlines()[2:] == ["echo 'c' of 3", "echo 'd' of 1"]
    assert err.splitlines() == ["(taken back: b)", "(taken back: c)", "(taken back: a)"]


def test_regen_answers_the_last_message_again_with_another_seed_and_replaces_the_answer(talk: Talk) -> None:
    out = talk("a", "/regen", "/regen", "b", flags=("--seed", "7"))[1]
    assert out.splitlines() == [
        "echo 'a' of 1 seed 7",
        "echo 'a' of 1 seed 8",
        "echo 'a' of 1 seed 9",
        "echo 'b' of 3 seed 7",
    ]


def test_system_sets_shows_and_replaces_the_system_message(talk: Talk, llm: ScriptedLLM) -> None:
    _, _, err = talk("/system", "/system be brief", "a", "/system be long", "b")
    assert err.splitlines() == [f"(system message: {text})" for text in ("none", "be brief", "be long")]
    roles = [message["role"] for message in llm.asked[-1][0]]
    assert roles == ["system", "user", "assistant", "user"] and llm.asked[-1][0][0]["content"] == "be long"


def test_stats_shows_what_the_last_turn_did(talk: Talk) -> None:
    assert talk("/stats", "a", "/stats")[2] == "nothing was generated yet\nstatistics of 'a'\n"
    assert talk("a", "b", flags=("--stats",))[2] == "statistics of 'a'\nstatistics of 'b'\n"


def test_reasoning_is_apart_from_the_answer(talk: Talk) -> None:
    assert talk("think", "a") == (0, "the answer\necho 'a' of 3\n", "pondering this\n\n")


def test_an_answer_that_ends_because_the_context_is_full_says_so(talk: Talk) -> None:
    assert "the context is full, the answer ends here" in talk("end")[2]


def test_what_goes_into_a_pipe_is_as_the_model_said_it(talk: Talk) -> None:
    assert talk("control")[1] == "a\x1b]0;title\x07b\rc\td\n"
    assert talk("drafts", flags=("--show-drafts",))[1] == "one two three four\n"  # colours are for terminals


def test_a_prompt_is_asked_once_from_a_flag_a_file_or_standard_input(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("two\nlines\n")
    assert talk("unread", flags=("-p", r"a\n")) == (0, "echo 'a\\\\n' of 1\n", "")
    assert talk("unread", flags=("-e", "-p", r"a\nb"))[1] == "echo 'a\\nb' of 1\n"
    assert talk("unread", flags=("-f", str(tmp_path / "p")))[1] == "echo 'two\\nlines' of 1\n"
    assert talk("from", "a pipe", flags=("-p", "-"))[1] == "echo 'from\\na pipe' of 1\n"
    assert talk(flags=("-p", "full"))[0] == 2


def test_quit_leaves_what_follows_unread(talk: Talk) -> None:
    assert talk("a", "/quit", "b")[1] == "echo 'a' of 1\n"


def test_a_model_without_a_template_is_refused_before_anything_is_asked(talk: Talk, llm: ScriptedLLM) -> None:
    llm.template = None
    status, out, err = talk("a")
    assert (status, out) == (2, "") and "scripted.gguf has no chat template: use tsgg generate" in err and not llm.asked


# -- the conversation ---------------------------------------------------------------------------------------------------


def ask(conversation: Conversation, text: str) -> str:
    return "".join(chunk.content for chunk in conversation.stream(conversation.question(text)))


def test_a_turn_that_is_left_in_the_middle_was_never_there_and_its_request_is_ended(llm: ScriptedLLM) -> None:
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    conversation.messages = [{"role": "user", "content": "long"}, {"role": "assistant", "content": "an answer"}]
    before = list(conversation.messages)
    for turn in (conversation.question("long"), conversation.last_question()):
        chunks = conversation.stream(turn)
        next(chunks)
        with pytest.raises(KeyboardInterrupt):
            chunks.throw(KeyboardInterrupt())
        assert conversation.messages == before
    assert llm.left == 2


def test_a_saved_conversation_goes_on_where_it_was(llm: ScriptedLLM, tmp_path: Path) -> None:
    first = Conversation(llm, {}, "be brief")  # type: ignore[arg-type]
    ask(first, "größe 🎈")
    first.save(tmp_path / "talk.json")
    second = Conversation(llm, {})  # type: ignore[arg-type]
    assert second.load(tmp_path / "talk.json") == 3
    assert second.messages == first.messages and second.system == "be brief"
    assert ask(second, "b") == "echo 'b' of 4"
    second.save(tmp_path / "talk.json")  # the file it came from
    assert len(json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))["messages"]) == 5
    assert os.listdir(tmp_path) == ["talk.json"]


def test_saving_never_writes_over_a_file_of_somebody_else(llm: ScriptedLLM, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(UsageError, match="give another name"):
            conversation.save(tmp_path / "thesis.txt")
        conversation.save(tmp_path / "talk.json")
        conversation.save(tmp_path / "talk.json")
    conversation.new()
    with pytest.raises(UsageError, match="give another name"):
        conversation.save(tmp_path / "talk.json")
    with pytest.raises(UsageError, match="cannot save"):
        conversation.save(tmp_path / "absent" / "talk.json")
    assert (tmp_path / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize(
    "text",
    ["", "{", "7", "{}", '["a"]', '[{"role": "user"}]', '[{"role": "user", "content": null}]', "[" * 100_000, "\ud800"],
)
def test_a_file_that_is_no_conversation_changes_nothing(text: str, llm: ScriptedLLM, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(text.encode("utf-8", "surrogatepass"))
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    ask(conversation, "a")
    before = list(conversation.messages)
    with pytest.raises(UsageError, match=str(tmp_path / "f")):
        conversation.load(tmp_path / "f")
    assert conversation.messages == before


# -- what a terminal is given -------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "dim", "draft"),
    [
        ({"TERM": "xterm"}, "\x1b[2mx\x1b[0m", "\x1b[36mx\x1b[0m"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "\x1b[2mx\x1b[0m", "\x1b[4mx\x1b[0m"),
        ({"TERM": "dumb"}, "x", "x"),
    ],
)
def test_styles_are_what_the_terminal_can_show(
    environment: dict[str, str], dim: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for style, shown in (("dim", dim), ("draft", draft), ("", "x")):
        terminal, file = Terminal(), io.StringIO()
        Writer(terminal).write("x", style)
        Writer(file).write("x", style)
        assert (terminal.getvalue(), file.getvalue()) == (shown, "x")


def test_control_characters_of_a_model_do_not_reach_a_terminal() -> None:
    terminal = Terminal()
    Writer(terminal).write("a\x1b[2Jb\rc\x9bd\x7f\te\n")
    assert terminal.getvalue() == "a\ufffd[2Jb\ufffdc\ufffdd\ufffd\te\n"
