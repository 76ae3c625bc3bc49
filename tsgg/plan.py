"""The memory plan: what a load needs, decided before anything is allocated, and refused when it does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tsgg.errors import OutOfMemoryError, UnsupportedError
from tsgg.gguf import TensorInfo
from tsgg.memory.kv import BLOCK_ROWS, CELL_STEP
from tsgg.memory.memory import LARGEST_RUN, memory_bytes, pool_bytes, verify_bytes
from tsgg.models.base import MAX_CONTEXT, Architecture, Attention, Recurrent
from tsgg.speculative.options import DEFAULT_DRAFT
from tsgg.weights import Placement

DEFAULT_CONTEXT = 8192  # tokens, when neither caller nor file asks for less
PREFILL_ROWS = LARGEST_RUN  # rows of a prefill chunk
DEFAULT_SEQUENCES = 4  # slots, when the caller does not say
CACHE_SHARE = 4  # the slots of a default take at most one part in so many of the free memory
SMALLEST_CONTEXT = CELL_STEP  # a default context is not shrunk below this to fit


# Of one product on the CPU: 0.1 to 0.2 s on two cores. An interrupt is heard between products.
LARGEST_PRODUCT = 8e9  # floating-point operations
FEWEST_ROWS = 64  # of a prefill chunk: with fewer the weights would be read too often


def prefill_rows(placements: Sequence[Placement], experts_used: int) -> int:
    """Rows of a prefill chunk on the CPU: LARGEST_RUN, or fewer where the largest product would take too long.

    The LM head does not count, it sees one row of a chunk.
    """
    largest = 1
    for item in placements:
        if item.spec.role in ("matrix", "experts") and item.spec.name != "output.weight":
            columns, rows = (*item.info.shape, 1)[:2]
            largest = max(largest, columns * rows * (experts_used if item.spec.role == "experts" else 1))
    count = LARGEST_RUN
    while count > FEWEST_ROWS and 2 * count * largest > LARGEST_PRODUCT:
        count //= 2
    return count


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a load needs, and what the device has free."""

    context: int  # tokens per sequence
    sequences: int  # slots
    mapped: int  # weights read in place from the file's mapping
    copied: int  # weights copied, repacked or regrouped into tiles
    cache: int  # KV and recurrent states of all slots
    scratch: int  # estimate of the largest prefill graph's intermediate results
    free: int
    snapshots: int = (
        0  # recurrent layers: the states after every row of one sequence's verify, at the architecture's window
    )
    checkpoints: int = 0  # recurrent layers: the states that a sequence can be cut back to, of all slots together
    head: int = 0  # weights and cache of the draft head in the file, which are loaded when speculation wants them

    @property
    def needed(self) -> int:
        return self.mapped + self.copied + self.cache + self.scratch + self.snapshots + self.checkpoints + self.head

    def __str__(self) -> str:
        some = tuple(name for name in ("snapshots", "checkpoints", "head") if getattr(self, name))
        parts = ", ".join(
            f"{name} {getattr(self, name) / 2**20:.1f}" for name in ("mapped", "copied", "cache", "scratch", *some)
        )
        return f"MiB: weights {parts}; needs {self.needed / 2**20:.1f} of {self.free / 2**20:.1f} free"


def fit(
    arch: Architecture,
    placements: Sequence[Placement],
    free: int,
    n_ctx: int | None,
    n_seq: int | None,
    type_k: str,
    type_v: str,
    tensors: Mapping[str, TensorInfo] | None = None,
) -> MemoryPlan:
    """The plan for a context of `n_ctx` tokens; None means min(trained, 8192), halved until it fits. `n_seq` None: as many
    slots, up to DEFAULT_SEQUENCES, as leave most of the memory free.

    `tensors` are the file's: what a draft head in it weighs, beyond its cache, is counted where they are given.
    Raises `OutOfMemoryError` that lists the parts when an explicit context, or the smallest, does not fit.
    """
    if n_seq is None:
        lone = fit(arch, placements, free, n_ctx, 1, type_k, type_v, tensors)
        # A lone sequence of a recurrent trunk steps without copying its state: several slots would cost each step time.
        recurrent = any(isinstance(layer, Recurrent) for layer in arch.attention())
        for count in range(1 if recurrent else DEFAULT_SEQUENCES, 1, -1):
            head = _head_bytes(arch, tensors or {}, lone.context, count, type_k, type_v)
            proposal = _plan(arch, placements, free, lone.context, count, type_k, type_v, head)
            if proposal.needed <= free and proposal.cache * CACHE_SHARE <= free:
                return proposal
        return lone
    wanted = n_ctx or min(arch.context, DEFAULT_CONTEXT)
    while True:
        head = _head_bytes(arch, tensors or {}, min(wanted, MAX_CONTEXT), n_seq, type_k, type_v)
        proposal = _plan(arch, placements, free, wanted, n_seq, type_k, type_v, head)
        if proposal.needed <= free:
            return proposal
        if n_ctx is not None or wanted <= SMALLEST_CONTEXT:
            raise OutOfMemoryError(
                f"the model does not fit: {proposal}. Use a smaller n_ctx (now {wanted}), n_seq (now {n_seq}), a q8_0 cache "
                "or a smaller quantization"
            )
        wanted = max(SMALLEST_CONTEXT, wanted // 2)


def _plan(
    arch: Architecture,
    placements: Sequence[Placement],
    free: int,
    context: int,
    n_seq: int,
    type_k: str,
    type_v: str,
    head: int,
) -> MemoryPlan:
    context = min(context, MAX_CONTEXT)
    layers = arch.attention()
    attention = [layer for layer in layers if isinstance(layer, Attention)]
    mapped = sum(item.info.nbytes for item in placements if item.where in ("mapped", "host"))
    copied = sum(item.info.nbytes for item in placements if item.where in ("repacked", "tiled", "copied"))
    widest = max(item.info.shape[1] for item in placements if len(item.info.shape) > 1 and item.spec.role != "table")
    rows = min(PREFILL_ROWS, context)
    activations = rows * (3 * widest + 8 * arch.embedding) * 4
    scores = min(rows, BLOCK_ROWS) * max((layer.heads for layer in attention), default=0) * context * 4
    scratch = activations + scores
    cache = memory_bytes(layers, context, n_seq, type_k, type_v)
    # A plain step of all sequences leaves a state of each; a verify one after every row.
    snapshots = max(
        verify_bytes(layers, n_seq, 1), verify_bytes(layers, 1, 1 + (arch.preferred_draft_window or DEFAULT_DRAFT))
    )
    return MemoryPlan(context, n_seq, mapped, copied, cache, scratch, free, snapshots, pool_bytes(layers), head)


def _head_bytes(
    arch: Architecture, tensors: Mapping[str, TensorInfo], context: int, n_seq: int, type_k: str, type_v: str
) -> int:
    try:
        block = arch.draft_block()
        specs = [] if block is None else list(block.tensors())
    except UnsupportedError:  # it is left out, with a reason that the model logs
        return 0
    if block is None or any(spec.name not in tensors and not spec.optional for spec in specs):
        return 0
    weights = sum(tensors[spec.name].nbytes for spec in specs if spec.name in tensors)
    return weights + memory_bytes(block.attention(), context, n_seq, type_k, type_v)
