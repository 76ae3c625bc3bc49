"""Recurrent states: whatever was verified, accepted, rejected, left uncommitted or cut, the live state is, bit for bit, that
of a replay of the same prefill chunks and one-row decodes; and no row is ever forwarded twice for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.lone_loop import resume
from tests.test_memory_exact import check_windows
from tests.tiny_qwen35 import Reference, TinyQwen35, write_qwen35
from tests.trunk_steps import PLAIN, VERIFY, batch, decode, differing_cells, same_bits, step, visible_cells
from tsgg.errors import OutOfMemoryError, TsggError, UnsupportedError, UsageError
from tsgg.ggml.buffers import TensorSet
from tsgg.ggml.devices import pick_device
from tsgg.ggml.graph import Graph
from tsgg.memory import Memory, Sequence
from tsgg.memory.memory import memory_bytes, verify_bytes
from tsgg.memory.recurrent import LARGEST_VERIFY, RecurrentArena
from tsgg.model import Model
from tsgg.models.base import Attention, Recurrent
from tsgg.speculative.protocol import Batch, Want

UNSEEN = Want("none")  # a prefill chunk
SHAPE = TinyQwen35(layers=3, recurrent=(True, False, True))
STATE = (SHAPE.channels * 3 + SHAPE.value_heads * SHAPE.state**2) * 4 * 2  # bytes of a sequence's state: two layers


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    """A tiny hybrid whose last layer is recurrent, with three slots. One thread: a second only waits for a core."""
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=700, n_seq=3, n_threads=1) as model:
        yield model


def draw(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(256), k=count)


def recurrent(model: Model) -> RecurrentArena:
    assert model.memory.recurrent is not None
    return model.memory.recurrent


def states(model: Model, sequence: Sequence) -> list[bytes]:
    return [array.tobytes() for name, array in visible_cells(model, sequence) if name.startswith(("conv", "state"))]


# -- what a commit keeps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 60])
def test_every_window_and_every_kept_count_leave_what_plain_steps_leave(model: Model, depth: int) -> None:
    check_windows(model, depth)


@pytest.mark.parametrize("rows", [*range(1, 17), 33, LARGEST_VERIFY])
def test_the_state_after_every_row_of_a_verify_is_that_of_one_row_decodes(model: Model, rows: int) -> None:
    """T = 1..16 and more, every number of kept rows: the whole state, not only what the next row shows of it."""
    rng = random.Random(rows)
    start, tokens = draw(rng, 7), draw(rng, rows)
    plain, tried = model.new_sequence(), model.new_sequence()
    step(model, plain, start, want=UNSEEN)
    for kept in range(rows + 1):
        if kept:
            step(model, plain, [tokens[kept - 1]], want=PLAIN)
        tried.truncate(0)
        step(model, tried, start, want=UNSEEN)
        step(model, tried, tokens, kept, want=VERIFY)
        assert states(model, tried) == states(model, plain), f"{kept} of {rows} rows kept"
        assert not differing_cells(model, tried, plain)


def test_sequences_of_one_verify_keep_different_numbers_of_rows(model: Model) -> None:
    rng = random.Random(3)
    for rows in (1, 2, 5, 9):
        sequences = [model.new_sequence() for _ in range(3)]
        starts, tails = ([draw(rng, count) for _ in sequences] for count in (11, rows))
        for sequence, start in zip(sequences, starts, strict=True):
            step(model, sequence, start, want=UNSEEN)
        model.forward(Batch(tuple(sequences[1:]), np.array(tails[1:], np.int32), VERIFY))  # nobody commits it
        model.forward(Batch(tuple(sequences), np.array(tails, np.int32), VERIFY))
        kept = [rng.randint(0, rows) for _ in sequences]
        for i in (1, 2, 0):  # in any order
            sequences[i].commit(kept[i])
        for i in range(3):
            held = states(model, sequences[i])
            sequences[i].truncate(0)
            step(model, sequences[i], starts[i], want=UNSEEN)
            for token in tails[i][: kept[i]]:
                step(model, sequences[i], [token], want=PLAIN)
            assert states(model, sequences[i]) == held, f"sequence {i}, {kept[i]} of {rows}"
        for sequence in sequences:
            model.release(sequence)


def test_rows_that_nobody_commits_change_nothing(model: Model) -> None:
    rng = random.Random(4)
    sequence = model.new_sequence()
    step(model, sequence, draw(rng, 20), want=UNSEEN)
    before = states(model, sequence)
    for want, rows in ((VERIFY, 9), (PLAIN, 1), (UNSEEN, 40), (VERIFY, 90)):
        model.forward(Batch((sequence,), np.array([draw(rng, rows)], np.int32), want))
        assert states(model, sequence) == before
        sequence.commit(0)
        assert states(model, sequence) == before and sequence.length == 20


def test_a_chunk_keeps_its_last_state_only_and_is_committed_whole_or_not_at_all(model: Model) -> None:
    rng = random.Random(5)
    sequence, other = model.new_sequence(), model.new_sequence()
    start = draw(rng, 10)
    for each in (sequence, other):
        step(model, each, start, want=UNSEEN)
    for want, rows in ((UNSEEN, 2), (PLAIN, 30), (VERIFY, LARGEST_VERIFY + 1)):
        tokens, before = draw(rng, rows), states(model, sequence)
        model.forward(Batch((sequence,), np.array([tokens], np.int32), want))
        with pytest.raises(TsggError, match="kept after the last row only"):
            sequence.commit(rows - 1)
        assert states(model, sequence) == before and len(sequence.pending) == rows
        sequence.commit(rows)
        step(model, other, tokens, want=want)
        assert states(model, sequence) == states(model, other)


def test_a_commit_after_another_forward_is_refused_with_nothing_changed(model: Model) -> None:
    rng = random.Random(6)
    one, other = model.new_sequence(), model.new_sequence()
    for each in (one, other):
        step(model, each, draw(rng, 10), want=UNSEEN)
    before = states(model, one)
    model.forward(Batch((one,), np.array([draw(rng, 3)], np.int32), VERIFY))
    model.forward(Batch((other,), np.array([draw(rng, 9)], np.int32), VERIFY))  # moves the scratch, too
    with pytest.raises(TsggError, match="Commit a forward's rows before the next forward"):
        one.commit(2)
    other.commit(9)
    assert states(model, one) == before and one.length == 10
    one.commit(0)
    step(model, one, [1, 2, 3], kept=2)
    assert one.length == 12


# -- going back --------------------------------------------------------------------------------------------------------


def test_a_state_goes_back_to_nothing_only(model: Model) -> None:
    sequence = model.new_sequence()
    tokens = draw(random.Random(7), 30)
    fresh = states(model, sequence)
    first = step(model, sequence, tokens[:20])
    assert sequence.truncate(25) == sequence.truncate(20) == 20
    held = states(model, sequence)
    step(model, sequence, tokens[20:], kept=0)
    assert sequence.truncate(20) == 20 and states(model, sequence) == held
    assert sequence.truncate(19) == 0 and sequence.tokens == [] and states(model, sequence) == fresh
    assert same_bits(step(model, sequence, tokens[:20]), first) and states(model, sequence) == held
    assert resume(sequence, tokens) == 20, "a prompt that goes on where the sequence ends is not computed again"
    assert resume(sequence, [*tokens[:19], 255, 1]) == 0


def test_a_slot_that_was_used_before_begins_at_zero(model: Model) -> None:
    tokens = draw(random.Random(8), 15)
    first = model.new_sequence()
    expected, fresh = step(model, first, tokens), b"".join(states(model, model.new_sequence()))
    model.release(first)
    again = model.new_sequence()
    assert again.slot == 0 and b"".join(states(model, again)) == fresh and not any(fresh)
    assert same_bits(step(model, again, tokens), expected)


# -- any history -------------------------------------------------------------------------------------------------------


class Log:
    """A sequence and what a replay of it needs: chunks as they were forwarded, accepted rows one by one."""

    def __init__(self, model: Model, rng: random.Random) -> None:
        self.model, self.rng, self.sequence = model, rng, model.new_sequence()
        self.log: list[tuple[list[int], Want]] = []

    def chunk(self, rows: int) -> None:
        tokens = draw(self.rng, rows)
        step(self.model, self.sequence, tokens, want=UNSEEN)
        self.log.append((tokens, UNSEEN))

    def verify(self, rows: int, kept: int) -> None:
        tokens = draw(self.rng, rows)
        step(self.model, self.sequence, tokens, kept, want=VERIFY if rows > 1 else PLAIN)
        self.accepted(tokens[:kept])

    def accepted(self, tokens: list[int]) -> None:
        self.log += [([token], PLAIN) for token in tokens]

    def truncate(self, length: int) -> None:
        now, reached = self.sequence.length, self.sequence.truncate(length)
        if length >= now:
            assert reached == now
            return
        assert reached <= length
        kept: list[tuple[list[int], Want]] = []
        while sum(len(tokens) for tokens, _ in kept) < reached:
            kept.append(self.log[len(kept)])
        assert sum(len(tokens) for tokens, _ in kept) == reached, "only the end of something forwarded can be reached"
        assert not kept or len(kept[-1][0]) > 1, "and that a chunk's"
        self.log = kept

    def check(self) -> None:
        """Against a replay in another slot: tokens, cells, states, and the row that follows."""
        other = self.model.new_sequence()
        try:
            for tokens, want in self.log:
                step(self.model, other, tokens, want=want)
            assert self.sequence.tokens == other.tokens
            assert not differing_cells(self.model, self.sequence, other)
            assert states(self.model, self.sequence) == states(self.model, other)
            token = draw(self.rng, 1)
            assert same_bits(*(step(self.model, s, token, 0, PLAIN) for s in (self.sequence, other)))
        finally:
            self.model.release(other)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("experts", [0, 4])
def test_three_hundred_random_steps_leave_what_their_replay_leaves(tmp_path: Path, seed: int, experts: int) -> None:
    shape = replace(SHAPE, experts=experts)
    with Model(write_qwen35(tmp_path / "m.gguf", shape), n_ctx=700, n_seq=3, n_threads=1) as model:
        rng = random.Random(seed)
        one, other = Log(model, rng), Log(model, rng)
        for number in range(300):
            for log in (one, other):
                if log.sequence.left < 90:
                    log.truncate(0)
            pick, rows = rng.random(), rng.choice((2, 3, 4, 5, 8, 9, 16, 17))
            if pick < 0.25:
                one.verify(1, 1)
            elif pick < 0.35:  # everything accepted
                one.verify(rows, rows)
            elif pick < 0.65:
                one.verify(rows, rng.randint(0, rows))
            elif pick < 0.75:  # a draft, a step without one, a draft
                for count in (rows, 1, rows):
                    one.verify(count, rng.randint(1, count))
            elif pick < 0.85:
                other.chunk(rng.choice((1, 7, 66, 80)))
            elif pick < 0.97:
                tokens = [draw(rng, rows), draw(rng, rows)]
                model.forward(Batch((one.sequence, other.sequence), np.array(tokens, np.int32), VERIFY))
                for log, row in zip((one, other), tokens, strict=True):
                    kept = rng.randint(0, rows)
                    log.sequence.commit(kept)
                    log.accepted(row[:kept])
            else:
                one.truncate(rng.randrange(one.sequence.length + 1))
            if number % 60 == 59:
                one.check()
                other.check()


class History(RuleBasedStateMachine):
    """One sequence under every operation that there is, beside a neighbour; a replay at the end."""

    model: ClassVar[Model]

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(9)
        self.log, self.neighbour = Log(self.model, self.rng), Log(self.model, self.rng)

    @precondition(lambda self: self.log.sequence.left > 80)
    @rule(rows=st.sampled_from((1, 2, 3, 40, LARGEST_VERIFY, 70)))
    def prefill_chunk(self, rows: int) -> None:
        self.log.chunk(rows)

    @precondition(lambda self: self.log.sequence.left > 5)
    @rule(count=st.integers(1, 4))
    def plain_steps(self, count: int) -> None:
        for _ in range(count):
            self.log.verify(1, 1)

    @precondition(lambda self: self.log.sequence.left > 20)
    @rule(rows=st.integers(2, 17), share=st.sampled_from((0.0, 0.3, 0.7, 1.0)))
    def verify(self, rows: int, share: float) -> None:
        self.log.verify(rows, round(share * rows))

    @precondition(lambda self: self.log.sequence.left > 20)
    @rule(rows=st.integers(1, 17), want=st.sampled_from((UNSEEN, PLAIN, VERIFY)))
    def forward_without_a_commit(self, rows: int, want: Want) -> None:
        tokens = np.array([draw(self.rng, rows)], np.int32)
        self.model.forward(Batch((self.log.sequence,), tokens, want))

    @precondition(lambda self: self.neighbour.sequence.left > 80)
    @rule(rows=st.sampled_from((1, 5, 66)))
    def neighbour_prefills(self, rows: int) -> None:
        self.neighbour.chunk(rows)

    @precondition(lambda self: min(self.log.sequence.left, self.neighbour.sequence.left) > 20)
    @rule(rows=st.integers(1, 9), kept=st.tuples(st.integers(0, 9), st.integers(0, 9)))
    def verify_together(self, rows: int, kept: tuple[int, int]) -> None:
        tokens = [draw(self.rng, rows), draw(self.rng, rows)]
        logs = sorted((self.log, self.neighbour), key=lambda log: log.sequence.slot)
        if logs[0].sequence.slot + 1 != logs[1].sequence.slot:
            return
        self.model.forward(Batch(tuple(log.sequence for log in logs), np.array(tokens, np.int32), VERIFY))
        for log, row, count in zip(logs, tokens, kept, strict=True):
            log.sequence.commit(min(count, rows))
            log.accepted(row[: min(count, rows)])

    @rule(by=st.sampled_from((0, 0, 1, 40)))
    def truncate(self, by: int) -> None:
        self.log.truncate(max(0, self.log.sequence.length - by))

    @rule()
    def begin_anew_in_a_slot_that_was_used(self) -> None:
        self.model.release(self.log.sequence)
        self.log.sequence = self.model.new_sequence()
        self.log.log.clear()

    def teardown(self) -> None:
        try:
            for log in (self.log, self.neighbour):
                log.check()
        finally:
            self.model.release(self.log.sequence)
            self.model.release(self.neighbour.sequence)


def test_any_history_leaves_what_its_replay_leaves(model: Model) -> None:
    History.model = model
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=60, stateful_step_count=14, deadline=None, derandomize=True, database=None,
            suppress_health_check=slow,
        ),
    )  # fmt: skip


# -- scratch -----------------------------------------------------------------------------------------------------------


def test_scratch_is_as_large_as_the_largest_verify_and_no_chunk_enlarges_it(model: Model) -> None:
    arena, sequence = recurrent(model), model.new_sequence()
    layers = model.arch.attention()
    kv = sum(each.nbytes for each in model.memory.arenas.values())
    assert arena.scratch_nbytes == 0 and model.plan.cache == model.memory.nbytes == kv + 3 * STATE
    step(model, sequence, draw(random.Random(1), 512), want=UNSEEN)
    assert arena.scratch_nbytes <= verify_bytes(layers, 1, 1) < 2 * STATE
    for rows, largest in ((1, 1), (4, 4), (2, 4), (9, 9), (4, 9)):
        step(model, sequence, draw(random.Random(rows), rows))
        assert arena.scratch_nbytes == pytest.approx(verify_bytes(layers, 1, largest), abs=4096)
        assert model.memory.nbytes == kv + 3 * STATE + arena.scratch_nbytes + arena.checkpoints.nbytes
    step(model, sequence, draw(random.Random(2), 70))
    assert arena.scratch_nbytes == pytest.approx(verify_bytes(layers, 1, 9), abs=4096)
    assert model.arch.preferred_draft_window == 3 and model.plan.snapshots == verify_bytes(layers, 1, 4)
    assert "snapshots" in str(model.plan)


def test_the_plan_of_a_27b_counts_its_states() -> None:
    layers = [Recurrent(10240, 4, 48, 128, 128) if (i + 1) % 4 else Attention(24, 4, 256, 256) for i in range(64)]
    states = 48 * (10240 * 3 + 48 * 128 * 128) * 4
    assert memory_bytes(layers, 4096, 2, "f16", "f16") == 2 * (states + 16 * 4096 * 4 * 512 * 2)
    assert states == pytest.approx(150 * 2**20, rel=0.01)
    assert verify_bytes(layers, 1, 4) == 48 * 4 * (4 * 48 * 128 * (128 + 1) + (3 + 4) * 10240)


def test_graphs_that_were_built_before_scratch_moved_are_not_run_again(model: Model) -> None:
    rng, sequence, plain = random.Random(10), model.new_sequence(), model.new_sequence()
    for count in (1, 3, 1, 9, 3, 1, 17, 9, 1):
        tokens = draw(rng, count)
        expected = decode(model, plain, tokens)
        assert same_bits(step(model, sequence, tokens), expected)
        assert states(model, sequence) == states(model, plain)


def test_scratch_that_does_not_fit_refuses_the_forward_and_nothing_is_lost(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, sequence, plain = random.Random(11), model.new_sequence(), model.new_sequence()
    for each in (sequence, plain):
        step(model, each, [1, 2, 3])
    with monkeypatch.context() as patch:

        def refuse(*_: object, **__: object) -> int:
            raise OutOfMemoryError("the device refused the allocation")

        patch.setattr(TensorSet, "allocate", refuse)
        with pytest.raises(OutOfMemoryError, match=r"states after 12 rows.*smaller draft window"):
            step(model, sequence, draw(rng, 12))
    assert sequence.tokens == [1, 2, 3] and sequence.pending == []
    tokens = draw(rng, 12)
    assert same_bits(step(model, sequence, tokens, kept=5), decode(model, plain, tokens))
    decode(model, sequence, tokens[5:])
    assert states(model, sequence) == states(model, plain)


def test_a_step_is_one_forward_and_one_copy_graph_whatever_is_rejected(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second forward, and nothing of the state goes through the host: the copy graph's inputs are a few row numbers."""
    sequence = model.new_sequence()
    for rows in (5, 1):
        step(model, sequence, list(range(rows)))  # builds the graphs
    replayed: list[Graph] = []
    replay = Graph.replay

    def note(graph: Graph, interruptible: bool = False) -> None:
        replayed.append(graph)
        replay(graph, interruptible)

    monkeypatch.setattr(Graph, "replay", note)
    for rows, kept in ((5, 1), (1, 1), (5, 3), (5, 5), (1, 1)):
        replayed.clear()
        model.forward(Batch((sequence,), np.array([range(rows)], np.int32), VERIFY))
        sequence.commit(kept)
        forward, copy = replayed
        assert sum(array.nbytes for array in copy.inputs.values()) == 4 * (SHAPE.value_heads + 3)
        assert len(copy.nodes()) <= 2 * 2 * 2 < 50 < len(forward.nodes())  # two layers, two copies each, behind views
    replayed.clear()
    model.forward(Batch((sequence,), np.array([[1, 2]], np.int32), VERIFY))
    sequence.commit(0)
    assert len(replayed) == 1, "nothing is kept, nothing is copied"


def test_a_reference_in_numpy_holds_the_same_states_after_rejections(tmp_path: Path) -> None:
    rng, reference = random.Random(12), Reference(SHAPE)
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=300, n_threads=1) as model:
        sequence = model.new_sequence()
        for rows in (6, 1, 9, 3, 12):
            tokens, kept = draw(rng, rows), rng.randint(1, rows)
            step(model, sequence, tokens, kept)
            for token in tokens[:kept]:
                reference.step(token)
        for layer in (0, 2):
            held = {name: array for name, array in visible_cells(model, sequence)}
            conv, state = (held[f"{kind} {layer}"].view(np.float32) for kind in ("conv", "state"))
            assert np.abs(conv - reference.conv[layer].reshape(-1)).max() < 1e-2  # F16 attention between the layers
            assert np.abs(state - reference.state[layer].reshape(-1)).max() < 1e-2


# -- limits ------------------------------------------------------------------------------------------------------------


def test_states_that_a_gpu_cannot_compute_are_refused_before_its_kernel_aborts() -> None:
    gpu = replace(pick_device("cpu"), kind="gpu", name="CUDA0")
    with pytest.raises(UnsupportedError, match=r"48 channels do not run on CUDA0.*device='cpu'"):
        RecurrentArena({0: Recurrent(192, 4, 1, 48, 48)}, 1, gpu)


def test_layers_of_different_geometry_are_refused() -> None:
    layers: list[Attention | Recurrent] = [Recurrent(192, 4, heads, 64, 64) for heads in (1, 2)]
    layers.append(Attention(1, 1, 64, 64))
    with pytest.raises(UnsupportedError, match="different geometry"):
        Memory(layers, 256, 1, pick_device("cpu"), "f16", "f16")


def test_only_pending_rows_can_be_committed(model: Model) -> None:
    sequence = model.new_sequence()
    step(model, sequence, [1, 2, 3], kept=2)
    before = states(model, sequence)
    for kept in (1, -1):
        with pytest.raises(UsageError, match="left 0 rows"):
            sequence.commit(kept)
    assert sequence.tokens == [1, 2] and states(model, sequence) == before


def test_sequences_in_company_leave_the_states_that_each_leaves_alone(model: Model) -> None:
    rng = random.Random(13)
    texts = [draw(rng, 30) for _ in range(3)]
    sequences = [model.new_sequence() for _ in texts]
    batch(model, sequences, texts, want=UNSEEN)
    together = [states(model, sequence) for sequence in sequences]
    for sequence, text, held in zip(sequences, texts, together, strict=True):
        sequence.truncate(0)
        step(model, sequence, text, want=UNSEEN)
        assert states(model, sequence) == held
