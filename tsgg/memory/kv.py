"""KV arenas, and the attention that reads them.

Slot s owns a contiguous run of cells. With full attention position p lies in cell p of its run, so neither layout nor bits of
a sequence depend on its history or company, and a rejected row is simply overwritten later. With a sliding window position
p lies in cell p % cells, where `cells` >= window + the largest run of rows that is not yet committed: a verify can then
never overwrite a row that a rollback still needs, and the layout is again a function of the position alone.

    K  {head_dim, cells, kv_heads, slots}     a head's keys are one run: heads interleaved cost a third of decode at 4k
    V  {cells, value_dim, kv_heads, slots}    transposed, for the soft_max path (float caches on the CPU), or
       {value_dim, cells, kv_heads, slots}    row-major, for flash attention alone (GPUs, quantized V)

Two attention paths, by the layout of V alone:
* soft: K.Q -> soft_max -> V.P by mul_mat. All query heads of a KV head (and all rows of a block) are columns of ONE product,
  so K and V are read once, and the product has two or more columns from the first row on: ggml's sgemm kernels then compute
  every row in the same way, whatever the number of rows. Row-exact. The rows of a prefill chunk are several blocks.
* flash: `flash_attn_ext`, wherever V is row-major. On the CPU row-exact with a quantized V, which `tsgg.probe` checks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tsgg.errors import UsageError
from tsgg.ggml.buffers import BF16, CACHE_TYPES, F16, F32, I64, Tensor, TensorSet
from tsgg.ggml.builder import GraphBuilder
from tsgg.ggml.devices import Device
from tsgg.ggml.library import ffi, lib
from tsgg.models.base import Attention
from tsgg.settings import settings

CELL_STEP = 256  # cells per bucket step: CUDA's flash kernels want a multiple of it
# Cells per bucket step where the soft_max path reads a lone row's, masked ones too: with 256 a step at the start of a text took
# 6 % longer. A graph more takes a third of a step to build. Verifies have a graph for every number of rows, so longer steps.
FINE_STEP = 64
MANY_ROWS = 128  # rows from which a graph is worth a coarse bucket: prefill chunks reach each length once
# Rows whose scores are computed together: a block's scores stay in the cache, and cells behind its last row are not read.
BLOCK_ROWS = 64
BLOCK_NODES = 24  # of a graph, at most, that one more block adds to a layer


class KVArena:
    """Caches of some layers for `slots` sequences. Allocated once, freed by `close`."""

    def __init__(
        self, layers: Mapping[int, Attention], cells: int, slots: int, device: Device, type_k: str, type_v: str
    ) -> None:
        """`layers`: geometry by layer number, all with the same window. `cells` per slot is rounded up to CELL_STEP.

        Raises `UsageError` for types that do not fit, `OutOfMemoryError`.
        """
        self.layers = dict(layers)
        self.window = next(iter(self.layers.values())).window
        self.cells = round_cells(cells)
        self.slots = slots
        self.type_k, self.type_v = CACHE_TYPES[type_k], CACHE_TYPES[type_v]
        floats = (F32, F16, BF16)
        self.transposed = device.is_cpu and self.type_v in floats and settings.attention != "flash"
        for layer in self.layers.values():
            for name, given, width in (("k", self.type_k, layer.head_dim), ("v", self.type_v, layer.value_dim)):
                if width % lib.ggml_blck_size(given):
                    raise UsageError(
                        f"cache_type_{name} needs heads of a multiple of 32 channels, this model has {width}"
                    )
        self.tensors = TensorSet(2 * len(self.layers))
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        for i, layer in self.layers.items():
            heads, dk, dv = layer.kv_heads, layer.head_dim, layer.value_dim
            self.k[i] = self.tensors.new(self.type_k, (dk, self.cells, heads, slots), f"cache_k.{i}")
            v_shape = (self.cells, dv) if self.transposed else (dv, self.cells)
            self.v[i] = self.tensors.new(self.type_v, (*v_shape, heads, slots), f"cache_v.{i}")
        self.nbytes = self.tensors.allocate(device.buffer_type)
        # By what a graph is for: one row, a verify, a prefill chunk.
        coarse = list(_buckets(self.cells, CELL_STEP, 4))
        fine = self.transposed
        self._lone = list(_buckets(self.cells, FINE_STEP, 32)) if fine else coarse
        self._few = list(_buckets(self.cells, CELL_STEP, 16)) if fine else coarse
        self._many = coarse

    def bucket(self, length: int, rows: int) -> int:
        """Cells that a graph of `rows` rows a sequence reads so that `length` positions, or the window behind them, are among
        them."""
        buckets = self._lone if rows == 1 else self._few if rows < MANY_ROWS else self._many
        return buckets[bisect_left(buckets, min(length, self.cells))]

    def reachable(self, length: int, highest: int) -> bool:
        """Whether a sequence whose rows were written up to `highest` (exclusive) can go on from `length` tokens.

        A ring holds the positions `highest - cells` and later; the row at `length` sees a window that ends with itself.
        """
        return not self.window or highest <= self.cells or length + 1 - self.window >= highest - self.cells

    def close(self) -> None:
        self.tensors.close()


def _buckets(cells: int, step: int, share: int) -> Iterator[int]:
    """Multiples of `step`, one or more apart, and about a `share`-th from 2k on: few graphs, little reading of masked cells."""
    size = step
    while size < cells:
        yield size
        size += step if size < 8 * CELL_STEP else -(-size // (share * step)) * step
    yield cells


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a forward whose attention is computed together: `rows` of each sequence from row `first` on."""

    first: int
    rows: int
    cells: int  # read: masked ones behind the block's last row are left out where the layout allows it


def _blocks(arena: KVArena, rows: int, cells: int) -> Iterator[Block]:
    """Blocks of a forward of `rows` rows that reads `cells` cells, its last row within them."""
    for first in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - first)
        # Rows after the block lie in later cells, unless the arena is a ring that may have wrapped.
        after = rows - first - count if cells < arena.cells or not arena.window else 0
        yield Block(first, count, cells - after // FINE_STEP * FINE_STEP)


class KVStep:
    """The arena's part of one forward under construction: B sequences in slots `first` .., T rows each, `cells` read."""

    def __init__(
        self, arena: KVArena, g: GraphBuilder, name: str, first: int, sequences: int, rows: int, cells: int
    ) -> None:
        """`name` is the arena's, and opens the names of its inputs."""
        self.arena, self.g, self.name = arena, g, name
        self.first, self.sequences, self.rows, self.cells = first, sequences, rows, cells
        self.flash = not arena.transposed
        self.ids = g.input(f"{name}.cells", I64, rows, 1, sequences)
        self.blocks = [Block(0, rows, cells)] if self.flash else list(_blocks(arena, rows, cells))
        kind = F16 if self.flash else F32
        self.masks = [
            g.input(f"{name}.mask.{block.first}", kind, block.cells, block.rows, 1, sequences) for block in self.blocks
        ]
        self.widths: list[int] = []  # V channels of layers with a transposed V
        self._outputs: dict[tuple[int, int], Tensor] = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Schedules the writes of k {d, kv heads, rows} and v into the layer's cells."""
        arena, shape = self.arena, self.arena.layers[layer]
        self._store_rows(arena.k[layer], k)
        if not arena.transposed:
            self._store_rows(arena.v[layer], v)
            return
        # Element by element: channel c of position p goes to element c * cells + p of the slot.
        g, cache, width = self.g, arena.v[layer], shape.value_dim * shape.kv_heads
        element, slot = int(cache.nb[0]), int(cache.nb[3])
        flat = g.view(cache, (1, arena.cells * width, self.sequences), (element, slot), self.first * slot)
        if width not in self.widths:
            self.widths.append(width)
        ids = g.input(f"{self.name}.elements.{width}", I64, width * self.rows, self.sequences)
        g.expand(g.set_rows(flat, g.reshape(g.cont(v), 1, width * self.rows, self.sequences), ids))

    def _store_rows(self, cache: Tensor, x: Tensor) -> None:
        g, d, heads = self.g, int(x.ne[0]), int(x.ne[1])
        rows = g.permute(g.reshape(g.cont(x), d, heads, self.rows, self.sequences), 0, 2, 1, 3)
        g.expand(g.set_rows(self._slots(cache, self.arena.cells), rows, self.ids))

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of q {d, heads, rows} over the layer's cells: {value_dim * heads, rows}."""
        g, shape, b, t = self.g, self.arena.layers[layer], self.sequences, self.rows
        heads, kv_heads, d, dv = int(q.ne[1]), shape.kv_heads, shape.head_dim, shape.value_dim
        q = g.permute(g.reshape(q, d, heads, t, b), 0, 2, 1, 3)  # {d, t, heads, b}
        if self.flash:
            k, v = (self._slots(cache[layer], self.cells) for cache in (self.arena.k, self.arena.v))
            return g.reshape(g.flash_attn(q, k, v, self.masks[0], scale), dv * heads, t * b)
        whole = self._output(dv, heads)
        for block, mask in zip(self.blocks, self.masks, strict=True):
            n, cells = block.rows, block.cells
            columns = n * (heads // kv_heads)  # all query heads of a KV head: column = head in group * n + row
            own = self._block(q, block)
            k = self._slots(self.arena.k[layer], cells)
            scores = self._product(k, g.reshape(g.cont(own), d, columns, kv_heads, b), f32=True)
            weights = g.soft_max(g.reshape(scores, cells, n, heads, b), mask, scale)
            out = self._product(self._value_columns(layer, cells), g.reshape(weights, cells, columns, kv_heads, b))
            out = g.permute(g.reshape(out, dv, n, heads, b), 0, 2, 1, 3)  # {dv, heads, n, b}
            if whole is None:
                return g.reshape(g.cont(out), dv * heads, t * b)
            strides = tuple(int(stride) for stride in whole.nb[1:4])
            g.expand(g.cpy(out, g.view(whole, (dv, heads, n, b), strides, block.first * strides[1])))
        assert whole is not None
        return g.reshape(whole, dv * heads, t * b)

    def _output(self, dv: int, heads: int) -> Tensor | None:
        """{dv, heads, rows, sequences}: where blocks leave their rows, the same for all layers of that shape; None: one block.

        A layer's queries need all that the layers before it did, so its rows are read before a later layer's are written.
        """
        if len(self.blocks) == 1:
            return None
        if (dv, heads) not in self._outputs:
            self._outputs[dv, heads] = self.g.leaf(F32, dv, heads, self.rows, self.sequences)
        return self._outputs[dv, heads]

    def _block(self, q: Tensor, block: Block) -> Tensor:
        """The block's rows of q {d, t, heads, b}."""
        if block.rows == self.rows:
            return q
        strides = tuple(int(stride) for stride in q.nb[1:4])
        shape = (int(q.ne[0]), block.rows, int(q.ne[2]), int(q.ne[3]))
        return self.g.view(q, shape, strides, block.first * strides[0])

    def _product(self, a: Tensor, b: Tensor, f32: bool = False) -> Tensor:
        """`mul_mat`, where a lone column of `b` is computed twice: one column would take another kernel than two."""
        g, multiply = self.g, self.g.mul_mat_f32 if f32 else self.g.mul_mat
        if int(b.ne[1]) > 1:
            return multiply(a, b)
        result = multiply(a, g.repeat(b, int(b.ne[0]), 2, int(b.ne[2]), int(b.ne[3])))
        shape = (int(result.ne[0]), 1, int(result.ne[2]), int(result.ne[3]))
        return g.cont(g.view(result, shape, tuple(int(stride) for stride in result.nb[1:4])))

    def _slots(self, cache: Tensor, cells: int) -> Tensor:
        """The step's slots of a row-major cache: {d, cells, kv heads, sequences}."""
        strides, slot = tuple(int(stride) for stride in cache.nb[1:4]), int(cache.nb[3])
        return self.g.view(
            cache, (int(cache.ne[0]), cells, int(cache.ne[2]), self.sequences), strides, self.first * slot
        )

    def _value_columns(self, layer: int, cells: int) -> Tensor:
        """The step's slots of a transposed V cache: {cells, dv, kv heads, sequences}."""
        cache = self.arena.v[layer]
        strides, slot = tuple(int(stride) for stride in cache.nb[1:4]), int(cache.nb[3])
        shape = (cells, int(cache.ne[1]), int(cache.ne[2]), self.sequences)
        return self.g.view(cache, shape, strides, self.first * slot)


class KVInputs:
    """Rewrites an arena's inputs of one graph before a replay, in C: a step's Python time is what a token waits for."""

    def __init__(self, step: KVStep, inputs: dict[str, NDArray[Any]]) -> None:
        self.cells, self.rows, self.sequences = step.cells, step.rows, step.sequences
        self.capacity, self.window = step.arena.cells, step.arena.window
        self.ids = _pointer("int64_t *", inputs[f"{step.name}.cells"])
        self.fill_mask = lib.tsgg_fill_mask_f16 if step.flash else lib.tsgg_fill_mask_f32
        kind = "uint16_t *" if step.flash else "float *"
        masks = [_pointer(kind, inputs[f"{step.name}.mask.{block.first}"]) for block in step.blocks]
        self.masks = list(zip(step.blocks, masks, strict=True))
        self.block_first = ffi.new("int32_t[]", step.sequences)
        self.elements = [
            (_pointer("int64_t *", inputs[f"{step.name}.elements.{width}"]), width) for width in step.widths
        ]

    def fill(self, first: Any) -> None:
        """Fills cells, elements and mask for sequences whose first rows have the positions `first` (int32_t *)."""
        lib.tsgg_fill_cells(self.ids, self.capacity, self.rows, self.sequences, first)
        for pointer, width in self.elements:
            lib.tsgg_fill_elements(pointer, width, self.capacity, self.rows, self.sequences, first)
        for block, mask in self.masks:
            start = first
            if block.first:
                start = self.block_first
                for i in range(self.sequences):
                    start[i] = first[i] + block.first
            # A block's own last row stands for the forward's: a ring has room for its window behind the largest run.
            self.fill_mask(mask, block.cells, self.capacity, block.rows, self.sequences, start, self.window)


def _pointer(type: str, array: NDArray[Any]) -> Any:
    return ffi.cast(type, ffi.from_buffer(array))


def round_cells(cells: int) -> int:
    return -(-cells // CELL_STEP) * CELL_STEP


def cell_bytes(layer: Attention, type_k: str, type_v: str) -> int:
    """Bytes of one position of one layer."""
    k = lib.ggml_row_size(CACHE_TYPES[type_k], layer.head_dim * layer.kv_heads)
    return int(k + lib.ggml_row_size(CACHE_TYPES[type_v], layer.value_dim * layer.kv_heads))
