"""The command line in a pseudo-terminal: editing, pasting, history, Ctrl-C, styles, and what only a terminal is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import TinyLlama, metadata, tensors, write_gguf
from tsgg import LLM
from tsgg.cli import editor
from tsgg.settings import Settings

pexpect = pytest.importorskip("pexpect", reason="pexpect plays the terminal")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals of POSIX")

ROOT = Path(__file__).parents[1]
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[>=])")
UP = "\x1b[A"
PROMPT = "\x1b[?2004h"  # bracketed paste is switched on: the prompt is there
ALT_ENTER = "\x1b\r"
Spawn = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("terminal")


@pytest.fixture(scope="module")
def spawn(folder: Path) -> Iterator[Spawn]:
    """Starts python with some words in a terminal of its own."""
    children = []

    def start(*words: str) -> Any:
        env = {
            **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
            "TSGG_HISTORY": str(folder / "state" / "history"),
        }
        child = pexpect.spawn(
            sys.executable, ["-m", *words], cwd=ROOT, env=env, encoding="utf-8", timeout=30, dimensions=(24, 200)
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def chat_with(spawn: Spawn, *flags: str) -> Any:
    """A chat with a scripted model, at its first prompt."""
    child = spawn("tests.scripted_chat", *flags)
    child.expect("/help lists the commands")
    child.expect_exact(PROMPT)
    return child


@pytest.fixture(scope="module")
def shared(spawn: Spawn) -> Any:
    """A chat that is at its prompt after every test: starting one takes seconds."""
    return chat_with(spawn, "--show-drafts")


@pytest.fixture
def chat(shared: Any) -> Any:
    say(shared, "/new", "(a new conversation)")
    return shared


def say(child: Any, text: str, *expected: str) -> None:
    """Types a line, and waits for what comes and for the next prompt."""
    child.send(f"{text}\r")
    for words in expected:
        child.expect_exact(words)
    child.expect_exact(PROMPT)


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


def plain(text: str) -> str:
    return ESCAPES.sub("", text)


def test_alt_enter_begins_a_line_and_enter_sends_all_of_them(chat: Any) -> None:
    say(chat, f"one{ALT_ENTER}two", r"echo 'one\ntwo' of 1")


def test_a_pasted_block_is_one_turn(chat: Any) -> None:
    say(chat, paste("first\nsecond\r\n/third"), r"echo 'first\nsecond\n/third' of 1")


def test_a_line_may_be_longer_than_the_terminals_own_buffer(chat: Any) -> None:
    chat.send(paste("x" * 10_000) + "\r")
    chat.expect("echo '(x*)' of 1")
    assert len(chat.match[1]) == 10_000
    chat.expect_exact(PROMPT)


def test_a_line_can_be_edited_and_history_outlives_the_chat(chat: Any, spawn: Spawn, folder: Path) -> None:
    say(chat, "hellp\x7fo", "echo 'hello' of 1")
    say(chat, f"{UP}!", "echo 'hello!' of 3")
    child = chat_with(spawn, "--no-stats")
    say(child, f"{UP}{UP}?", "echo 'hello?' of 1")
    assert "statistics" not in child.before  # not wanted
    say(child, "drafts", "one two three four\r\n")  # no colours unless they are asked for
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert (folder / "state" / "history").stat().st_mode & 0o777 == 0o600  # for nobody else's eyes


def test_ctrl_c_stops_the_answer_drops_the_turn_and_stays_at_the_prompt(chat: Any) -> None:
    say(chat, "a", "echo 'a' of 1")
    chat.send("long\r")
    chat.expect("word word")
    chat.sendintr()
    chat.expect_exact("(stopped: this turn is dropped)")
    chat.expect_exact(PROMPT)
    say(chat, "b", "echo 'b' of 3")  # a and its answer, and nothing of what was stopped


def test_ctrl_c_at_the_prompt_drops_what_was_typed_and_says_how_to_leave(chat: Any) -> None:
    chat.send("half a line")
    chat.expect("half a line")
    chat.sendintr()
    chat.expect_exact("(Ctrl-D or /quit leaves)")
    chat.expect_exact(PROMPT)
    say(chat, "a", "echo 'a' of 1")


def test_errors_leave_the_user_at_the_prompt(chat: Any) -> None:
    say(chat, "full", "tsgg: the prompt has 9 tokens", "/new begins afresh, /undo takes a turn back")
    say(chat, "late", "half an", "tsgg: the engine's step failed")
    say(chat, "/nope", "no command /nope")
    say(chat, "a", "echo 'a' of 1")


def test_a_byte_that_is_not_utf_8_leaves_the_user_at_the_prompt(chat: Any) -> None:
    os.write(chat.child_fd, b"caf\xe9 \r")
    chat.expect_exact("tsgg: this input is not UTF-8")
    chat.expect_exact(PROMPT)
    say(chat, "a", "echo 'a' of 1")


def test_reasoning_is_dimmed_and_apart_from_the_answer(chat: Any) -> None:
    say(chat, "think", "\x1b[2mpondering \x1b[0m\x1b[2mthis\x1b[0m\r\n\r\nthe answer\r\n")


def test_drafted_tokens_are_coloured_on_wish(chat: Any) -> None:
    say(chat, "drafts", "one \x1b[36mtwo \x1b[0mthree \x1b[36mfour\x1b[0m\r\n")


def test_statistics_follow_every_turn_on_a_terminal(chat: Any) -> None:
    say(chat, "a", "statistics of 'a'")


def test_a_command_is_completed_with_tab(chat: Any) -> None:
    chat.send("/sys\t")
    chat.expect_exact("tem")
    say(chat, " be brief", "(system message: be brief)")
    say(chat, "/system be long", "(system message: be long)")


@pytest.mark.parametrize("typing", [True, False])
def test_sigterm_gives_the_terminal_back_as_it_was(typing: bool, spawn: Spawn) -> None:
    child = chat_with(spawn)
    if not typing:
        child.send("long\r")
        child.expect("word word")
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    modes = termios.tcgetattr(child.child_fd)[3]
    child.close()
    assert child.exitstatus == 128 + signal.SIGTERM and "Traceback" not in child.before
    assert modes & termios.ICANON and modes & termios.ECHO


# -- history ------------------------------------------------------------------------------------------------------------


def test_a_history_that_cannot_be_kept_is_told_of_once_and_hinders_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    history = editor._History(tmp_path / "file" / "history")
    history.append_string("a")
    assert list(history.load_history_strings()) == [] and history.get_strings() == ["a"]
    kept = editor._History(tmp_path / "folder" / "history")
    kept.append_string("a\nb")
    shutil.rmtree(tmp_path / "folder")
    kept.append_string("c")
    kept.append_string("d")
    assert kept.get_strings() == ["a\nb", "c", "d"]
    assert [record.getMessage()[:38] for record in caplog.records] == ["the history of inputs is not kept: [Er"] * 2


def test_the_environment_names_the_history_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    for value, path in ((None, tmp_path / "tsgg" / "chat_history"), ("", None), ("/x/y", Path("/x/y"))):
        environment = {} if value is None else {"TSGG_HISTORY": value}
        monkeypatch.setattr(editor, "settings", Settings.from_environment(environment))
        assert editor.history_file() == path


# -- with a model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Answers to any conversation."""
    shape = TinyLlama()
    values = metadata(shape) | {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}"}
    return str(write_gguf(tmp_path_factory.mktemp("terminal") / "tiny.gguf", values, list(tensors(shape))))


def test_a_terminal_is_told_once_which_model_was_taken_and_what_the_answer_cost(spawn: Spawn, model: str) -> None:
    child = spawn("tsgg", "generate", "-m", model, "-p", "the hell", "-n", "3")
    child.expect(pexpect.EOF)
    assert child.before.count("using ") == 1 and f"using {model} (" in child.before
    assert child.before.count("tok/s") == 2  # a line of statistics


def test_ctrl_c_stops_a_models_answer_and_the_next_one_is_the_one_that_would_have_come(
    spawn: Spawn, model: str, tmp_path: Path
) -> None:
    many = 400  # tokens: a second or more
    with LLM(model, speculation=None) as llm:
        ask = [{"role": "user", "content": "the the the"}]
        right = llm.chat(ask, max_tokens=many, temperature=0, ignore_eos=True).content
    child = spawn("tsgg", "chat", "-m", model, "-n", str(many), "--temp", "0", "--ignore-eos", "--no-spec")
    child.expect_exact(PROMPT)
    child.send("the hell the hell\r")
    child.expect(r"\n[^>]{50}")
    child.sendintr()
    child.expect_exact("(stopped: this turn is dropped)")
    child.expect_exact(PROMPT)
    say(child, "the the the", "tok/s")
    say(child, f"/save {tmp_path / 'saved'}", "(saved to")
    saved = json.loads((tmp_path / "saved").read_text(encoding="utf-8"))["messages"]
    assert saved == [*ask, {"role": "assistant", "content": right}]
