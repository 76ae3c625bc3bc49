"""The one forward: B sequences x T rows, as persistent graphs that are built once per key and replayed.

Batch (sequences, tokens [B, T], what is wanted)
  -> key (T, B, first slot, cells, wants) -> cached graph, or: architecture.forward builds one through `StepGraph`
  -> inputs rewritten: tokens, positions, cells, mask
  -> replay -> `StepRows`: logits, hidden rows, taps, read in place where the device's memory is the host's
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import TsggError, UsageError
from tsgg.ggml import buffers
from tsgg.ggml.buffers import BF16, F16, F32, I32, Tensor
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Backend
from tsgg.ggml.graph import Graph
from tsgg.ggml.library import cpu_features, ffi, lib
from tsgg.memory import Memory, Sequence
from tsgg.memory.kv import BLOCK_NODES, BLOCK_ROWS
from tsgg.memory.recurrent import Purpose
from tsgg.models.base import Architecture
from tsgg.settings import settings
from tsgg.speculative.protocol import Batch, Want
from tsgg.weights import ModelWeights

if TYPE_CHECKING:
    from tsgg.profile import Profile

PAIRED_TYPES = (F32, F16, BF16, lib.GGML_TYPE_IQ4_NL)  # sgemm computes two or more rows, another kernel computes one


@dataclass(frozen=True, slots=True)
class Key:
    """What a graph is built for. Everything else is data."""

    rows: int
    sequences: int
    first_slot: int
    cells: tuple[int, ...]  # read of every arena
    want: Want
    again: bool = False  # rows that were forwarded before, for the recurrent state after them

    @property
    def purpose(self) -> Purpose:
        """Any number of the rows may be committed where the logits of all are read: whoever accepts needs them."""
        if self.again:
            return "again"
        return "verify" if self.want.logits == "all" else "chunk"


class StepGraph:
    """The `Step` of `tsgg.models.base` while one graph is built: inputs, row-exact products, memory, row selection."""

    def __init__(self, key: Key, g: GraphBuilder, arch: Architecture, weights: ModelWeights, memory: Memory) -> None:
        self.key, self.g, self.layers, self.weights = key, g, arch.layers, weights
        self.rows = key.rows * key.sequences
        self.positions = g.input("positions", I32, self.rows)
        self.memory = memory.step(g, key.first_slot, key.sequences, key.rows, key.cells, key.purpose)
        self.taps: dict[int, Tensor] = {}
        want = key.want
        self._all = want.logits == "all" or want.hidden == "all"
        self._any = self._all or want.logits == "last" or want.hidden == "last" or self.layers in want.taps
        # The last layer that leaves something in memory, or before which a residual is read.
        self._last = max([*memory.writers, *want.taps], default=0)
        self.host: dict[str, Tensor] = {}  # input name -> the table whose rows the host writes there
        self.pairs = settings.pair_rows and "LLAMAFILE" in cpu_features() and weights.device.is_cpu

    def embed(self, table: Tensor) -> Tensor:
        if self.weights.host_table(table):
            name = next((name for name, known in self.host.items() if known == table), f"embeddings.{len(self.host)}")
            self.host[name] = table
            return self.g.input(name, F32, int(table.ne[0]), self.rows)
        return self.g.get_rows(table, self.g.input("tokens", I32, self.rows))

    def linear(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        g = self.g
        if self.weights.tiled(weight):
            y = g.mul_tiles(weight, x)
        elif self.pairs and int(x.ne[1]) == 1 and weight.type in PAIRED_TYPES and not self.weights.repacked(weight):
            pair = g.mul_mat(weight, g.repeat(x, int(x.ne[0]), 2))
            y = g.view(pair, (int(pair.ne[0]), 1), (int(pair.nb[1]),))
        else:
            y = g.mul_mat(weight, x)
        return y if bias is None else g.add(y, bias)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float) -> Tensor | None:
        if k is not None and v is not None:
            self.memory.store(layer, k, v)
        if self._over(layer):
            return None
        return self.memory.attend(layer, q, scale)

    def convolve(self, layer: int, x: Tensor, kernel: Tensor) -> Tensor:
        return self.memory.recurrent.convolve(layer, x, kernel)

    def delta_net(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor | None:
        result = self.memory.recurrent.delta_net(layer, q, k, v, decay, beta)
        return None if self._over(layer) else result

    def wanted(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if layer != self.layers - 1 or self._all or self.key.rows == 1 or self.layers in self.key.want.taps:
            return tensors
        ids = self.g.input("last_rows", I32, self.key.sequences)
        return tuple(self.g.get_rows(tensor, ids) for tensor in tensors)

    def _over(self, layer: int) -> bool:
        """Whether nobody wants what comes behind the layer's cache rows."""
        return not self._any and layer >= self._last

    def tap(self, layer: int, x: Tensor) -> None:
        if layer in self.key.want.taps:
            # A copy: the residual itself may be overwritten in place by what follows.
            self.taps[layer] = self.g.output(self.g.scale(x, 1.0))


class StepProgram:
    """One graph with its inputs and outputs."""

    def __init__(
        self, key: Key, arch: Architecture, weights: ModelWeights, memory: Memory, backends: tuple[Backend, ...]
    ) -> None:
        self.key = key
        self.weights = weights
        blocks = BLOCK_NODES * (key.rows // BLOCK_ROWS)
        g = GraphBuilder(capacity=(arch.layer_nodes + blocks) * (arch.layers + 1) + 64)
        step = StepGraph(key, g, arch, weights, memory)
        hidden = arch.forward(g, weights, step)
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None
        self.taps = step.taps
        if hidden is not None:
            if key.want.hidden != "none":
                self.hidden = hidden = g.output(hidden)
            if key.want.logits != "none":
                rows = hidden
                if key.want.logits == "last" and int(hidden.ne[1]) != key.sequences:
                    rows = g.get_rows(hidden, g.input("last_rows", I32, key.sequences))
                self.logits = g.output(arch.logits(g, weights, step, rows))
        self.graph = Graph(g, backends[0], backends[1:])
        self._outputs = self._named()
        views = {name: buffers.view(tensor) for name, tensor in self._outputs.items()}
        self._views = {name: _rows(view) for name, view in views.items() if view is not None}
        inputs = self.graph.inputs
        self._first = np.zeros(key.sequences, np.int32)
        self._first_pointer = ffi.cast("int32_t *", ffi.from_buffer(self._first))
        self._positions = ffi.cast("int32_t *", ffi.from_buffer(inputs["positions"]))
        self._tokens = inputs["tokens"].reshape(key.sequences, key.rows) if "tokens" in inputs else None
        self._gathered = [(table, inputs[name].reshape(step.rows, -1)) for name, table in step.host.items()]
        self._memory = step.memory.inputs(inputs)
        if "last_rows" in inputs:
            inputs["last_rows"][:] = np.arange(1, key.sequences + 1) * key.rows - 1

    def run(self, tokens: list[list[int]], first: list[int], interruptible: bool = False) -> None:
        """Rewrites every input and replays. tokens [B, T]; `first` is the position of each sequence's first row."""
        self.fill(tokens, first)
        self.graph.replay(interruptible)

    def fill(self, tokens: list[list[int]], first: list[int]) -> None:
        """Rewrites every input."""
        self._first[:] = first
        if self._tokens is not None:
            self._tokens[:] = tokens
        for table, rows in self._gathered:
            self.weights.gather_table(table, [token for row in tokens for token in row], rows)
        lib.tsgg_fill_positions(self._positions, self.key.rows, self.key.sequences, self._first_pointer)
        for arena in self._memory:
            arena.fill(self._first_pointer)

    def read(self, name: str) -> NDArray[np.float32]:
        """An output as [rows, columns]: a view where the host sees it, else a copy. Raises `UsageError`."""
        if name not in self._outputs:
            raise UsageError(f"{name} was not asked for in this forward")
        return self._views[name] if name in self._views else _rows(buffers.read(self._outputs[name]))

    def _named(self) -> dict[str, Tensor]:
        named = {f"tap {layer}": tensor for layer, tensor in self.taps.items()}
        named |= {"logits": self.logits, "hidden": self.hidden}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _rows(array: NDArray[np.float32]) -> NDArray[np.float32]:
    return array.reshape(-1, array.shape[-1])


def _row(table: NDArray[np.float32], index: int, columns: int) -> NDArray[np.float32]:
    row: NDArray[np.float32] = table[index, :columns]
    return row


def _cap(row: NDArray[np.float32], cap: float) -> None:
    """cap * tanh(row / cap), in place. Here and not in the graph: ggml's tanh takes 25 times as long for a row of 262k."""
    row *= np.float32(1 / cap)
    np.tanh(row, out=row)
    row *= np.float32(cap)


class StepRows:
    """What a forward handed back. Arrays are views of the graph's output where the host can see it.

    Valid until the next forward of the same model: reading later raises `TsggError`.
    """

    def __init__(self, forward: Forward, program: StepProgram) -> None:
        self._forward, self._program, self._ticket = forward, program, forward.ticket
        self._read: dict[str, NDArray[np.float32]] = {}
        # Rows of logits that are behind the soft cap: it works in place, a copy of 1 MB would fault in every time.
        self._capped: set[int] = set()

    def logits(self, sequence: int, row: int) -> NDArray[np.float32]:
        """[vocab] F32, of the tokens there are: rows of the LM head behind them are padding. `row` counts from the sequence's
        first row; with logits="last" only the last row is there."""
        key = self._program.key
        table = self._table("logits")
        if key.want.logits == "last":
            if row not in (-1, key.rows - 1):
                raise UsageError(f"logits of row {row} were not asked for: the forward wanted the last row only")
            index = sequence
        else:
            index = sequence * key.rows + row % key.rows
        found = _row(table, index, self._forward.vocab)
        if (cap := self._forward.arch.softcap) and index not in self._capped:
            _cap(found, cap)
            self._capped.add(index)
        return found

    def hidden(self, sequence: int) -> NDArray[np.float32]:
        """[rows, embedding] F32 after the final norm: all rows, or one with hidden="last"."""
        key = self._program.key
        table = self._table("hidden")
        per = len(table) // key.sequences
        rows = table[sequence * per : (sequence + 1) * per]
        return rows[-1:] if key.want.hidden == "last" else rows

    def tap(self, layer: int, sequence: int) -> NDArray[np.float32]:
        """[rows, embedding] F32: the residual that enters `layer`."""
        rows = self._program.key.rows
        return self._table(f"tap {layer}")[sequence * rows : (sequence + 1) * rows]

    def _table(self, name: str) -> NDArray[np.float32]:
        if self._ticket != self._forward.ticket:
            raise TsggError(f"{name} is read after the model's next forward: its memory holds other rows by now")
        if name not in self._read:
            self._read[name] = self._program.read(name)
        return self._read[name]


class Forward:
    """Runs batches on one model's weights and arena. Keeps graphs in an LRU bounded by their bytes. Not thread-safe."""

    def __init__(
        self, arch: Architecture, weights: ModelWeights, memory: Memory, backends: tuple[Backend, ...], vocab: int
    ) -> None:
        self.arch, self.weights, self.memory, self.backends, self.vocab = arch, weights, memory, backends, vocab
        self.ticket = 0
        self.closed = False
        self.interrupt = backends[0].interrupt
        self.profile: Profile | None = None  # times the forwards while it is there
        self._programs: OrderedDict[Key, StepProgram] = OrderedDict()
        memory.use(backends[0], self._forward_again)

    def run(self, batch: Batch) -> StepRows:
        """Forwards the batch; each sequence then has T pending rows, kept by `commit`.

        Raises `UsageError` (shape, token ids, sequences out of order) or `ContextFullError` before anything is written.
        Where it raises later, `Interrupted` among others, no rows are pending and what was committed stands.
        """
        if self.closed:
            raise TsggError("this model was closed: load it again")
        sequences = cast("tuple[Sequence, ...]", batch.sequences)
        rows = np.asarray(batch.tokens).tolist()
        program = self._program(self._check(batch.want, sequences, rows))
        self.interrupt.check()
        self.ticket += 1
        first = [sequence.length for sequence in sequences]
        try:
            if self.profile is None:
                program.run(rows, first, interruptible=True)
                handed_out = StepRows(self, program)
            else:
                handed_out = self.profile.run(program, rows, first)
            for sequence, row in zip(sequences, rows, strict=True):
                sequence.wrote(row)
        except BaseException:
            for sequence, row in zip(sequences, rows, strict=True):
                sequence.spoiled(row)
            self.memory.spoiled()
            raise
        return handed_out

    def _forward_again(self, slot: int, tokens: list[int], first: int) -> None:
        """Rows of the last forward once more, for the state after them. What that handed out stays valid."""
        key = Key(len(tokens), 1, slot, self.memory.buckets(first + len(tokens), len(tokens)), Want("none"), again=True)
        self._program(key, keep=2).run([tokens], [first])

    def graph_bytes(self) -> int:
        return sum(program.graph.nbytes for program in self._programs.values())

    def close(self) -> None:
        self.closed = True
        if self.profile is not None:
            self.profile.close()
        self._drop_programs()

    def _check(self, want: Want, sequences: tuple[Sequence, ...], tokens: list[list[int]]) -> Key:
        # Plain lists, no numpy: between two computes all caches are cold, and every call into numpy costs 10 to 20 us.
        if len(tokens) != len(sequences) or not tokens or not isinstance(tokens[0], list) or not tokens[0]:
            raise UsageError(
                f"a batch of {len(sequences)} sequences needs tokens [sequences, rows] with one row or more"
            )
        rows = len(tokens[0])
        first = sequences[0].slot
        longest = 0
        for i, sequence in enumerate(sequences):
            if min(tokens[i]) < 0 or max(tokens[i]) >= self.vocab:
                raise UsageError(f"token ids must lie in 0..{self.vocab - 1}, got {min(tokens[i])}..{max(tokens[i])}")
            sequence.check_room(rows)
            longest = max(longest, sequence.length)
            if sequence.slot != first + i:
                raise UsageError("the sequences of a batch must lie in neighbouring slots, in order")
        for layer in want.taps:
            if not 0 <= layer <= self.arch.layers:
                raise UsageError(f"tap {layer}: the model has residuals 0..{self.arch.layers}")
        return Key(rows, len(sequences), first, self.memory.buckets(longest + rows, rows), want)

    def _program(self, key: Key, keep: int = 1) -> StepProgram:
        """The graph for a key. The `keep` last used ones stay, whatever they weigh."""
        program = self._programs.get(key)
        if program is not None:
            self._programs.move_to_end(key)
            return program
        if not self.memory.has_room(key.sequences, key.rows, key.purpose):
            self._drop_programs()  # they hold addresses of what is about to move
            self.memory.make_room(key.sequences, key.rows, key.purpose)
        program = StepProgram(key, self.arch, self.weights, self.memory, self.backends)
        self._programs[key] = program
        held = self.graph_bytes()
        while held > settings.graph_budget and len(self._programs) > keep:
            _, oldest = self._programs.popitem(last=False)
            held -= oldest.graph.nbytes
            oldest.graph.close()
        return program

    def _drop_programs(self) -> None:
        self.ticket += 1  # rows that were handed out lie in their memory
        for program in self._programs.values():
            program.graph.close()
        self._programs.clear()
