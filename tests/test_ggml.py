"""The wrapper around ggml: one copy of the library, graphs that replay, errors instead of aborts, helpers in C."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tsgg import platform
from tsgg.errors import OutOfMemoryError, UsageError
from tsgg.ggml.buffers import F32, TensorSet
from tsgg.ggml.devices import Backend, devices, pick_device
from tsgg.ggml.library import GGML_VERSION, cpu_features, ffi, lib, text

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run_python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter that runs `code`; fails the test where it does not end well within a minute."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**kept, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# -- one library -------------------------------------------------------------------------------------------------------


@linux
def test_the_process_holds_one_copy_of_ggml_and_it_is_the_extension() -> None:
    (path,) = platform.mapped_libraries("ggml")
    assert path == os.path.realpath(sys.modules["tsgg._ggml"].__file__ or "")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert {line.split(None, 5)[5] for line in maps.splitlines() if "ggml" in line} == {path}


@linux
def test_the_extension_shows_no_symbol_of_ggml_to_other_libraries() -> None:
    import ctypes

    shown = ctypes.CDLL(sys.modules["tsgg._ggml"].__file__)
    assert hasattr(shown, "PyInit__ggml") and not hasattr(shown, "ggml_init")


def test_the_version_is_the_pinned_one() -> None:
    assert text(lib.ggml_version()) == GGML_VERSION
    assert cpu_features(), "the features that the build has are known"


MATRIX = """
    from tsgg.ggml.builder import GraphBuilder
    from tsgg.ggml.devices import Backend, devices, pick_device
    from tsgg.ggml.graph import Graph
    from tsgg.ggml import buffers
    import numpy as np
    backend, g = Backend(pick_device("cpu"), n_threads=1), GraphBuilder(64)
    product = g.output(g.mul_mat(g.input("a", buffers.F32, 64, 8), g.input("b", buffers.F32, 64, 3)))
    graph = Graph(g, backend)
    a, b = np.random.default_rng(0).standard_normal((2, 8, 64), np.float32)
    graph.inputs["a"][0, 0], graph.inputs["b"][0, 0] = a, b[:3]
    graph.replay()
    assert np.allclose(buffers.read(product)[0, 0], b[:3] @ a.T, atol=1e-4)
    assert [device.name for device in devices()].count("CPU") == 1
"""


@pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="the PyPI package ggml is not installed")
@pytest.mark.parametrize("order", ["first", "second"])
def test_the_ggml_of_another_package_disturbs_neither(order: str) -> None:
    other = """
    import ggml
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 20, mem_buffer=None, no_alloc=False))
    tensor = ggml.ggml_new_tensor_1d(context, ggml.GGML_TYPE_F32, 4)
    ggml.ggml_set_f32(tensor, 2.5)
    assert ggml.ggml_get_f32_1d(tensor, 3) == 2.5
    """
    run_python(other + MATRIX if order == "first" else MATRIX + other + MATRIX)


# -- the process -------------------------------------------------------------------------------------------------------


def test_the_spin_count_is_set_before_libgomp_loads_unless_the_user_set_one() -> None:
    code = "import tsgg.ggml.library, os; print(os.environ['GOMP_SPINCOUNT'], os.environ['GGML_NO_BACKTRACE'])"
    assert run_python(code).split() == ["1000", "1"]
    assert run_python(code, GOMP_SPINCOUNT="77").split() == ["77", "1"]


@linux
@pytest.mark.skipif("OPENMP" not in cpu_features(), reason="this build does not use libgomp")
def test_libgomp_loaded_too_early_is_warned_of() -> None:
    load = "import ctypes; ctypes.CDLL('libgomp.so.1'); import tsgg.ggml.library"
    assert "libgomp was loaded before tsgg" in run_python(load)
    assert "libgomp" not in run_python(load, GOMP_SPINCOUNT="1000")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_gets_an_error_and_not_a_hang() -> None:
    child = """
    import os
    from tsgg.errors import TsggError
    for attempt in (lambda: graph.replay(), lambda: Backend(pick_device("cpu"))):
        pid = os.fork()
        if pid == 0:
            try:
                attempt()
            except TsggError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    graph.replay()
    """
    run_python(MATRIX.replace("n_threads=1", "n_threads=2") + child)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_worker_that_imports_tsgg_after_the_fork_computes() -> None:
    worker = textwrap.indent(textwrap.dedent(MATRIX) + "os._exit(7)", "    ")
    parent = "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7"
    run_python(f"import os\npid = os.fork()\nif pid == 0:\n{worker}\n{parent}")


def test_lines_of_ggmls_log_reach_logging_whole(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tsgg.ggml")
    pieces = [
        (lib.GGML_LOG_LEVEL_WARN, b"one "),
        (lib.GGML_LOG_LEVEL_CONT, b"line\ntwo\n"),
        (lib.GGML_LOG_LEVEL_INFO, b"caf\xc3\xa9 \xff\n"),
    ]
    for level, piece in pieces:
        lib.tsgg_log(level, ffi.new("char[]", piece), ffi.NULL)
    found = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert found == [(logging.WARNING, "one line"), (logging.WARNING, "two"), (logging.DEBUG, "café \ufffd")]


def test_an_allocation_that_fails_is_an_error_and_ggml_says_why(caplog: pytest.LogCaptureFixture) -> None:
    tensors = TensorSet(1)
    tensors.new(F32, (1 << 46,))
    with pytest.raises(OutOfMemoryError, match="CPU: the device refused the allocation"):
        tensors.allocate(pick_device("cpu").buffer_type, clear=False)
    with pytest.raises(OutOfMemoryError, match=r"CPU: the system refused .* MiB"):
        tensors.allocate(pick_device("cpu").buffer_type)
    tensors.close()
    tensors.close()
    assert any(record.name == "tsgg.ggml" and "alloc" in record.getMessage() for record in caplog.records)


# -- devices -----------------------------------------------------------------------------------------------------------


def test_a_device_is_found_by_name_whatever_the_case() -> None:
    assert pick_device("cPu").is_cpu and pick_device("auto").name in [device.name for device in devices()]
    for wrong in ("npu9", "", 5, None):
        with pytest.raises(UsageError, match=rf"no device {wrong!r}.*CPU"):
            pick_device(wrong)  # type: ignore[arg-type]


def test_memory_of_the_cpu_is_what_can_be_allocated() -> None:
    device = pick_device("cpu")
    assert 0 < device.memory_free <= device.memory_total


@pytest.mark.parametrize("threads", [0, -1, 513, 1.5, "2", True])
def test_a_thread_count_out_of_range_is_refused(threads: Any) -> None:
    with pytest.raises(UsageError, match=r"n_threads is .*, expected 1 to 512"):
        Backend(pick_device("cpu"), threads)


def test_the_default_thread_count_is_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "usable_cores", lambda: 3)
    backend = Backend(pick_device("cpu"))
    assert backend.n_threads == 3
    backend.close()
    backend.close()
