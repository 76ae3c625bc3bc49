"""The package client as a child process: what it is asked, what it says, and that it never outlives who waits for it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tsgg.errors import TsggError, UsageError
from tsgg.package_client import download, find_client

Client = Callable[[str], list[str]]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """Makes a command that stands for pip, of the lines of a program."""

    def make(body: str) -> list[str]:
        script = tmp_path / "pip.py"
        start = "import os, subprocess, sys, tempfile, time\nfolder = sys.argv[sys.argv.index('--dest') + 1]\n"
        script.write_text(start + body)
        return [sys.executable, str(script)]

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "packages").mkdir()
    return tmp_path / "packages"


def nothing(size: int) -> None: ...


def test_the_client_is_asked_for_exact_wheels_without_their_dependencies(client: Client, folder: Path) -> None:
    name, command = find_client()
    assert name == "pip" and command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert not any("://" in word or "index" in word for word in command)  # which index is the user's own setting
    download(client("open(folder + '/said', 'w').write(repr(sys.argv[1:]))"), ["a==1", "b==2"], folder, nothing)
    assert (folder / "said").read_text() == repr(["--dest", str(folder), "a==1", "b==2"])


def test_uv_runs_pip_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/uv")
    name, command = find_client()
    assert (name, command[:3], command[5:7]) == ("uv", ["/bin/uv", "tool", "run"], ["pip", "download"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="ensurepip"):
        find_client()


def test_what_the_client_keeps_for_itself_lies_in_the_folder_and_is_counted(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsgg.package_client.INTERVAL", 0.01)
    sizes: list[int] = []

    def watch(size: int) -> None:
        sizes.append(size)
        if size == 12:
            (folder / "go on").touch()

    body = """
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x" * 12)
    file.flush()
    while not os.path.exists(folder + "/go on"):
        time.sleep(0.01)
"""
    download(client(body), [], folder, watch)
    assert 12 in sizes


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("noise\\n\\nERROR: No matching distribution", r"could not fetch the model: noise / ERROR: No matching.*a==1"),
        ("", "exit status 3"),
        (
            "Retrying after NewConnectionError(): Name or service not known\\nERROR: No matching",
            "^the package index cannot",
        ),
        (
            "error: client error (Connect)\\n  Caused by: dns error: failed to lookup address",
            "^the package index cannot",
        ),
    ],
)
def test_what_the_client_says_is_one_line_and_no_network_is_told_as_that(
    said: str, words: str, client: Client, folder: Path
) -> None:
    with pytest.raises(TsggError, match=words) as caught:
        download(client(f"sys.stderr.write('{said}'); sys.exit(3)"), ["a==1"], folder, nothing)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="sessions of POSIX")
@pytest.mark.parametrize("reason", [KeyboardInterrupt, SystemExit])
def test_no_process_of_the_clients_outlives_who_waits_for_it(
    reason: type[BaseException], client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsgg.package_client.INTERVAL", 0.01)
    body = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(folder + "/pids", "w").write(f"{os.getpid()} {child.pid} .")
time.sleep(600)
"""

    def watch(size: int) -> None:
        if (folder / "pids").exists() and (folder / "pids").read_text().endswith("."):
            raise reason

    with pytest.raises(reason):
        download(client(body), [], folder, watch)
    for pid in map(int, (folder / "pids").read_text().split()[:2]):
        assert ended(lambda pid=pid: os.kill(pid, 0), pid)


def ended(ask: Callable[[], None], pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has waited for yet, within ten seconds."""
    for _ in range(1000):
        try:
            ask()
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False
