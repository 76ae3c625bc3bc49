"""Trunks and vocabularies against the golden answers of another engine: the checks of `python -m benchmarks golden`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.__main__ import main
from benchmarks.golden import Report, check_trunk, head_report, vocab_report
from tests.tiny_models import TinyLlama, write_tiny
from tests.trunk_steps import GOLDEN, decode, step
from tsgg.gguf import read_gguf
from tsgg.model import Model
from tsgg.models import ARCHITECTURES

TRUNKS = sorted(path.stem for path in (GOLDEN / "trunks").glob("*.gguf"))
HEADS = ["gemma4-assistant-dense.gguf", "gemma4-assistant-e.gguf", "qwen35-dense-mtp.npz", "qwen35-moe-mtp.npz"]
VOCABULARIES = sorted(path.name for path in (GOLDEN / "vocab").glob("*.gguf"))


@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize("name", TRUNKS)
def test_logits_and_greedy_stream_agree_with_the_golden_trunk(golden_dir: Path, name: str, cache: str) -> None:
    path = golden_dir / "trunks" / f"{name}.gguf"
    architecture = read_gguf(path).architecture
    if architecture not in ARCHITECTURES:
        pytest.skip(f"architecture {architecture} not implemented")
    check = check_trunk(path, cache, n_threads=1)
    assert check.passed, str(check)
    assert check.agreed > 0 or (architecture, cache) == ("gemma4", "f16")  # whose errors exceed the first margin


@pytest.mark.parametrize("name", HEADS)
def test_every_array_of_a_golden_draft_head_is_met(golden_dir: Path, name: str) -> None:
    report = head_report(name, golden_dir / "heads" / name, "cpu")
    assert report.status == "ok", report.details


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_golden_string_is_tokenized_alike(golden_dir: Path, name: str) -> None:
    report = vocab_report(name, golden_dir / "vocab" / name)
    assert report.status == "ok", report.details


# -- the tool itself ---------------------------------------------------------------------------------------------------


def write_golden(folder: Path) -> Path:
    """A golden trunk made by this engine one row at a time, so that the checks have something to agree with."""
    (folder / "trunks").mkdir(parents=True)
    path = write_tiny(folder / "trunks" / "tiny.gguf", TinyLlama())
    tokens = np.random.default_rng(0).integers(0, 256, 43).astype(np.int32)
    prompt, draft, after = tokens[:32], tokens[32:40], tokens[40:]
    with Model(path, n_ctx=256, cache_type_k="f32", cache_type_v="f32") as model:
        sequence = model.new_sequence()
        arrays: dict[str, NDArray[Any]] = {"prompt_logits": decode(model, sequence, prompt.tolist())}
        arrays["draft_logits"] = decode(model, sequence, draft.tolist())
        sequence.truncate(35)
        arrays["after_rollback_logits"] = decode(model, sequence, after.tolist())
        sequence.truncate(32)
        logits, greedy = arrays["prompt_logits"][-1], []
        for _ in range(8):
            greedy.append(int(np.argmax(logits)))
            logits = step(model, sequence, greedy[-1:])[0]
    arrays |= {"prompt": prompt, "draft": draft, "next": after, "greedy": np.array(greedy, np.int32)}
    save(path, arrays)
    return path


def save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Writes a trunk's answers beside it."""
    np.savez(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]


def change(path: Path, **arrays: NDArray[Any]) -> None:
    """Replaces arrays of a trunk's answers."""
    with np.load(path.with_suffix(".npz")) as file:
        merged = {**file, **arrays}
    save(path, merged)


def golden(*arguments: str | Path) -> int:
    return main(["golden", *map(str, arguments)])


def test_the_tool_passes_what_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_golden(tmp_path)
    assert golden(tmp_path) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ok") and "trunks/tiny.gguf" in line and "greedy 8 of 8; f16 cache" in line


@pytest.mark.parametrize("name", ["prompt_logits", "draft_logits", "after_rollback_logits"])
def test_the_tool_fails_one_wrong_logit_in_any_array(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = write_golden(tmp_path)
    with np.load(path.with_suffix(".npz")) as file:
        array = file[name]
    array[-1, 7] += 0.01
    change(path, **{name: array})
    assert golden(tmp_path, "--cache", "f32") == 1
    array[-1, 7] -= 0.01
    change(path, **{name: array + np.float32(3e-4)})  # little, but everywhere
    assert golden(tmp_path, "--cache", "f32") == 1
    assert "FAIL trunks/tiny.gguf" in capsys.readouterr().out


def test_the_tool_fails_another_greedy_stream_and_nan(tmp_path: Path) -> None:
    path = write_golden(tmp_path)
    with np.load(path.with_suffix(".npz")) as file:
        greedy, logits = file["greedy"], file["draft_logits"]
    wrong = greedy.copy()
    wrong[5] = (wrong[5] + 1) % 256
    change(path, greedy=wrong)
    assert golden(tmp_path, "--cache", "f32") == 1
    change(path, greedy=greedy, draft_logits=np.full_like(logits, np.nan))
    assert golden(tmp_path, "--cache", "f32") == 1


def test_the_tool_checks_everything_else_when_something_is_not_implemented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_golden(tmp_path)
    (tmp_path / "drafters").mkdir()
    shutil.copy(path, tmp_path / "drafters" / "block.gguf")
    (tmp_path / "heads").mkdir()
    shutil.copy(path, tmp_path / "heads" / "tiny-head.gguf")
    write_tiny(tmp_path / "trunks" / "other.gguf", TinyLlama(arch="no-such"))
    assert golden(tmp_path) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "not implemented drafters/block.gguf",
        "not implemented heads/tiny-head.gguf",
        "not implemented trunks/other.gguf",
        "ok   trunks/tiny.gguf",
    ]
    (tmp_path / "trunks" / "other.gguf").unlink()
    assert golden(tmp_path, "--kinds", "trunks,vocab") == 0
    (tmp_path / "trunks" / "tiny.npz").unlink()
    assert golden(tmp_path) == 1  # a failure weighs more than what is missing


@pytest.mark.parametrize(("name", "arrays"), [("qwen35-dense-mtp", 10), ("gemma4-assistant-e", 4)])
def test_the_tool_fails_one_wrong_number_in_any_array_of_a_head(
    golden_dir: Path, tmp_path: Path, name: str, arrays: int
) -> None:
    for kind, stem in (("trunks", name.replace("-assistant", "")), ("heads", name)):
        (tmp_path / kind).mkdir()
        for path in (golden_dir / kind).glob(f"{stem}.*"):
            shutil.copy(path, tmp_path / kind)
    head = tmp_path / "heads" / name
    assert golden(tmp_path, "--kinds", "heads") == 0
    with np.load(head.with_suffix(".npz")) as file:
        answers = {key: file[key] for key in file}
    numbers = [key for key, array in answers.items() if array.dtype == np.float32]
    assert len(numbers) == arrays
    for key in numbers:
        changed = answers[key].copy()
        changed.flat[-1] += 0.1 * changed.std()
        save(head, answers | {key: changed})
        assert golden(tmp_path, "--kinds", "heads") == 1, key
    save(head, {key: answers[key] for key in numbers})
    assert golden(tmp_path, "--kinds", "heads") == 1  # FAIL names the missing array


def test_the_tool_says_what_is_wrong_with_its_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden(tmp_path / "absent") == 2
    assert golden(tmp_path) == 2
    path = write_golden(tmp_path)
    assert golden(tmp_path, "--cache", "q9") == 2
    change(path, next=np.array([1], np.int32))
    assert golden(tmp_path) == 1
    path.with_suffix(".npz").write_bytes(b"PK nonsense")
    assert golden(tmp_path) == 1
    path.write_bytes(path.read_bytes()[:300])
    assert golden(tmp_path) == 1
    printed = capsys.readouterr()
    for words in (
        "no such folder",
        "no golden files",
        "expected some of f32, f16",
        "expected (1, 264)",
        "ModelFileError",
    ):
        assert words in printed.out + printed.err, words


def test_a_report_is_one_line() -> None:
    assert str(Report("trunks/a.gguf", "ok", "all well")) == "ok   trunks/a.gguf: all well"
