"""Compare this engine with golden answers of another one, over a folder laid out like shared/golden (see its README).

A line per file: the largest error of every array, how far the greedy streams agree, ok or FAIL. Exit status: 0 all ok,
1 something fails, 2 nothing fails but some kind of file or some architecture is not implemented.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.golden_heads import check_head, served
from tsgg.errors import TsggError, UsageError
from tsgg.ggml.buffers import CACHE_TYPES
from tsgg.gguf import GGML_TYPES, read_gguf
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.models import ARCHITECTURES
from tsgg.speculative.protocol import Batch, Want
from tsgg.tokenizer import Tokenizer

Array = NDArray[np.float32]
Answers = Mapping[str, NDArray[Any]]

# A row's error is the largest difference of a logit, in standard deviations of the golden logits. By the coarsest type among
# weights and caches: what half of the rows must keep to, and what none may exceed. Measured over the golden trunks, at
# most: f32 1.9e-6, 5.4e-6; f16 7.5e-4, 1.7e-3 (the tests' own tiny llama 2.1e-3, 4.5e-3); bf16 5.8e-3, 2.2e-2; q8_0 1.2e-2,
# 2.2e-2.
TOLERANCE: dict[str, tuple[float, float]] = {
    "f32": (5e-6, 1.5e-5),  # 1.2e-4 for the logits of `llama`, of a deviation of 8
    "f16": (4e-3, 8e-3),
    "bf16": (1.5e-2, 5e-2),
    "q8_0": (3e-2, 6e-2),
}
QUANTIZED = (0.1, 0.2)  # quantized weights: two correct engines differ by 0.3 to 0.8 in logits of a deviation of 4 to 8
# Architectures whose random files turn the last bit of an activation into a jump. None: nothing left to compare.
JUMPS: dict[str, dict[str, tuple[float, float] | None]] = {
    # ggml's GELU is a table of halves; of 72 rows three are off by 2.9e-4 (7.3e-4 of a deviation), half by up to 4.3e-5.
    # The other types measure (4.3e-3, 7e-3), (2.8e-2, 4.3e-2), (6.3e-2, 1e-1).
    "gemma3": {"f32": (2.5e-4, 1.5e-3), "f16": (1e-2, 1.5e-2), "bf16": (6e-2, 1e-1), "q8_0": (1.2e-1, 2e-1)},
    # That GELU, and queries and keys that meet unscaled: attention is so sharp that a jump reaches all later rows, and a
    # rounded key the router's picks. Measured (3.6e-3, 6.3e-3), (5.1e-2, 0.95 in the rows of another pick; 0.13 without a
    # router); float64 is as far from these answers (tests/test_gemma4.py). Coarser keys move logits by all that they vary.
    "gemma4": {"f32": (7.5e-3, 2e-2), "f16": (1.2e-1, 2.0), "bf16": None, "q8_0": None},
    # A key rounded to 8 bits changes a router's pick in some row: 0.11, 0.12.
    "qwen3moe": {"bf16": (1.5e-2, 2.5e-1), "q8_0": (3e-2, 2.5e-1)},
}
NEAR_TIE = 1e-3  # a top-two margin below it may fall either way: the greedy comparison ends there
KEPT = 3  # drafts of the golden verify that were kept
ARRAYS = ("prompt", "draft", "next", "prompt_logits", "draft_logits", "after_rollback_logits", "greedy")
KINDS = ("trunks", "heads", "vocab")  # folders whose golden files are checked; others are reported as not implemented
SEPARATOR = "\n__ggml_vocab_test__\n"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one golden file."""

    file: str  # path below the folder
    status: str  # "ok", "FAIL" or "not implemented"
    details: str

    def __str__(self) -> str:
        return f"{self.status:<4} {self.file}: {self.details}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a folder with trunks/, vocab/, ... (each may be absent)")
    parser.add_argument("--kinds", help="look only into these folders, for example trunks,vocab (default: into all)")
    parser.add_argument("--device", default="cpu", help="where the models run (default: cpu)")
    parser.add_argument("--cache", default="f32,f16", help="cache types to check with, each in turn (default: f32,f16)")


def main(arguments: argparse.Namespace) -> int:
    caches = arguments.cache.split(",")
    if wrong := [name for name in caches if name not in CACHE_TYPES]:
        raise UsageError(f"--cache has {wrong[0]!r}, expected some of {', '.join(CACHE_TYPES)}")
    kinds = arguments.kinds.split(",") if arguments.kinds else None
    statuses = set()
    for report in walk(arguments.folder, kinds, caches, arguments.device):
        print(report, flush=True)
        statuses.add(report.status)
    return 1 if "FAIL" in statuses else 2 if "not implemented" in statuses else 0


def walk(folder: Path, kinds: Sequences[str] | None, caches: Sequences[str], device: str) -> Iterator[Report]:
    """A report on every golden file of those kinds, or of all. Raises `UsageError` where there is none."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if kinds is None else kinds
    paths = [path for name in names for path in _golden_files(folder / name)]
    if not paths:
        raise UsageError(f"{folder}: no golden files; expected .gguf files in folders such as {', '.join(KINDS)}")
    for path in paths:
        name = f"{path.parent.name}/{path.name}"
        try:
            if path.parent.name == "trunks":
                yield trunk_report(name, path, caches, device)
            elif path.parent.name == "heads":
                yield head_report(name, path, device)
            elif path.parent.name == "vocab":
                yield vocab_report(name, path)
            else:
                yield Report(name, "not implemented", f"golden files of the kind {path.parent.name}")
        except (TsggError, OSError) as error:
            yield Report(name, "FAIL", f"{type(error).__name__}: {error}")


def _golden_files(folder: Path) -> list[Path]:
    """The .gguf files, and answers without one of their own (a head inside a trunk's file)."""
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".gguf", ".npz"))
    return [path for path in paths if path.suffix == ".gguf" or path.with_suffix(".gguf") not in paths]


# -- trunks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrunkCheck:
    """How one trunk file compares with its golden answers."""

    errors: Mapping[str, tuple[float, float]]  # check -> errors of its median and of its worst row, in deviations
    allowed: tuple[float, float]  # for each of them
    wrong_picks: int  # rows whose best token is another, though the golden margin is clear
    agreed: int  # greedy tokens that agree, up to `expected`
    expected: int  # greedy tokens before the first near-tie

    @property
    def passed(self) -> bool:
        within = all(e <= limit for pair in self.errors.values() for e, limit in zip(pair, self.allowed, strict=True))
        return within and not self.wrong_picks and self.agreed == self.expected

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {worst:.1e}" for name, (_, worst) in self.errors.items())
        typical = max(median for median, _ in self.errors.values())
        limits = f"median row {typical:.1e} (allowed {self.allowed[0]:.1e}), worst rows (allowed {self.allowed[1]:.1e})"
        picks = f", {self.wrong_picks} rows with another best token" if self.wrong_picks else ""
        return f"{limits}: {errors}{picks}, greedy {self.agreed} of {self.expected}"


def trunk_report(name: str, path: Path, caches: Sequences[str], device: str) -> Report:
    """All checks of one trunk file, with each cache type."""
    architecture = read_gguf(path).architecture
    if architecture not in ARCHITECTURES:
        return Report(name, "not implemented", f"architecture {architecture}")
    checks = {cache: check_trunk(path, cache, device) for cache in caches if tolerance(architecture, cache)}
    details = [f"{cache} cache: {check}" for cache, check in checks.items()]
    details += [f"{cache} cache: {architecture} not comparable" for cache in caches if cache not in checks]
    failed = any(not check.passed for check in checks.values())
    return Report(name, "FAIL" if failed else "ok" if checks else "not implemented", "; ".join(details))


def tolerance(architecture: str, kind: str) -> tuple[float, float] | None:
    """What the median and the worst row may differ by, in standard deviations, where `kind` is the coarsest type."""
    return JUMPS.get(architecture, {}).get(kind, TOLERANCE.get(kind, QUANTIZED))


def check_trunk(path: Path, cache: str, device: str = "cpu", n_threads: int | None = None) -> TrunkCheck:
    """Every way to a logit: one batch, row by row, two sequences alike and staggered, verify, rollback, greedy."""
    answers = load_answers(path)
    prompt, draft, after = (answers[name].tolist() for name in ("prompt", "draft", "next"))
    prompt_logits, draft_logits = answers["prompt_logits"], answers["draft_logits"]
    longest = len(prompt) + max(len(answers["greedy"]), len(draft))
    pairs: dict[str, tuple[Array, Array]] = {}  # check -> ours, golden
    types = {"cache_type_k": cache, "cache_type_v": cache}
    with Model(path, device=device, n_ctx=longest, n_seq=2, n_threads=n_threads, **types) as model:
        first, second = model.new_sequence(), model.new_sequence()
        pairs["prompt"] = forward(model, [first], [prompt]), prompt_logits
        pairs["draft"] = forward(model, [first], [draft], kept=KEPT), draft_logits
        pairs["rollback"] = forward(model, [first], [after]), answers["after_rollback_logits"]

        first.truncate(0)
        alike = forward(model, [first, second], [prompt, prompt])
        pairs["two alike"] = alike, np.concatenate([prompt_logits] * 2)
        # Staggered: the first verifies behind its prompt while the second reads the last rows of its own.
        behind = len(prompt) - len(draft)
        second.truncate(0)
        forward(model, [second], [prompt[:behind]])
        staggered = forward(model, [first, second], [draft, prompt[behind:]])
        pairs["staggered"] = staggered, np.concatenate([draft_logits, prompt_logits[behind:]])

        first.truncate(0)
        pairs["row by row"] = np.concatenate([forward(model, [first], [[t]]) for t in prompt]), prompt_logits
        deviation = float(prompt_logits.std())
        errors = {name: _row_errors(ours, golden, deviation) for name, (ours, golden) in pairs.items()}
        # An error of e in every logit can turn a margin of 2 e round.
        near_tie = max(NEAR_TIE, 2 * deviation * max(worst for _, worst in errors.values()))
        agreed, expected = _greedy(model, first, pairs["row by row"][0][-1], answers["greedy"].tolist(), near_tie)
        found = [tolerance(model.arch.name, kind) for kind in (cache, *_matrix_types(model))]
    if None in found:
        raise UsageError(f"{path.name}: answers cannot be compared with a {cache} cache; use f32 or f16")
    allowed = max(pair for pair in found if pair)
    wrong = sum(_wrong_picks(ours, golden, 2 * deviation * allowed[1]) for ours, golden in pairs.values())
    return TrunkCheck(errors, allowed, wrong, agreed, expected)


def load_answers(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays beside a trunk file. Raises `UsageError` where one is missing or has another shape."""
    answers = path.with_suffix(".npz")
    if not answers.exists():
        raise UsageError(f"{answers}: missing, it holds the answers for {path.name}")
    try:
        with np.load(answers, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ARRAYS}
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"{answers}: {error}; expected the arrays {', '.join(ARRAYS)}") from error
    vocab = read_gguf(path).tensors["token_embd.weight"].shape[-1]
    for tokens, logits in (("prompt", "prompt_logits"), ("draft", "draft_logits"), ("next", "after_rollback_logits")):
        if arrays[logits].shape != (arrays[tokens].size, vocab):
            expected = (arrays[tokens].size, vocab)
            raise UsageError(f"{answers}: {logits} has shape {arrays[logits].shape}, expected {expected}")
    return arrays


def forward(model: Model, sequences: list[Sequence], tokens: list[list[int]], kept: int | None = None) -> Array:
    """One forward, of whose rows `kept` (all by default) are committed: logits of all rows [sequences * rows, vocab]."""
    rows = model.forward(Batch(tuple(sequences), np.array(tokens, np.int32), Want("all")))
    places = [(sequence, row) for sequence in range(len(tokens)) for row in range(len(tokens[0]))]
    logits = np.stack([rows.logits(sequence, row) for sequence, row in places])
    for sequence, row in zip(sequences, tokens, strict=True):
        sequence.commit(len(row) if kept is None else kept)
    return logits


def _row_errors(ours: Array, golden: Array, deviation: float) -> tuple[float, float]:
    """The largest difference of a logit, of the median and of the worst row, in deviations."""
    rows = np.abs(ours - golden).max(1) / deviation
    return float(np.median(rows)), float(rows.max())


def _greedy(model: Model, sequence: Sequence, logits: Array, golden: list[int], near_tie: float) -> tuple[int, int]:
    """Tokens that agree before the first difference, and tokens to compare: those before the first near-tie."""
    for i, token in enumerate(golden):
        second, first = np.partition(logits, -2)[-2:]
        if not first - second >= near_tie:
            return i, i
        if int(np.argmax(logits)) != token:
            return i, len(golden)
        logits = forward(model, [sequence], [[token]])[0]
    return len(golden), len(golden)


def _wrong_picks(ours: Array, golden: Array, margin: float) -> int:
    top = np.partition(golden, -2, axis=1)
    clear = top[:, -1] - top[:, -2] > margin
    return int(np.sum(clear & (ours.argmax(1) != golden.argmax(1))))


def _matrix_types(model: Model) -> set[str]:
    return {GGML_TYPES[info.type].name for info in model.file.tensors.values() if len(info.shape) > 1}


# -- heads ------------------------------------------------------------------------------------------------------------


def head_report(name: str, path: Path, device: str) -> Report:
    """All arrays of one draft head, with F32 caches."""
    if not served(path):
        return Report(name, "not implemented", f"heads of the architecture {read_gguf(path).architecture}")
    check = check_head(path, device)
    return Report(name, "ok" if check.passed else "FAIL", str(check))


# -- vocab -------------------------------------------------------------------------------------------------------------


def vocab_report(name: str, path: Path) -> Report:
    """Every test string of a vocabulary file through the tokenizer."""
    tokenizer = Tokenizer.from_metadata(read_gguf(path).metadata)
    cases = vocab_cases(path)
    wrong = [
        i for i, (text, ids) in enumerate(cases) if tokenizer.encode(text, add_bos=False, parse_special=False) != ids
    ]
    detail = f", first difference in string {wrong[0]}: {cases[wrong[0]][0]!r}" if wrong else ""
    return Report(name, "FAIL" if wrong else "ok", f"{len(cases) - len(wrong)} of {len(cases)} strings agree{detail}")


def vocab_cases(path: Path) -> list[tuple[str, list[int]]]:
    """(text, expected ids) of each case beside a vocabulary file. Raises `UsageError` where the two files disagree."""
    texts = Path(f"{path}.inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    lines = Path(f"{path}.out").read_bytes().decode().removesuffix("\n").split("\n")
    if len(lines) != len(texts):
        raise UsageError(f"{path}.inp has {len(texts)} strings and {path}.out {len(lines)} lines, expected as many")
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=True)]
