"""What a model's name means: files first, then packaged models, then the hub (a server on this machine plays it)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tsgg import hub
from tsgg import pull as pull_module
from tsgg.errors import UsageError
from tsgg.packaged import DEFAULT
from tsgg.pull import cache_folder, resolve_model


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that would have been pulled; none is."""
    names: list[str] = []

    def pull(name: str, say: Any, on_progress: Any) -> Path:
        names.append(name)
        return Path("cached.gguf")

    monkeypatch.setattr(pull_module, "pull", pull)
    return names


def test_an_existing_file_wins_over_every_other_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pulled: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gemma3-270m", "user/repo", "model.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
        assert resolve_model(name) == Path(name)
        assert resolve_model(tmp_path / name) == tmp_path / name
    assert not pulled


def test_a_short_name_is_a_packaged_model_and_no_name_is_the_default_one(pulled: list[str]) -> None:
    assert resolve_model("gemma3-270m") == resolve_model(None) == Path("cached.gguf")
    assert pulled == ["gemma3-270m", DEFAULT]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "empty"),
        ("gemma3_270m", r"did you mean 'gemma3-270m'\?"),
        ("nothing-like-it", r"a path of a GGUF file, smollm2-135m.*user/repo:quant"),
        ("models/absent.gguf", "no such file"),
        ("./user/repo", "no such file"),
        ("~/absent", "no such file"),
        ("C:\\models\\absent", "no such file"),
        (Path("user/repo"), "no such file"),
        ("a/b/c", "no such file"),
    ],
)
def test_a_name_that_means_nothing_says_what_was_looked_for(name: str | Path, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_model(name)


def test_a_folder_with_one_gguf_is_that_gguf(tmp_path: Path) -> None:
    for name in ("model.gguf", "README.md", "mmproj-F16.gguf"):  # those that hold no language model do not count
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "folder.gguf").mkdir()
    assert resolve_model(tmp_path) == resolve_model(f"{tmp_path}/") == tmp_path / "model.gguf"
    (tmp_path / "model.gguf").unlink()
    for number in (2, 1):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    assert resolve_model(tmp_path) == tmp_path / "m-00001-of-00002.gguf"


def test_a_folder_with_none_or_several_is_refused_with_the_files_in_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no \.gguf file"):
        resolve_model(tmp_path)
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"name one of its files: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pull_module, "settings", SimpleNamespace(cache_dir=None))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "tsgg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "tsgg"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "tsgg"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "tsgg"


# --- choosing a file of a repository ----------------------------------------------------------------------------------

FILES = [
    "README.md",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-UD-Q4_K_XL.gguf",
    "m-IQ4_XS.gguf",
    "m.q8_0.gguf",
    "mmproj-BF16.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("Q8_0", ["m.q8_0.gguf"]),
        ("q4_k_s", ["m-Q4_K_S.gguf"]),
        ("iq4_xs", ["m-IQ4_XS.gguf"]),
        ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"]),
        ("bf16", FILES[-2:]),
        ("BF16/m-BF16-00001-of-00002.gguf", FILES[-2:]),
    ],
)
def test_a_quant_names_the_file_in_which_it_stands_by_itself(quant: str | None, chosen: list[str]) -> None:
    assert hub.choose("u/r", FILES, quant) == chosen


def test_no_match_and_several_matches_list_the_files() -> None:
    with pytest.raises(UsageError, match=r"no match, expected one file for 'Q4_K': BF16/m-BF16\.gguf, m-IQ4_XS\.gguf"):
        hub.choose("u/r", FILES, "Q4_K")
    with pytest.raises(UsageError, match=r"no match.*'XS'"):
        hub.choose("u/r", [name.replace("_XS", "XS") for name in FILES], "XS")
    with pytest.raises(UsageError, match=r"several matches.*a-Q8_0\.gguf, b-Q8_0\.gguf; name one as u/r:QUANT"):
        hub.choose("u/r", ["a-Q8_0.gguf", "b-Q8_0.gguf", "a-Q4_0.gguf"], "Q8_0")
    with pytest.raises(UsageError, match=r"no match.*without being told"):
        hub.choose("u/r", ["a-Q8_0.gguf", "b-Q8_0.gguf"], None)
    assert hub.choose("u/r", ["only.gguf", "imatrix.gguf"], None) == ["only.gguf"]


def test_a_repository_without_a_whole_model_is_refused() -> None:
    with pytest.raises(UsageError, match="no GGUF model file"):
        hub.choose("u/r", ["model.safetensors", "mmproj.gguf"], None)
    with pytest.raises(UsageError, match=r"1 parts of BF16/m-BF16\.gguf, expected 2"):
        hub.choose("u/r", FILES[:-1], "BF16")


def test_without_the_library_the_error_is_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install tsgg\[hub\]"):
        resolve_model("user/repo")


# --- the whole way, against a server on this machine ------------------------------------------------------------------

RESOLVE = """
import json, sys
from tsgg.errors import TsggError
from tsgg.pull import resolve_model
for name in sys.argv[1:]:
    lines, events = [], []
    try:
        path = resolve_model(name, lines.append, lambda event: events.append([event.phase, event.done, event.total]))
        answer = {"path": str(path), "lines": lines, "events": events}
    except TsggError as error:
        answer = {"kind": type(error).__name__, "error": str(error)}
    print(json.dumps(answer))
"""


@dataclass
class Hub:
    """What the server knows and what it was asked."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    tokens: set[str | None] = field(default_factory=set)

    def resolve(self, home: Path, *names: str, **environment: str) -> list[dict[str, Any]]:
        """What resolve_model says to each of `names` in a fresh process, for which the library reads its settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env = {
            **kept,
            "HF_HOME": str(home),
            "HF_ENDPOINT": self.address,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, *names], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "%|" not in done.stderr  # the library's own bar is not shown
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def server() -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    known = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.tokens.add(self.headers.get("Authorization"))
            path = self.path.partition("?")[0].strip("/")
            words = path.removeprefix("api/models/").split("/")
            repository = "/".join(words[:2])
            if repository in known.broken:
                self.answer(500, b"{}")
            elif repository not in known.repositories:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif path.startswith("api/"):
                files = [{"rfilename": name} for name in known.repositories[repository]]
                self.answer(200, json.dumps({"id": repository, "sha": "c" * 40, "siblings": files}).encode())
            elif repository in known.gated:
                self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            else:
                data = known.repositories[repository]["/".join(words[4:])]
                etag = f'"{hash(data) & 0xFFFFFFFF:040x}"'
                self.answer(200, data, {"ETag": etag, "X-Repo-Commit": "c" * 40})

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        known.address = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield known
        listening.shutdown()
        thread.join()


def test_a_hub_file_is_chosen_fetched_and_found_again_offline(server: Hub, tmp_path: Path) -> None:
    server.repositories["u/r"] = {name: name.encode() for name in FILES}
    whole, split, absent = server.resolve(tmp_path, "u/r:q8_0", "u/r:BF16", "u/r:Q2_K", HF_TOKEN="hf_secret")
    assert Path(whole["path"]).read_bytes() == b"m.q8_0.gguf"
    assert whole["lines"] == ["fetching m.q8_0.gguf of u/r"]
    assert whole["events"][-1] == ["download", 11, 11]
    parts = sorted(Path(split["path"]).parent.iterdir())
    assert [part.read_bytes().decode() for part in parts] == FILES[-2:]
    assert Path(split["path"]) == parts[0]
    assert (absent["kind"], "m-Q4_K_M.gguf" in absent["error"]) == ("UsageError", True)
    assert "Bearer hf_secret" in server.tokens

    found, unknown = server.resolve(tmp_path, "u/r:q8_0", "u/other", HF_HUB_OFFLINE="1")
    assert found["path"] == whole["path"] and found["events"] == []
    assert "HF_HUB_OFFLINE is set" in unknown["error"]
    unreachable, offline = server.resolve(tmp_path, "u/r:bf16", "u/other", HF_ENDPOINT="http://127.0.0.1:9")
    assert offline["error"].startswith("u/other is not in the cache and the hub cannot be reached: is there a network?")
    assert unreachable["path"] == split["path"]
    assert "cannot be reached" in unreachable["lines"][0]


def test_what_the_hub_refuses_is_one_sentence(server: Hub, tmp_path: Path) -> None:
    server.repositories["u/gated"] = {"m.gguf": b"x"}
    server.gated.add("u/gated")
    server.broken.add("u/broken")
    gated, missing, broken, impossible = server.resolve(tmp_path, "u/gated", "u/missing", "u/broken", "u/--r..s")
    assert gated["error"].startswith("u/gated is gated: accept its terms") and "HF_TOKEN" in gated["error"]
    assert (missing["kind"], "no repository u/missing" in missing["error"]) == ("UsageError", True)
    assert broken["error"].startswith("cannot fetch u/broken")
    assert impossible["kind"] == "UsageError"
    assert not any("\n" in answer["error"] for answer in (gated, missing, broken, impossible))
