"""Builds of the CPU backend: the best that the processor runs is loaded, and one that it cannot run is refused unloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import TinyLlama, write_tiny
from tsgg.errors import TsggError, UsageError
from tsgg.ggml import library
from tsgg.ggml.variants import NATIVE, choose, parse

TABLE = parse("icelake:SSE42,AVX2,AVX512 haswell:SSE42,AVX2 sse42:SSE42 ")


def built() -> dict[str, frozenset[str]]:
    """The builds of this installation; none where it has one extension for whatever processor."""
    cpu = pytest.importorskip("tsgg._cpu")
    return parse(cpu.variants)


@pytest.mark.parametrize(
    ("has", "name"),
    [
        ({"SSE42", "AVX2", "AVX512", "FMA"}, "icelake"),
        ({"SSE42", "AVX2"}, "haswell"),
        ({"SSE42", "AVX512"}, "sse42"),
        ({"SSE42"}, "sse42"),
    ],
)
def test_the_best_build_that_the_processor_runs_is_taken(has: set[str], name: str) -> None:
    assert choose(TABLE, has) == name


def test_a_processor_that_runs_none_is_told_what_it_lacks() -> None:
    with pytest.raises(TsggError, match="this processor lacks SSE42, which tsgg was built to use"):
        choose(TABLE, {"F16C"})
    with pytest.raises(TsggError, match=r"lacks AVX512_BF16, AVX_VNNI.*its build 'native'"):
        choose(parse("native:SSE42,AVX_VNNI,AVX512_BF16"), {"SSE42", "AVX2"})


def test_another_build_can_be_asked_for_if_it_is_there_and_runs() -> None:
    assert choose(TABLE, {"SSE42", "AVX2", "AVX512"}, "sse42") == "sse42"
    with pytest.raises(UsageError, match="TS_CPU is 'zen9', and tsgg was built for: icelake, haswell, sse42"):
        choose(TABLE, {"SSE42"}, "zen9")
    with pytest.raises(TsggError, match="lacks AVX2"):
        choose(TABLE, {"SSE42"}, "haswell")


def test_the_extension_that_is_loaded_is_the_one_that_was_chosen() -> None:
    module = sys.modules["tsgg._ggml"]
    stem = "_ggml" if library.variant == NATIVE else f"_ggml_{library.variant}"
    assert os.path.basename(module.__file__ or "").split(".")[0] == stem
    assert module.lib is library.lib


def test_what_a_build_needs_is_what_ggml_says_it_was_compiled_with() -> None:
    needs = built()[library.variant]
    reported = {name for name, value in library.cpu_features().items() if value == "1"}
    named = {"F16C", "FMA", "BMI2", "AVX2", "AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"}
    assert needs & named == reported & named


PROGRAM = """
import sys
from tsgg.llm import LLM
from tsgg.ggml import library
with LLM(sys.argv[1], n_threads=1) as llm:
    print(library.variant, *llm.generate([1, 70, 71, 72], max_tokens=12, temperature=0).tokens)
"""


def test_every_build_that_this_processor_runs_answers(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", TinyLlama(weights="q8_0"))
    cpu = pytest.importorskip("tsgg._cpu")
    for name, needs in built().items():
        command = [sys.executable, "-c", PROGRAM, str(path)]
        done = subprocess.run(command, env={**os.environ, "TS_CPU": name}, capture_output=True, text=True)
        if needs <= set(cpu.features()):
            assert done.returncode == 0 and done.stdout.split()[0] == name, done.stderr
            assert len(done.stdout.split()) == 13
        else:
            assert done.returncode == 1 and f"its build '{name}'" in done.stderr
