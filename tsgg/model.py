"""A loaded model: file, weights, memory and the one forward, behind the `Trunk` protocol of tsgg.speculative."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Protocol, TypeVar, cast

from tsgg.assistant import AssistantHead
from tsgg.draft_head import NextNHead
from tsgg.errors import ModelFileError, TsggError, UnsupportedError, UsageError
from tsgg.forward import Forward, StepRows
from tsgg.ggml.buffers import CACHE_TYPES
from tsgg.ggml.devices import Backend, devices, pick_device
from tsgg.ggml.interrupt import Interrupt
from tsgg.gguf import GGML_TYPES, GGUFFile, read_gguf
from tsgg.memory import Memory, Sequence, Slots
from tsgg.models import find
from tsgg.models.base import MAX_CONTEXT, Architecture
from tsgg.plan import fit, prefill_rows
from tsgg.profile import Profile
from tsgg.progress import OnProgress, Progress
from tsgg.speculative import protocol
from tsgg.tokenizer.vocab import token_count
from tsgg.weights import ModelWeights, check, plan
from tsgg.windows import preferred_window

log = logging.getLogger("tsgg.model")

MAX_SEQUENCES = 256


class _Closable(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closable)


class Model:
    """One GGUF file on one device. Not thread-safe; `close` frees everything, in order.

    Implements `tsgg.speculative.protocol.Trunk`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "auto",
        n_ctx: int | None = None,
        n_seq: int | None = 1,
        n_threads: int | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        on_progress: OnProgress | None = None,
    ) -> None:
        """Loads a file. `n_ctx` is tokens per sequence (default: the trained length, at most 8192 and what fits), `n_seq` the
        sequences that memory holds at once (None: what `tsgg.plan.fit` chooses). `on_progress` hears of the bytes that are copied.

        Raises `ModelFileError`, `UnsupportedError`, `UsageError` or `OutOfMemoryError`, with nothing left allocated.
        """
        _check_arguments(n_ctx, n_seq, cache_type_k, cache_type_v)
        started = time.monotonic()
        self.file = read_gguf(path)
        self.arch = _architecture(self.file)
        vocab_size = token_count(self.file.metadata, self.arch.vocab)
        self.device = pick_device(device)
        placements = plan(check(self.file, self.arch.tensors()), self.device)
        self.plan = fit(
            self.arch, placements, self.device.memory_free, n_ctx, n_seq, cache_type_k, cache_type_v, self.file.tensors
        )
        self.n_ctx, n_seq = self.plan.context, self.plan.sequences
        self.vocab_size = vocab_size
        self._closers: list[_Closable] = []
        self._interrupt = Interrupt()
        self._cache_types = cache_type_k, cache_type_v
        self._draft_head: NextNHead | None = None
        self._head_error: TsggError | None = None  # why there is none, though the file announces it
        self._draft_models: dict[str, AssistantHead] = {}
        try:
            backend = self._own(Backend(self.device, n_threads, self._interrupt))
            helpers = () if self.device.is_cpu else (self._own(Backend(devices()[-1], n_threads, self._interrupt)),)
            self.n_threads = backend.n_threads
            tell = on_progress or (lambda progress: None)
            copied = ModelWeights(self.file, placements, self.device, lambda *size: tell(Progress("load", *size)))
            self.weights = self._own(copied)
            self.memory = self._own(
                Memory(self.arch.attention(), self.n_ctx, n_seq, self.device, cache_type_k, cache_type_v)
            )
            if self.device.is_cpu:
                used = self.file.metadata.get_int(f"{self.arch.name}.expert_used_count", 1)
                self.memory.chunk_rows = prefill_rows(placements, used)
            backends = (backend, *helpers)
            self._forward = self._own(Forward(self.arch, self.weights, self.memory, backends, self.vocab_size))
        except BaseException:
            self.close()
            raise
        self.slots = Slots(n_seq, self.n_ctx, self.memory)
        log.info(
            "%s: %s, %d layers, context %d of %d trained, %s on %s, %d threads, loaded in %.2f s; %s",
            self.file.paths[0].name, self.arch.name, self.arch.layers, self.n_ctx, self.arch.context,
            self.quant_types(), self.device.name, self.n_threads, time.monotonic() - started, self.plan,
        )  # fmt: skip

    # -- Trunk -----------------------------------------------------------------------------------------------------

    @property
    def feature_size(self) -> int:
        return self.arch.embedding

    @property
    def preferred_draft_window(self) -> int | None:
        """See `tsgg.windows`."""
        return preferred_window(self.arch.preferred_draft_window, self.device.name, self._type_bytes())

    @property
    def speculation_refusal(self) -> str | None:
        return self.arch.speculation_refusal

    @property
    def speculation_profitable(self) -> bool:
        return self.arch.speculation_profitable

    def forward(self, batch: protocol.Batch) -> StepRows:
        """See `tsgg.forward.Forward.run`."""
        return self._forward.run(batch)

    def interrupt(self) -> None:
        """The forward that runs now raises `Interrupted` within about the time of one matrix product on the CPU, or the next
        one does where none runs. One call stops one forward; what was committed stays, and the forward may be run again.

        May be called from any thread and from a signal handler. Elsewhere than on the CPU a forward that runs is finished.
        """
        self._interrupt.request()

    def clear_interrupt(self) -> None:
        """Forgets an `interrupt` that has stopped no forward yet."""
        self._interrupt.clear()

    def batches(self, sequences: list[protocol.Sequence]) -> list[list[int]]:
        """Runs of neighbouring slots: a forward reads the slots of its sequences as one view."""
        slots = [cast(Sequence, sequence).slot for sequence in sequences]
        runs: list[list[int]] = []
        for i in sorted(range(len(slots)), key=lambda i: slots[i]):
            if runs and slots[runs[-1][-1]] + 1 == slots[i]:
                runs[-1].append(i)
            else:
                runs.append([i])
        return runs

    def context_left(self, sequence: protocol.Sequence) -> int:
        return self.n_ctx - sequence.length

    # -- sequences -------------------------------------------------------------------------------------------------

    def new_sequence(self) -> Sequence:
        """An empty sequence in the lowest free slot; raises `ContextFullError` when all are taken."""
        return self.slots.take()

    def release(self, sequence: Sequence) -> None:
        self.slots.release(sequence)

    # -- about -----------------------------------------------------------------------------------------------------

    def quant_types(self) -> str:
        """Tensor types by bytes, largest first: "Q4_1 77 %, Q8_0 23 %"."""
        sizes = self._type_bytes()
        total = sum(sizes.values()) or 1
        ordered = sorted(sizes.items(), key=lambda item: -item[1])
        return ", ".join(
            f"{GGML_TYPES[kind].name} {100 * size / total:.0f} %" for kind, size in ordered if size * 200 >= total
        )

    def draft_heads(self) -> str:
        """Draft weights that the file itself carries, and why they are left out."""
        found = f"{self.draft_blocks} NextN block(s)" if self.draft_blocks else "none in the file"
        return f"{found}, left out: {self.head_refusal}" if self.head_refusal is not None else found

    @property
    def draft_blocks(self) -> int:
        """NextN blocks that the file announces."""
        return self.file.metadata.get_int(f"{self.arch.name}.nextn_predict_layers", 0)

    @property
    def head_refusal(self) -> str | None:
        """Why `draft_head` leaves out what the file announces: it lacks tensors, or is of a kind that is not implemented."""
        return None if self._head_error is None else str(self._head_error)

    def draft_head(self, required: bool = False) -> NextNHead | None:
        """The draft head that the file carries, loaded at the first call; None where it announces none.

        None as well, with a logged `head_refusal`, for one that cannot be had: the trunk runs without it. Where it is
        `required`, `ModelFileError` or `UnsupportedError` is raised instead. Raises `OutOfMemoryError`.
        """
        self._check_open()
        if self._draft_head is None and self._head_error is None:
            try:
                self._load_head()
            except (ModelFileError, UnsupportedError) as error:
                self._head_error = error
                log.warning("%s; the draft head is left out", error)
        if required and self._head_error is not None:
            raise self._head_error
        return self._draft_head

    def draft_model(self, path: str | Path) -> AssistantHead:
        """The draft head in a file of its own, bound to this very model; one file is loaded once and freed by `close`.

        Raises `ModelFileError` (missing, damaged), `UnsupportedError` (a file of another architecture or an older dialect),
        `UsageError` (a drafter of another target, with the fields that disagree), `OutOfMemoryError`.
        """
        self._check_open()
        key = os.path.abspath(path)
        head = self._draft_models.get(key)
        if head is None:
            backends = self._forward.backends
            head = AssistantHead(
                read_gguf(path), self.arch, self.weights, self.memory, self.device, backends, self.vocab_size
            )
            self._draft_models[key] = self._own(head)
            size = head.weight_bytes / 2**20
            log.info("drafter %s: %s, %.1f MiB of weights", Path(path).name, head.head.name, size)
        return head

    def profile(self) -> Profile:
        """Times every forward from now on, by kind: see `tsgg.profile`. One for the life of the model."""
        if self._forward.profile is None:
            self._forward.profile = Profile(self._forward)
        return self._forward.profile

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes held now, by what for. Those of the file's mapping and of caches are resident as far as they were touched."""
        heads: list[NextNHead | AssistantHead] = list(self._draft_models.values())
        if self._draft_head is not None:
            heads.append(self._draft_head)
        return {
            "weights": self.plan.copied,
            "mapped file": self.plan.mapped,
            "caches": self.memory.nbytes,
            "graphs": self.graph_bytes(),
            "draft heads": sum(head.weight_bytes + head.nbytes for head in heads),
        }

    def graph_bytes(self) -> int:
        """Bytes that cached graphs hold now."""
        return self._forward.graph_bytes()

    def close(self) -> None:
        """Frees graphs, caches, weights and backends; a second call does nothing."""
        while self._closers:
            self._closers.pop().close()
        self._draft_models.clear()
        self._draft_head = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Model({self.file.paths[0].name!r}, {self.arch.name}, n_ctx={self.n_ctx}, device={self.device.name!r})"

    def _load_head(self) -> None:
        block = self.arch.draft_block()
        if block is not None:
            memory = (self.n_ctx, self.slots.count, *self._cache_types)
            backends = self._forward.backends
            head = NextNHead(block, self.file, self.weights, memory, self.device, backends, self.vocab_size)
            self._draft_head = self._own(head)
            log.info("draft head: %.1f MiB beside its weights", head.nbytes / 2**20)

    def _check_open(self) -> None:
        if self._forward.closed:
            raise UsageError("this model was closed: load it again")

    def _type_bytes(self) -> dict[int, int]:
        """Bytes of the file's tensors by ggml type."""
        sizes: dict[int, int] = {}
        for info in self.file.tensors.values():
            sizes[info.type] = sizes.get(info.type, 0) + info.nbytes
        return sizes

    def _own(self, part: _T) -> _T:
        self._closers.append(part)
        return part


def _architecture(file: GGUFFile) -> Architecture:
    name = file.metadata.architecture
    cls = find(name)
    if "token_embd.weight" not in file.tensors or len(file.tensors["token_embd.weight"].shape) != 2:
        raise ModelFileError(f"{file.paths[0].name}: no two-dimensional token_embd.weight: not a whole language model")
    return cls(file.metadata, file.tensors)


def _check_arguments(n_ctx: object, n_seq: object, type_k: object, type_v: object) -> None:
    if n_ctx is not None and not _is_int(n_ctx, 1, MAX_CONTEXT):
        raise UsageError(f"n_ctx is {n_ctx!r}, expected a whole number of tokens from 1 to {MAX_CONTEXT}")
    if n_seq is not None and not _is_int(n_seq, 1, MAX_SEQUENCES):
        raise UsageError(f"n_seq is {n_seq!r}, expected a whole number of sequences from 1 to {MAX_SEQUENCES}")
    for name, given in (("cache_type_k", type_k), ("cache_type_v", type_v)):
        if not isinstance(given, str) or given not in CACHE_TYPES:
            raise UsageError(f"{name} is {given!r}, expected one of {', '.join(CACHE_TYPES)}")


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
