"""Draft heads against the golden answers of another engine: part of `python -m benchmarks golden`.

Heads run on the trunk of the same name, with F32 caches as the other engine's did.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsgg.draft_head import NextNHead
from tsgg.errors import UsageError
from tsgg.gguf import read_gguf
from tsgg.model import Model
from tsgg.models.gemma4_assistant import Gemma4Assistant
from tsgg.speculative.protocol import Batch, Want

Array = NDArray[np.float32]
Pairs = dict[str, tuple[Array, Array]]  # check -> ours, golden

# Largest difference that an array may show, in standard deviations of its golden values. Measured: up to 5.7e-6.
TOLERANCE = 2e-5
# Gemma 4's queries and keys meet unscaled, and random ones so sharply that a GELU rounded the other way (ggml's is a table of
# halves) reaches everything behind it: the trunk's row (measured 8.8e-4), and more so a step of the head, which starts from
# another engine's hidden row over our keys (measured 1.9e-2). float64 is as far from these answers.
SHARP = {"target": 3e-3, "step": 6e-2}
ALL = Want("all", "all")


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """How one head compares with its golden answers."""

    errors: Mapping[str, float]  # array -> largest difference, in standard deviations of the golden one
    allowed: Mapping[str, float]  # for each of them
    agreed: int  # drafted tokens that agree
    expected: int  # drafted tokens

    @property
    def passed(self) -> bool:
        return self.agreed == self.expected and all(e <= self.allowed[name] for name, e in self.errors.items())

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {e:.1e} (allowed {self.allowed[name]:.0e})" for name, e in self.errors.items())
        drafts = f", drafts {self.agreed} of {self.expected}" if self.expected else ""
        return f"f32 cache, in standard deviations: {errors}{drafts}"


def served(path: Path) -> bool:
    """Whether there is code for this kind of head: answers alone belong to a head inside a trunk's file."""
    return path.suffix == ".npz" or read_gguf(path).architecture == Gemma4Assistant.name


def check_head(path: Path, device: str = "cpu", n_threads: int | None = None) -> HeadCheck:
    """Compares every array of one head's answers. Raises `UsageError` where an array or the trunk is missing."""
    assistant = path.suffix == ".gguf"
    trunk = path.parent.with_name("trunks") / f"{path.stem.replace('gemma4-assistant', 'gemma4')}.gguf"
    if not trunk.exists():
        raise UsageError(f"{trunk}: missing, it is the trunk of {path.name}")
    answers = _load(path.with_suffix(".npz"))
    with Model(trunk, device=device, n_threads=n_threads, n_ctx=256, cache_type_k="f32", cache_type_v="f32") as model:
        try:
            if assistant:
                pairs, drafts, expected = _assistant(model, path, answers)
            else:
                pairs, drafts, expected = _nextn(model, answers), [], []
        except KeyError as error:
            raise UsageError(f"{path.with_suffix('.npz')}: has no array {error}") from error
    errors = {}
    for name, (ours, golden) in pairs.items():
        if ours.shape != golden.shape:
            raise UsageError(f"{path.with_suffix('.npz')}: {name} has shape {golden.shape}, expected {ours.shape}")
        errors[name] = float(np.abs(ours - golden).max() / golden.std())
    agreed = sum(a == b for a, b in zip(drafts, expected, strict=True))
    allowed = {name: SHARP[name.split("_")[0]] if assistant else TOLERANCE for name in errors}
    return HeadCheck(errors, allowed, agreed, len(expected))


def _load(answers: Path) -> dict[str, NDArray[Any]]:
    if not answers.exists():
        raise UsageError(f"{answers}: missing, it holds the head's answers")
    try:
        with np.load(answers, allow_pickle=False) as file:
            return {name: file[name] for name in file}
    except (ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"{answers}: {error}; expected arrays written by numpy.savez") from error


def _nextn(model: Model, answers: Mapping[str, NDArray[Any]]) -> Pairs:
    """The prompt, two chained draft steps, and a verify of the trunk that keeps only some rows."""
    head = model.draft_head()
    if not isinstance(head, NextNHead):
        raise UsageError(f"{model.file.paths[0]}: carries no NextN head, and the answers are those of one")
    sequence, prompt = model.new_sequence(), answers["prompt"].tolist()
    ours: dict[str, Array] = {}
    rows = model.forward(Batch((sequence,), np.array([prompt], np.int32), ALL))
    ours["prompt_hidden"] = hidden = rows.hidden(0).copy()
    ours["prompt_logits"] = np.array([rows.logits(0, row) for row in range(len(prompt))])
    sequence.commit(len(prompt))
    before = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])  # nothing comes before the first token
    program = head.run(sequence.slot, prompt, before, 0, 0, ALL)
    ours |= {f"catch_up_{what}": program.read(what).copy() for what in ("logits", "hidden")}
    row = hidden[-1:]
    for name in ("step1", "step2"):
        token, position = int(answers[f"{name}_token"]), int(answers[f"{name}_position"])
        program = head.run(sequence.slot, [token], row, position, 0, ALL)
        row = program.read("hidden").copy()
        ours |= {f"{name}_logits": program.read("logits")[0].copy(), f"{name}_hidden": row[0]}
    verify = np.array([answers["verify_tokens"]], np.int32)
    rows = model.forward(Batch((sequence,), verify, ALL))
    ours["verify_logits"] = np.array([rows.logits(0, i) for i in range(verify.size)])
    sequence.commit(int(answers["after_rollback_kept"]))
    following = np.array([[int(answers["after_rollback_next"])]], np.int32)
    ours["after_rollback_logits"] = model.forward(Batch((sequence,), following, ALL)).logits(0, 0).copy()
    return {name: (array, answers[name]) for name, array in ours.items()}


def _assistant(model: Model, path: Path, answers: Mapping[str, NDArray[Any]]) -> tuple[Pairs, list[int], list[int]]:
    """The trunk's last row, then every step from the golden row before it: logits, next hidden row, and drafted tokens."""
    head = model.draft_model(path)
    sequence, prompt = model.new_sequence(), answers["prompt"]
    rows = model.forward(Batch((sequence,), np.array([prompt], np.int32), ALL))
    pairs = {
        "target_last_logits": (rows.logits(0, prompt.size - 1).copy(), answers["target_last_logits"]),
        "target_last_hidden": (rows.hidden(0)[-1].copy(), answers["target_last_hidden"]),
    }
    sequence.commit(prompt.size)
    drafts = answers["drafts"].tolist()
    tokens = [int(answers["last_token"]), *drafts]
    hidden = [answers["target_last_hidden"], *answers["step_hidden"]]
    steps = []
    for token, row in zip(tokens[:-1], hidden, strict=False):
        logits, after = head.run(sequence.slot, token, row, sequence.length)
        steps.append((logits.copy(), after.copy()))
    pairs["step_logits"] = np.array([logits for logits, _ in steps]), answers["step_logits"]
    pairs["step_hidden"] = np.array([after for _, after in steps]), answers["step_hidden"]
    return pairs, [int(np.argmax(logits)) for logits, _ in steps], drafts
