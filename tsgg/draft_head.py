"""The draft head that a checkpoint carries (NextN): weights adapter behind the `DraftHead` protocol of tsgg.speculative.

Projection, block and LM head are one graph; embedding and head are the trunk's tensors. The head keeps a cache of its own, in
which the row of the token at position p lies in the trunk's cell for it. A draft folds two things into one run: the rows of
the tokens accepted since (with the trunk's hidden rows), and the first draft step; further steps feed it its own hidden row,
and what they wrote is overwritten by the next draft.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from tsgg.candidates import best_token
from tsgg.errors import ModelFileError, UsageError
from tsgg.forward import Key, StepProgram
from tsgg.ggml.buffers import Tensor
from tsgg.ggml.devices import Backend, Device
from tsgg.gguf import GGUFFile
from tsgg.memory import Memory, Sequence
from tsgg.memory.memory import LARGEST_RUN
from tsgg.models.base import Architecture
from tsgg.speculative.protocol import Draft, HeadRows, Want
from tsgg.weights import ModelWeights, check, plan

MAX_PROGRAMS = 32  # graphs that stay: a window's row counts, for a few sequences
UNSURE = "below the confidence gate"
NO_ROOM = "no room for a draft"

HIDDEN_F32 = np.float32(-np.inf)
HIDDEN_F16 = np.uint16(0xFC00)  # -inf as IEEE half: masks of flash attention are raw bits


@dataclass(slots=True)
class _Track:
    """What the head holds of one sequence."""

    sequence: Sequence
    start: int  # position of the first row that is there
    end: int  # position behind the last row made from a trunk row


class NextNHead:
    """Drafts token by token, one sequence after the other. Not thread-safe; freed by `close`."""

    kind: Literal["per_token", "block"] = "per_token"
    block_size = 1
    taps: tuple[int, ...] = ()
    resumes_after_gap = True  # its cache starts anew behind the gap, at absolute positions

    def __init__(
        self,
        block: Architecture,
        file: GGUFFile,
        trunk: ModelWeights,
        memory: tuple[int, int, str, str],
        device: Device,
        backends: tuple[Backend, ...],
        vocab: int,
    ) -> None:
        """`memory`: tokens per sequence, sequences, K type, V type. `vocab`: tokens of the trunk.

        Raises `ModelFileError`, `OutOfMemoryError`.
        """
        self.block = block
        self._vocab = vocab
        try:
            found = check(file, block.tensors())
        except ModelFileError as error:
            raise ModelFileError(
                f"{error}. The file announces a draft head by nextn_predict_layers: convert it again with the head, or "
                "choose another kind of speculation"
            ) from None
        self._memory = Memory(block.attention(), *memory[:2], device, *memory[2:])
        try:
            own = ModelWeights(file, plan(found, device), device)
        except BaseException:
            self._memory.close()
            raise
        self.weight_bytes = sum(info.nbytes for info, _ in found)
        self._weights = _SharedWeights(own, trunk)
        self._backends = backends
        self._capacity = memory[0]
        self._programs: OrderedDict[Key, _Program] = OrderedDict()
        self._tracks: dict[int, _Track] = {}  # by slot

    @property
    def nbytes(self) -> int:
        """Bytes of its cache and its graphs."""
        return self._memory.nbytes + sum(program.graph.nbytes for program in self._programs.values())

    # -- DraftHead -------------------------------------------------------------------------------------------------

    def draft(self, rows: list[HeadRows], n_max: int, min_prob: float) -> list[Draft]:
        """See `tsgg.speculative.protocol.DraftHead`; `n_max` 0 only catches up."""
        return [self._draft(entry, n_max, min_prob) for entry in rows]

    def forget(self, sequence: object) -> None:
        slot = cast(Sequence, sequence).slot
        if (track := self._tracks.get(slot)) is not None and track.sequence is sequence:
            del self._tracks[slot]

    # -- parts -----------------------------------------------------------------------------------------------------

    def run(
        self, slot: int, tokens: list[int], hidden: NDArray[np.float32], position: int, start: int, want: Want
    ) -> StepProgram:
        """Rows of `tokens` at `position`..., each with the hidden row before it; [rows, embedding]. Cells < `start` hidden.

        Returns the graph to read "logits" and "hidden" from, valid until its next run.
        """
        rows = len(tokens)
        key = Key(rows, 1, slot, self._memory.buckets(position + rows, rows), want)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(key, self.block, self._weights, self._memory, self._backends)
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)[1].graph.close()
        else:
            self._programs.move_to_end(key)
        program.start.first = start
        program.before[:] = hidden
        program.run([tokens], [position])
        return program

    def close(self) -> None:
        """Frees graphs, cache and weights; a second call does nothing."""
        for program in self._programs.values():
            program.graph.close()
        self._programs.clear()
        self._memory.close()
        self._weights.own.close()

    def _draft(self, entry: HeadRows, n_max: int, min_prob: float) -> Draft:
        track, tokens, hidden, position = self._continue(entry)
        n_max = min(n_max, self._capacity - position - len(tokens) + 1)  # the last token drafted needs no row
        last = max(0, len(tokens) - LARGEST_RUN) if n_max > 0 else len(tokens)
        slot, start = track.sequence.slot, track.start
        for i in range(0, last, LARGEST_RUN):
            chunk = slice(i, min(i + LARGEST_RUN, last))
            self.run(slot, tokens[chunk], hidden[chunk], position + i, start, Want("none"))
        track.end = position + len(tokens)
        if n_max < 1:
            return Draft(silence=NO_ROOM)
        want = Want("last", "last")
        program = self.run(slot, tokens[last:], hidden[last:], position + last, start, want)
        drafted: list[int] = []
        confidences: list[float] = []
        while True:
            token, confidence = best_token(program.read("logits")[-1, : self._vocab])
            if confidence < min_prob:
                break
            drafted.append(token)
            confidences.append(confidence)
            if len(drafted) == n_max:
                break
            row = program.read("hidden")[-1:]
            program = self.run(slot, [token], row, track.end + len(drafted) - 1, start, want)
        return Draft(tuple(drafted), tuple(confidences), "" if drafted else UNSURE)

    def _continue(self, entry: HeadRows) -> tuple[_Track, list[int], NDArray[np.float32], int]:
        """The sequence's track, and the rows to run: tokens, hidden rows before them, position of the first."""
        sequence = cast(Sequence, entry.sequence)
        tokens, hidden, position = entry.tokens.tolist(), entry.features, entry.start_position + 1
        if not tokens or hidden.shape != (len(tokens), self.block.embedding):
            raise UsageError(
                f"{len(tokens)} tokens with hidden rows {hidden.shape}: expected a row of features for each"
            )
        track = self._tracks.get(sequence.slot)
        if track is None or track.sequence is not sequence or not track.start <= position <= track.end:
            if entry.start_position == 0:  # a text's first token has no row before it: zeros stand for it
                tokens, position = [sequence.tokens[0], *tokens], 0
                hidden = np.concatenate([np.zeros_like(hidden[:1]), hidden])
            track = self._tracks[sequence.slot] = _Track(sequence, position, position)
        return track, tokens, hidden, position


class _Program(StepProgram):
    """A graph of the head's block: rows come with hidden rows, and cells before the head's start are hidden."""

    def __init__(
        self, key: Key, block: Architecture, weights: _SharedWeights, memory: Memory, backends: tuple[Backend, ...]
    ) -> None:
        super().__init__(key, block, cast(ModelWeights, weights), memory, backends)
        inputs = self.graph.inputs
        self.before = inputs["hidden"].reshape(key.rows, -1)
        self.start = _Start([array for name, array in inputs.items() if ".mask." in name])
        self._memory.append(self.start)


class _Start:
    """Hides the cells before `first`, once the trunk's masks stand: one for each block of rows."""

    def __init__(self, masks: list[NDArray[Any]]) -> None:
        self.first = 0
        self._masks = masks

    def fill(self, _: Any) -> None:
        if self.first:
            for mask in self._masks:
                mask[..., : self.first] = HIDDEN_F16 if mask.dtype == np.uint16 else HIDDEN_F32


class _SharedWeights:
    """The head's tensors, and behind them the trunk's: what `StepGraph` and `StepProgram` use of `ModelWeights`."""

    def __init__(self, own: ModelWeights, trunk: ModelWeights) -> None:
        self.own, self.trunk, self.device = own, trunk, trunk.device

    def __getitem__(self, name: str) -> Tensor:
        return self.own.get(name) or self.trunk[name]

    def get(self, name: str) -> Tensor | None:
        return self.own.get(name) or self.trunk.get(name)

    def scalar(self, name: str) -> float | None:
        return self.own.scalar(name) if self.own.get(name) is not None else self.trunk.scalar(name)

    def repacked(self, tensor: Tensor) -> bool:
        return self.own.repacked(tensor) or self.trunk.repacked(tensor)

    def tiled(self, tensor: Tensor) -> bool:
        return self.own.tiled(tensor) or self.trunk.tiled(tensor)

    def host_table(self, tensor: Tensor) -> bool:
        return self.own.host_table(tensor) or self.trunk.host_table(tensor)

    def gather_table(self, table: Tensor, ids: list[int], out: NDArray[np.float32]) -> None:
        owner = self.own if self.own.host_table(table) else self.trunk
        owner.gather_table(table, ids, out)
