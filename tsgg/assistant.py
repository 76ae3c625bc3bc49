"""A draft head in a file of its own that keeps no state (Gemma 4's assistant), behind the `DraftHead` protocol.

It reads what the trunk's memory holds of a sequence and writes nothing, so it drafts from any position. A draft is a chain of
one-row runs: each takes the token before it and a hidden row, the trunk's at first, then the head's own. The position stays
that of the first token, and nothing has a key for it: all runs of a draft see the same cells.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from tsgg.candidates import best_token
from tsgg.draft_head import MAX_PROGRAMS, UNSURE
from tsgg.errors import UnsupportedError, UsageError
from tsgg.forward import Key, StepProgram
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Backend, Device
from tsgg.ggml.library import ffi
from tsgg.gguf import GGUFFile
from tsgg.memory import Memory, Sequence
from tsgg.memory.kv import KVInputs, KVStep
from tsgg.memory.memory import MemoryStep, StepInputs
from tsgg.memory.recurrent import Purpose
from tsgg.models.base import Architecture
from tsgg.models.gemma4_assistant import OLDER_DIALECTS, TARGET_TABLE, Gemma4Assistant
from tsgg.speculative.protocol import Draft, HeadRows, Want
from tsgg.weights import ModelWeights, check, plan


class AssistantHead:
    """Drafts token by token, one sequence after the other. Not thread-safe; freed by `close`, before the trunk is."""

    kind: Literal["per_token", "block"] = "per_token"
    block_size = 1
    taps: tuple[int, ...] = ()
    resumes_after_gap = True  # nothing is remembered: a gap does not exist

    def __init__(
        self,
        file: GGUFFile,
        target: Architecture,
        weights: ModelWeights,
        memory: Memory,
        device: Device,
        backends: tuple[Backend, ...],
        vocab: int,
    ) -> None:
        """`target`, `weights`, `memory` and `vocab`, its number of tokens, are the trunk's.

        Raises `UnsupportedError` for a file of another architecture, `UsageError` for a drafter of another target, with the
        fields that disagree, `ModelFileError`, `OutOfMemoryError`.
        """
        name = file.paths[0].name
        if (tensor := OLDER_DIALECTS.get(file.architecture)) is not None:
            raise UnsupportedError(
                f"{name} is a {file.architecture}, an older dialect of {Gemma4Assistant.name} (with tensors such as {tensor}): "
                "convert the drafter again with a current converter"
            )
        if file.architecture != Gemma4Assistant.name:
            raise UnsupportedError(
                f"{name} is a {file.architecture}, expected a drafter of the architecture {Gemma4Assistant.name}"
            )
        self.head = Gemma4Assistant(file.metadata, file.tensors)
        if wrong := self.head.disagreements(target):
            raise UsageError(
                f"{name} drafts for another model: {'; '.join(wrong)}. Give the drafter of this very model"
            )
        found = check(file, self.head.tensors())
        self._vocab = vocab
        self.weight_bytes = sum(info.nbytes for info, _ in found)
        own = ModelWeights(file, plan(found, device), device)
        self._weights = _Weights(own, weights)
        self._memory = _Lent(memory, self.head.donors(target))
        self._backends = backends
        self._want = Want("last", taps=(self.head.layers,))
        self._programs: OrderedDict[Key, _Program] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of its graphs."""
        return sum(program.graph.nbytes for program in self._programs.values())

    # -- DraftHead -------------------------------------------------------------------------------------------------

    def draft(self, rows: list[HeadRows], n_max: int, min_prob: float) -> list[Draft]:
        """See `tsgg.speculative.protocol.DraftHead`; of each entry's rows only the last matters."""
        return [self._draft(entry, n_max, min_prob) if n_max > 0 else Draft() for entry in rows]

    def forget(self, sequence: object) -> None:
        """Nothing is held."""

    # -- parts -----------------------------------------------------------------------------------------------------

    def run(
        self, slot: int, token: int, hidden: NDArray[np.float32], position: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """One step: logits [vocab] of the token behind `token`, and the next hidden row [target embedding].

        `token` stands at `position`, `hidden` is the row before it. Both results are valid until the next run.
        """
        key = Key(1, 1, slot, self._memory.memory.buckets(position, 1), self._want)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(key, self.head, self._weights, self._memory, self._backends)
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)[1].graph.close()
        else:
            self._programs.move_to_end(key)
        program.before[:] = hidden
        program.run([[token]], [position])
        return program.read("logits")[0], program.read(f"tap {self.head.layers}")[0]

    def close(self) -> None:
        """Frees graphs and weights; a second call does nothing."""
        for program in self._programs.values():
            program.graph.close()
        self._programs.clear()
        self._weights.own.close()

    def _draft(self, entry: HeadRows, n_max: int, min_prob: float) -> Draft:
        if not len(entry.tokens) or entry.features.shape != (len(entry.tokens), self.head.target_embedding):
            raise UsageError(
                f"{len(entry.tokens)} tokens with hidden rows {entry.features.shape}: expected a row of features for each"
            )
        slot, position = cast(Sequence, entry.sequence).slot, entry.start_position + len(entry.tokens)
        token, hidden = int(entry.tokens[-1]), entry.features[-1]
        drafted: list[int] = []
        confidences: list[float] = []
        while len(drafted) < n_max:
            logits, hidden = self.run(slot, token, hidden, position)
            token, confidence = best_token(logits[: self._vocab])
            if confidence < min_prob:
                break
            drafted.append(token)
            confidences.append(confidence)
        return Draft(tuple(drafted), tuple(confidences), "" if drafted else UNSURE)


class _Program(StepProgram):
    """A graph of the head: one row of one sequence, with the hidden row before it."""

    def __init__(
        self, key: Key, head: Gemma4Assistant, weights: _Weights, memory: _Lent, backends: tuple[Backend, ...]
    ) -> None:
        super().__init__(key, head, cast(ModelWeights, weights), cast(Memory, memory), backends)
        self.before = self.graph.inputs["hidden"].reshape(1, -1)


class _Lent:
    """The trunk's memory, read only: what `StepGraph` uses of `Memory`."""

    writers: tuple[int, ...] = ()

    def __init__(self, memory: Memory, donors: tuple[int, ...]) -> None:
        """`donors`: the trunk's layer that each of the head's blocks reads."""
        self.memory = memory
        self._sources = {block: memory.sources[donor] for block, donor in enumerate(donors)}

    def step(
        self, g: GraphBuilder, first: int, sequences: int, rows: int, buckets: tuple[int, ...], purpose: Purpose
    ) -> MemoryStep:
        steps = {
            name: KVStep(arena, g, name, first, sequences, rows, cells)
            for (name, arena), cells in zip(self.memory.arenas.items(), buckets, strict=True)
        }
        return _LentStep(steps, self._sources)


class _LentStep(MemoryStep):
    def inputs(self, arrays: dict[str, NDArray[Any]]) -> list[StepInputs]:
        return [_Behind(step, arrays) for step in self._steps.values()]


class _Behind(KVInputs):
    """Shows a row what lies before its position. Its own has no key, though a rejected row's may lie in that cell.

    It sees what the row before it would see with a window one shorter.
    """

    def __init__(self, step: KVStep, arrays: dict[str, NDArray[Any]]) -> None:
        super().__init__(step, arrays)
        self.window = max(0, self.window - 1)
        self._before = ffi.new("int32_t[1]")

    def fill(self, first: Any) -> None:
        self._before[0] = first[0] - 1
        super().fill(self._before)


class _Weights:
    """The head's tensors, and the trunk's embedding table: what `StepGraph` and `StepProgram` use of `ModelWeights`."""

    def __init__(self, own: ModelWeights, trunk: ModelWeights) -> None:
        self.own, self.trunk, self.device = own, trunk, trunk.device

    def __getitem__(self, name: str) -> Tensor:
        return self.trunk["token_embd.weight"] if name == TARGET_TABLE else self.own[name]

    def get(self, name: str) -> Tensor | None:
        return self.own.get(name)

    def scalar(self, name: str) -> float | None:
        return self.own.scalar(name)

    def repacked(self, tensor: Tensor) -> bool:
        return self.own.repacked(tensor)

    def tiled(self, tensor: Tensor) -> bool:
        return self.own.tiled(tensor)

    def host_table(self, tensor: Tensor) -> bool:
        return self.trunk.host_table(tensor)

    def gather_table(self, table: Tensor, ids: list[int], out: NDArray[np.float32]) -> None:
        self.trunk.gather_table(table, ids, out)
