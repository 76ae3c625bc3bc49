"""What a shell may do to a command: close its pipes, fill the disk, lack a character, end it by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import TinyLlama, write_tiny
from tsgg.cli import main, shell
from tsgg.errors import UsageError

TSGG = [sys.executable, "-m", "tsgg"]
posix = pytest.mark.skipif(os.name != "posix", reason="signals and /dev files of POSIX")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("shell") / "tiny.gguf", TinyLlama()))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signal handlers are as before after every command."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before


def generate(model: str, *flags: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    command = [*TSGG, "generate", "-m", model, "-p", "the hell", "-n", "20", "--temp", "0", *flags]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **keywords)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done


@posix
def test_a_closed_pipe_ends_the_command_quietly_with_sigpipes_status(model: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = generate(model, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@posix
@pytest.mark.parametrize(
    "words", [["devices"], ["--help"], ["generate", "--help"], ["--version"], ["devices", "--json"]]
)
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_disk_is_one_line_whatever_is_printed(words: list[str], buffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*TSGG, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )
    assert (done.returncode, done.stderr) == (1, "tsgg: No space left on device\n")


@posix
def test_a_full_disk_in_the_middle_of_an_answer_is_one_line(model: str) -> None:
    with open("/dev/full", "w") as full:
        done = generate(model, stdout=full)
    assert (done.returncode, done.stderr) == (1, "tsgg: No space left on device\n")


def test_a_character_that_the_output_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert shell.run(lambda: print("größe \udcff") or 0) == 0  # type: ignore[func-returns-value]
        assert out.errors == "strict"  # as before
    assert (tmp_path / "out").read_text() == "gr\\xf6\\xdfe \\udcff\n"


@posix
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_standard_streams_are_no_errors(closed: str, model: str, tmp_path: Path) -> None:
    command = (
        f'"{sys.executable}" -m tsgg generate -m "{model}" -p x -n 3 {closed}; echo "status $?" > "{tmp_path}/status"'
    )
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (tmp_path / "status").read_text() == "status 0\n" and not done.stderr


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_unwind_and_give_the_status_that_shells_expect(number: signal.Signals) -> None:
    cleaned = []

    def command() -> int:
        try:
            os.kill(os.getpid(), number)
            for _ in range(1000):
                pass
        finally:
            os.kill(os.getpid(), number)  # an impatient second one does not disturb what cleans up
            cleaned.append(True)
        return 0

    with pytest.raises(SystemExit) as left:
        shell.run(command)
    assert left.value.code == 128 + number and cleaned == [True]


@posix
def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert shell.run(lambda: os.kill(os.getpid(), signal.SIGHUP) or 0) == 0  # type: ignore[func-returns-value]
    finally:
        signal.signal(signal.SIGHUP, before)


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UsageError("two\nlines"), 2, "tsgg: two lines\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (PermissionError(13, "Permission denied", "/x/y"), 1, "tsgg: [Errno 13] Permission denied: '/x/y'\n"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    error: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.run(raising(error)) == status
    assert capsys.readouterr() == ("", words)


def test_an_error_that_nobody_can_read_is_still_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        assert shell.run(raising(UsageError("unheard"))) == 2
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), broken.fileno())


def test_the_version_is_the_packages_and_names_ggml(capsys: pytest.CaptureFixture[str]) -> None:
    import tsgg

    with pytest.raises(SystemExit) as left:
        main(["--version"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and out.startswith(f"tsgg {tsgg.__version__} (ggml ")


@posix
def test_a_signal_to_an_event_loop_is_told_at_once_and_ends_the_command_behind_the_block() -> None:
    steps = []

    def command() -> int:
        with shell.signals_deferred(lambda: steps.append("told")):
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("the block goes on")
        raise AssertionError("never reached")

    with pytest.raises(SystemExit) as left:
        shell.run(command)
    assert left.value.code == 128 + signal.SIGTERM
    assert steps == ["told", "the block goes on"]
