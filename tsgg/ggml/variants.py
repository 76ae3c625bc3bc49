"""Which build of ggml's CPU backend is loaded: each needs certain features of the processor, and the best that runs is taken.

On x86-64 Linux `tsgg._cpu` says what the processor has and what was built (native/variants.cmake); elsewhere, and where the
extension was built for one kind of processor, there is one `tsgg._ggml`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Set
from importlib.util import find_spec, module_from_spec, spec_from_file_location

from tsgg.errors import TsggError, UsageError

NATIVE = "native"  # the one extension, and what it is called where nothing is known of it


def load(wanted: str = "auto") -> str:
    """Imports `tsgg._ggml` and returns the name of its build. Raises `UsageError`, `ImportError`, or `TsggError` where the
    processor cannot run what was built."""
    if find_spec("tsgg._cpu") is None:
        name = choose({NATIVE: frozenset()}, frozenset(), wanted)
    else:
        cpu = importlib.import_module("tsgg._cpu")
        name = choose(parse(cpu.variants), frozenset(cpu.features()), wanted)
    if name == NATIVE:
        importlib.import_module("tsgg._ggml")
    else:
        _import_as("tsgg._ggml", f"tsgg._ggml_{name}")
    return name


def parse(table: str) -> dict[str, frozenset[str]]:
    """ "haswell:SSE42,AVX2 sse42:SSE42" -> the features that each build needs, best first."""
    pairs = (entry.partition(":") for entry in table.split())
    return {name: frozenset(features.split(",")) - {""} for name, _, features in pairs}


def choose(built: Mapping[str, Set[str]], has: Set[str], wanted: str = "auto") -> str:
    """The first of the builds, or the wanted one, that a processor with these features runs."""
    if wanted != "auto":
        if wanted not in built:
            raise UsageError(f"TS_CPU is {wanted!r}, and tsgg was built for: {', '.join(built)} (and 'auto')")
        built = {wanted: built[wanted]}
    for name, needs in built.items():
        if needs <= has:
            return name
    name, needs = list(built.items())[-1]
    raise TsggError(
        f"this processor lacks {', '.join(sorted(needs - has))}, which tsgg was built to use (its build {name!r}): "
        "install tsgg from source on this machine (pip install --no-binary tsgg --no-cache-dir tsgg)"
    )


def _import_as(name: str, file: str) -> None:
    """Imports the extension of one name under another: its init function is called after the other."""
    found = find_spec(file)
    if found is None or found.origin is None:
        raise ImportError(f"{file} is not there")
    spec = spec_from_file_location(name, found.origin)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
