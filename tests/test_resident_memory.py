"""What lies in memory: a weight once, a cache as far as it is filled."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_models import TinyLlama, write_tiny
from tests.trunk_steps import step
from tsgg.ggml import buffers
from tsgg.ggml.buffers import F32, TensorSet
from tsgg.ggml.devices import pick_device
from tsgg.model import Model
from tsgg.platform import huge_pages, resident_memory

MIB = 2**20
SHAPE = TinyLlama(layers=6, embedding=512, heads=8, kv_heads=8, head_dim=64, width=2048, context=4096)

needs_linux = pytest.mark.skipif(resident_memory() is None, reason="the system does not say what is resident")

PROGRAM = """
import re, sys
from pathlib import Path
from tsgg.model import Model
from tsgg.platform import resident_memory
small, large = sys.argv[1:]
Model(small, n_ctx=256, n_threads=1).close()
before = resident_memory()
with Model(large, n_ctx=4096, n_seq=4, n_threads=1) as model:
    now = resident_memory()
    peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    print(now - before, peak - before, model.plan.copied, model.plan.mapped, model.memory.nbytes)
"""
TEXT_PROGRAM = """
import sys
from tsgg import LLM
from tsgg.platform import resident_memory
from tsgg.llm import Engine
before = resident_memory()
with LLM(sys.argv[1], n_threads=1) as llm:
    print(resident_memory() - before, llm.model.plan.copied + llm.model.plan.mapped)
"""


@needs_linux
@pytest.mark.parametrize("weights", ["f32", "q8_0", "q4_0"])
def test_a_loaded_model_takes_the_bytes_of_its_weights_and_nothing_for_empty_caches(
    tmp_path: Path, weights: str
) -> None:
    small, large = (
        write_tiny(tmp_path / "small.gguf"),
        write_tiny(tmp_path / "large.gguf", replace(SHAPE, weights=weights)),
    )
    command = [sys.executable, "-c", PROGRAM, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken, peak, copied, mapped, caches = map(int, done.stdout.split())
    assert caches >= 190 * MIB
    assert (copied if huge_pages() else copied + mapped) > 10 * MIB
    assert taken < copied + mapped + 12 * MIB
    assert peak < copied + mapped + 20 * MIB  # a tensor lies twice while it is copied, a file never does


@needs_linux
def test_a_small_model_takes_little_more_than_its_file_with_tokenizer_and_engine(smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TEXT_PROGRAM, str(smollm2_path)], capture_output=True, text=True, check=True
    )
    taken, weights = map(int, done.stdout.split())
    assert weights <= smollm2_path.stat().st_size and taken < weights + 64 * MIB


@needs_linux
def test_a_page_is_resident_once_something_was_written_to_it() -> None:
    tensors = TensorSet(2)
    tensor, other = tensors.new(F32, (16 * MIB,)), tensors.new(F32, (3, 5))
    before = resident_memory()
    assert tensors.allocate(pick_device("cpu").buffer_type) >= 64 * MIB
    assert before is not None and (resident_memory() or 0) - before < 4 * MIB
    buffers.write(tensor, np.ones(4 * MIB, np.float32))
    assert (resident_memory() or 0) - before > 12 * MIB
    assert not buffers.read(other).any() and buffers.read(tensor)[0, 0, 0, 4 * MIB - 1] == 1
    tensors.close()


def test_bytes_by_purpose_follow_what_is_held(tmp_path: Path) -> None:
    with Model(write_tiny(tmp_path / "m.gguf", SHAPE), n_ctx=512, n_threads=1) as model:
        held = model.bytes_by_purpose()
        assert held["weights"] + held["mapped file"] == sum(info.nbytes for info in model.file.tensors.values())
        assert held["caches"] == model.memory.nbytes and held["graphs"] == held["draft heads"] == 0
        step(model, model.new_sequence(), [1, 2, 3])
        assert model.bytes_by_purpose()["graphs"] == model.graph_bytes() > 0
