"""GGUF files of the Hugging Face hub, through huggingface_hub (optional: `pip install tsgg[hub]`).

Account, endpoint, cache and offline mode are the library's own business (HF_TOKEN, HF_ENDPOINT, HF_HOME,
HF_HUB_OFFLINE), and so is a file that is half there: the next attempt goes on with it. This module only chooses the file.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tsgg.errors import TsggError, UsageError
from tsgg.gguf_names import PART, group_parts
from tsgg.progress import OnProgress, Progress

_USUAL_QUANT = "Q4_K_M"  # taken where no quant is named and there are several files, as llama.cpp does
_TIMEOUT = 10  # seconds for the list of files
_SHOWN = 20  # files listed in an error


def fetch(
    repository: str, quant: str | None, say: Callable[[str], None], on_progress: OnProgress | None = None
) -> Path:
    """The file of `repository` ("user/repo") that `quant` names (a quantization or a file name; None: the only file or
    Q4_K_M), downloaded where it is not in the library's cache; of a split file all parts, and the path of the first.

    Raises UsageError without huggingface_hub, and where no file or more than one fits; TsggError where the hub cannot
    be reached or refuses.
    """
    hub = _library()
    names, offline = _list_files(hub, repository, say)
    parts = choose(repository, names, quant)
    absent = [part for part in parts if not isinstance(hub.try_to_load_from_cache(repository, part), str)]
    if absent and not offline:
        say(f"fetching {', '.join(absent)} of {repository}")
    keywords: dict[str, Any] = {"local_files_only": offline}
    if "tqdm_class" in inspect.signature(hub.hf_hub_download).parameters:  # without it the library shows its own bar
        keywords["tqdm_class"] = _bar(on_progress or (lambda progress: None))
    try:
        paths = [hub.hf_hub_download(repository, name, **keywords) for name in parts]
    except Exception as error:  # the library's transport raises its own kinds, which differ between its versions
        raise _explained(hub, repository, error) from error
    return Path(paths[0])


def _bar(on_progress: OnProgress) -> Any:
    """What the library takes for a progress bar: it shows nothing and reports."""

    class Reporting:
        def __init__(self, *_: Any, total: float | None = None, initial: float = 0, **__: Any) -> None:
            self.n, self.total = initial, total

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            on_progress(Progress("download", int(self.n), None if self.total is None else int(self.total)))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None  # close, refresh, set_description: nothing to show

    return Reporting


def choose(repository: str, names: list[str], quant: str | None) -> list[str]:
    """The file of `names` that `quant` means, as its parts in order (one, where it is not split).

    A quant matches where it stands by itself in a name, whatever its case: Q4_K does not match Q4_K_M, nor IQ4_K.
    Raises UsageError listing what there is.
    """
    models = group_parts(names)
    if not models:
        raise UsageError(f"{repository} has no GGUF model file; look for a repository whose name ends in -GGUF")
    if quant is None:
        found = list(models) if len(models) == 1 else _matching(models, _USUAL_QUANT)
        wanted = f"a file to take without being told (the only one, or one {_USUAL_QUANT})"
    else:
        found = [name for name, parts in models.items() if quant in (name, *parts)] or _matching(models, quant)
        wanted = f"one file for {quant!r}"
    if len(found) != 1:
        listed = found or list(models)
        rest = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        raise UsageError(
            f"{repository} has {'several matches' if found else 'no match'}, expected {wanted}: "
            f"{', '.join(listed[:_SHOWN])}{rest}; name one as {repository}:QUANT or {repository}:FILE"
        )
    parts = models[found[0]]
    part = PART.fullmatch(parts[0])
    if part and [int(match["number"]) for name in parts if (match := PART.fullmatch(name))] != list(
        range(1, int(part["count"]) + 1)
    ):
        raise UsageError(
            f"{repository} has {len(parts)} parts of {found[0]}, expected {int(part['count'])}: incomplete"
        )
    return parts


def _matching(models: dict[str, list[str]], quant: str) -> list[str]:
    pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [name for name in models if pattern.search(name)]


def _library() -> Any:
    try:
        import_module("huggingface_hub.utils")  # the package loads its submodules only when they are imported
        return import_module("huggingface_hub")
    except ImportError:
        raise UsageError(
            "models of the Hugging Face hub need the package huggingface_hub, which is not installed; "
            "run `pip install tsgg[hub]`, or download the file and give its path"
        ) from None


def _list_files(hub: Any, repository: str, say: Callable[[str], None]) -> tuple[list[str], bool]:
    """Names of the repository's files; True where the hub cannot be reached and they are those downloaded before."""
    try:
        # Not list_repo_files: it tries for 24 seconds before it says that there is no network.
        siblings = hub.HfApi().model_info(repository, timeout=_TIMEOUT).siblings
        return [file.rfilename for file in siblings or ()], False
    except Exception as error:  # see fetch
        if isinstance(error, (hub.utils.HfHubHTTPError, ValueError)):  # an answer, or a name that the hub cannot have
            raise _explained(hub, repository, error) from error
        cached = _cached_files(hub, repository)
        if not cached:
            raise _explained(hub, repository, error) from error
        say(f"the hub cannot be reached, choosing among the downloaded files of {repository}")
        return cached, True


def _cached_files(hub: Any, repository: str) -> list[str]:
    try:
        repositories = hub.scan_cache_dir().repos
    except hub.utils.CacheNotFound:
        return []
    for cached in repositories:
        if cached.repo_id == repository and cached.repo_type == "model" and "main" in cached.refs:
            revision = cached.refs["main"]
            return [file.file_path.relative_to(revision.snapshot_path).as_posix() for file in revision.files]
    return []


def _explained(hub: Any, repository: str, error: Exception) -> TsggError:
    """One sentence for what the library raised."""
    utils = hub.utils
    if isinstance(error, utils.GatedRepoError):
        return TsggError(
            f"{repository} is gated: accept its terms on its page, then set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, utils.RepositoryNotFoundError):
        return UsageError(f"the hub has no repository {repository}, or it is private: check the name, or set HF_TOKEN")
    if isinstance(error, utils.OfflineModeIsEnabled):
        return TsggError(f"{repository} is not in the cache and HF_HUB_OFFLINE is set: unset it, or give a file's path")
    if isinstance(error, ValueError):
        return UsageError(f"{repository!r} cannot be a repository of the hub: {_first_line(error)}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return TsggError(f"the hub refuses {repository} (HTTP {status}): set HF_TOKEN to a token that may read it")
    if re.search("Connect|Timeout|LocalEntryNotFound", type(error).__name__):
        return TsggError(
            f"{repository} is not in the cache and the hub cannot be reached: is there a network? Or give a file's path"
        )
    return TsggError(
        f"cannot fetch {repository} from the hub ({type(error).__name__}: {_first_line(error)}); try again later"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
