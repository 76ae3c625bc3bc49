"""The draft head inside a checkpoint (NextN), and the speculator that drives heads drafting token by token."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gguf_writer import write_gguf
from tests.test_loop_on_models import COUNT, GREEDY, SEEDED, plain, prompt_of, speculate
from tests.tiny_qwen35 import Reference, TinyQwen35, metadata, tensors, write_qwen35
from tests.trunk_steps import GOLDEN, step
from tsgg import LLM
from tsgg.candidates import CANDIDATES, best_token
from tsgg.draft_head import NextNHead
from tsgg.errors import ModelFileError, OutOfMemoryError, UsageError
from tsgg.memory import Sequence as ModelSequence
from tsgg.model import Model
from tsgg.plan import fit
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.speculative import REGISTRY, Decline, SpeculationOptions, SpeculationStats, SpeculativeExecution
from tsgg.speculative.draft_head import NO_ROW, DraftHeadSpeculator
from tsgg.speculative.protocol import Batch, Draft, HeadRows, Speculator, Want
from tsgg.weights import check, plan

HEADS = sorted(path.stem for path in (GOLDEN / "heads").glob("qwen35*.npz"))
WITH_HEAD = [*HEADS, *(path.stem for path in sorted((GOLDEN / "trunks").glob("qwen35-mtp-*.gguf")))]
WINDOWS = (1, 2, 3, 4, 7, 8, 15, 16)
SHAPE = TinyQwen35(nextn=1)
F32_CACHE: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}
ALL = Want("all", "all")


def head_of(model: Model) -> NextNHead:
    head = model.draft_head()
    assert head is not None
    return head


def captured(model: Model, sequence: ModelSequence, tokens: list[int]) -> np.ndarray:
    """Forwards and commits tokens; their hidden rows."""
    rows = model.forward(Batch((sequence,), np.array([tokens], np.int32), ALL))
    hidden = np.array(rows.hidden(0))
    sequence.commit(len(tokens))
    return hidden


def head_rows(sequence: ModelSequence, features: np.ndarray, tokens: Sequence[int], start: int) -> HeadRows:
    return HeadRows(sequence, features, np.array(tokens, np.int32), start)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    path = write_qwen35(tmp_path / "m.gguf", SHAPE)
    with Model(path, n_ctx=700, n_seq=2, n_threads=1, **F32_CACHE) as model:
        yield model


# -- the head's mathematics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_every_golden_array_of_a_head_is_met(name: str) -> None:
    with np.load(GOLDEN / "heads" / f"{name}.npz") as file:
        golden = {key: file[key] for key in file}
    prompt = golden["prompt"].tolist()
    pairs = {}
    with Model(GOLDEN / "trunks" / f"{name}.gguf", n_ctx=64, n_threads=1, **F32_CACHE) as model:
        sequence, head = model.new_sequence(), head_of(model)
        rows = model.forward(Batch((sequence,), np.array([prompt], np.int32), ALL))
        hidden = rows.hidden(0).copy()
        pairs["prompt_hidden"] = hidden
        pairs["prompt_logits"] = np.array([rows.logits(0, i) for i in range(len(prompt))])
        sequence.commit(len(prompt))
        before = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
        program = head.run(0, prompt, before, 0, 0, ALL)
        pairs |= {f"catch_up_{what}": program.read(what).copy() for what in ("logits", "hidden")}
        row = hidden[-1:]
        for number in ("step1", "step2"):
            token, position = int(golden[f"{number}_token"]), int(golden[f"{number}_position"])
            program = head.run(0, [token], row, position, 0, ALL)
            row = program.read("hidden").copy()
            pairs |= {f"{number}_logits": program.read("logits")[0].copy(), f"{number}_hidden": row[0]}
        verify, kept = golden["verify_tokens"].tolist(), int(golden["after_rollback_kept"])
        pairs["verify_logits"] = step(model, sequence, verify, kept)
        pairs["after_rollback_logits"] = step(model, sequence, [int(golden["after_rollback_next"])])[0]
    assert set(pairs) == {key for key, array in golden.items() if array.dtype == np.float32}
    for key, ours in pairs.items():
        assert ours.shape == golden[key].shape and np.abs(ours - golden[key]).max() < 1e-4, key


@pytest.mark.parametrize("experts", [0, 4])
def test_a_draft_is_the_chain_that_float64_numpy_computes(tmp_path: Path, experts: int) -> None:
    shape = TinyQwen35(nextn=1, experts=experts, tied=bool(experts))
    rng, reference = random.Random(2), Reference(shape)
    text = rng.choices(range(256), k=30)
    hidden = np.zeros(shape.embedding)
    for position, token in enumerate(text):
        logits, out = reference.draft_step(token, hidden, position)
        hidden = reference.step(token)[1] if position < len(text) - 1 else out
    with Model(write_qwen35(tmp_path / "m.gguf", shape), n_ctx=300, n_threads=1, **F32_CACHE) as model:
        sequence = model.new_sequence()
        features = captured(model, sequence, text[:-1])
        (draft,) = head_of(model).draft([head_rows(sequence, features, text[1:], 0)], 4, 0.0)
    check_chain(draft, reference, logits, hidden, len(text))


def check_chain(draft: Draft, reference: Reference, logits: np.ndarray, hidden: np.ndarray, position: int) -> None:
    """Tokens and confidences against the reference, whose last row gave `logits` and `hidden`."""
    for token, confidence in zip(draft.tokens, draft.confidences, strict=True):
        best = np.sort(logits)[-CANDIDATES:]
        assert token == int(np.argmax(logits))
        assert confidence == pytest.approx(1 / np.exp(best - best[-1]).sum(), abs=1e-5)
        logits, hidden = reference.draft_step(token, hidden, position)
        position += 1


def test_a_draft_ends_before_the_first_token_below_the_gate(model: Model) -> None:
    sequence, head = model.new_sequence(), head_of(model)
    features = captured(model, sequence, list(range(20)))
    rows = [head_rows(sequence, features, [*range(1, 20), 200], 0)]
    (whole,) = head.draft(rows, 8, 0.0)
    assert len(whole.tokens) == len(whole.confidences) == 8
    for gate in (min(whole.confidences) + 1e-6, max(whole.confidences) + 1e-6):
        kept = next((i for i, p in enumerate(whole.confidences) if p < gate), 8)
        (draft,) = head.draft(rows, 8, gate)
        assert draft.tokens == whole.tokens[:kept] and draft.confidences == whole.confidences[:kept]
        assert bool(draft.silence) == (kept == 0)
    assert head.draft(rows, 3, 0.0)[0].tokens == whole.tokens[:3]


def test_confidence_is_the_share_of_the_best_token_among_the_ten_best() -> None:
    logits = np.array([1.0, 3.0, 3.0, -2.0, *np.full(40, 0.5)], np.float32)
    token, confidence = best_token(logits)
    ten = np.array([3.0, 3.0, 1.0, *[0.5] * 7])
    assert token == 1 and confidence == pytest.approx(np.exp(3.0) / np.exp(ten).sum())
    token, confidence = best_token(np.array([0.0, 1.0], np.float32))
    assert token == 1 and confidence == pytest.approx(np.e / (1 + np.e))


# -- what it holds of a sequence ---------------------------------------------------------------------------------------


def test_catching_up_piece_by_piece_folded_or_at_once_drafts_the_same(model: Model) -> None:
    """Rows of earlier drafts, made from the head's own hidden rows, are overwritten by those of accepted tokens."""
    sequence, head, rng = model.new_sequence(), head_of(model), random.Random(4)
    text = rng.choices(range(256), k=61)
    features = captured(model, sequence, text[:-1])

    def draft(pieces: Sequence[int], drafts: bool) -> Draft:
        head.forget(sequence)
        start = 0
        for rows in pieces:
            part = head_rows(sequence, features[start : start + rows], text[start + 1 : start + rows + 1], start)
            (made,) = head.draft([part], 5 if drafts or start + rows == 60 else 0, 0.0)
            start += rows
        return made

    whole = draft([60], True)
    assert draft([20, 40], False) == whole and draft([1] * 60, False) == whole
    for pieces in ([4] * 15, [30, 1, 7, 2, 20]):
        other = draft(pieces, True)
        assert other.tokens == whole.tokens and np.abs(np.subtract(other.confidences, whole.confidences)).max() < 1e-5


@pytest.mark.parametrize("length", [50, 200])  # the longer one is read in several blocks of rows
def test_after_a_gap_it_goes_on_at_absolute_positions_with_nothing_from_before(model: Model, length: int) -> None:
    rng, reference, head = random.Random(5), Reference(SHAPE), head_of(model)
    text = rng.choices(range(256), k=length)
    hidden = [reference.step(token)[1] for token in text[:-1]]
    sequence = model.new_sequence()
    features = captured(model, sequence, text[:-1])
    head.draft([head_rows(sequence, features[:20], text[1:21], 0)], 3, 0.0)
    (draft,) = head.draft([head_rows(sequence, features[40:], text[41:], 40)], 3, 0.0)  # rows 20..39 never came
    for position in range(41, length):
        logits, row = reference.draft_step(text[position], hidden[position - 1], position)
    check_chain(draft, reference, logits, row, length)


def test_sequences_do_not_see_each_other_and_a_slot_begins_empty(model: Model) -> None:
    rng, head = random.Random(6), head_of(model)
    texts = [rng.choices(range(256), k=count) for count in (33, 140)]
    sequences = [model.new_sequence() for _ in texts]
    rows = []
    for sequence, text in zip(sequences, texts, strict=True):
        rows.append(head_rows(sequence, captured(model, sequence, text[:-1]), text[1:], 0))
    together = head.draft(rows, 4, 0.0)
    for each in (1, 0):
        head.forget(sequences[each])
        assert head.draft([rows[each]], 4, 0.0) == [together[each]]
    model.release(sequences[0])
    again = model.new_sequence()
    assert again.slot == 0
    features = captured(model, again, texts[1][:30])
    (draft,) = head.draft([head_rows(again, features[20:], texts[1][21:31], 20)], 4, 0.0)
    reference = Reference(SHAPE)
    hidden = [reference.step(token)[1] for token in texts[1][:30]]
    for position in range(21, 31):
        logits, row = reference.draft_step(texts[1][position], hidden[position - 1], position)
    check_chain(draft, reference, logits, row, 31)
    head.forget(sequences[0])  # late: the slot is another's by now
    (more,) = head.draft([head_rows(again, features[29:], texts[1][30:31], 29)], 4, 0.0)
    assert more.tokens == draft.tokens and np.abs(np.subtract(more.confidences, draft.confidences)).max() < 1e-5


def test_a_prompt_longer_than_a_chunk_and_a_context_that_ends(tmp_path: Path) -> None:
    rng = random.Random(7)
    with Model(write_qwen35(tmp_path / "m.gguf", SHAPE), n_ctx=1100, n_threads=1) as model:
        head, sequence = head_of(model), model.new_sequence()
        capacity = sequence.capacity
        text = rng.choices(range(256), k=capacity)
        features = np.concatenate([captured(model, sequence, text[i : i + 500]) for i in range(0, capacity - 1, 500)])
        sequence.truncate(0)
        for last in (capacity - 4, capacity - 1):  # position of `last`
            head.forget(sequence)
            captured(model, sequence, text[:1])
            (draft,) = head.draft([head_rows(sequence, features[:last], text[1 : last + 1], 0)], 9, 0.0)
            assert len(draft.tokens) == capacity - last
            sequence.truncate(0)


def test_rows_without_their_tokens_are_refused(model: Model) -> None:
    sequence, head = model.new_sequence(), head_of(model)
    features = captured(model, sequence, [1, 2, 3])
    with pytest.raises(UsageError, match="2 tokens with hidden rows"):
        head.draft([head_rows(sequence, features, [2, 3], 0)], 3, 0.0)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_head_is_loaded_when_it_is_asked_for_and_once(model: Model) -> None:
    assert "1 NextN" in model.draft_heads()
    name = "blk.4.nextn.eh_proj.weight"
    assert model.weights.get(name) is None
    head = head_of(model)
    assert model.draft_head() is head and head.nbytes > 0 and model.weights.get(name) is None


def test_a_file_without_a_head_has_none(tmp_path: Path) -> None:
    with Model(write_qwen35(tmp_path / "m.gguf", TinyQwen35()), n_ctx=256) as model:
        assert model.draft_head() is None
        options = SpeculationOptions(enabled=True, type="draft-head")
        refused = REGISTRY.create("draft-head", model, options, model.draft_head())
        assert isinstance(refused, Decline) and "carries no draft head" in refused.reason


def test_the_memory_plan_counts_the_head_of_a_file_that_has_one(tmp_path: Path) -> None:
    raw = {name: len(raw) for name, _, _, raw in tensors(SHAPE) if name.startswith("blk.4.")}
    block = TinyQwen35(nextn=1, seed=1)
    for shape, expected in ((block, sum(raw.values())), (TinyQwen35(nextn=2), None), (TinyQwen35(), None)):
        with Model(write_qwen35(tmp_path / "m.gguf", shape), n_ctx=700, n_seq=2, n_threads=1) as model:
            before = model.plan
            placed = plan(check(model.file, model.arch.tensors()), model.device)
            fitted = fit(model.arch, placed, before.free, 700, 2, "f16", "f16", model.file.tensors)
            if expected is None:
                assert fitted.head == 0 and "head" not in str(fitted)
                continue
            cache = head_of(model).nbytes  # no graph yet
            assert fitted.head == expected + cache
            parts = (fitted.mapped, fitted.copied, fitted.cache, fitted.scratch, fitted.snapshots, fitted.checkpoints)
            assert fitted.needed == sum(parts) + fitted.head
            assert f"head {fitted.head / 2**20:.1f}" in str(fitted)
            with pytest.raises(OutOfMemoryError, match="head"):
                fit(model.arch, placed, fitted.needed - 1, 700, 2, "f16", "f16", model.file.tensors)


@pytest.mark.parametrize("missing", ["blk.4.nextn.eh_proj.weight", "blk.4.nextn.hnorm.weight", "blk.4.attn_q.weight"])
def test_a_head_that_is_announced_and_lacks_a_tensor_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    found = [tensor for tensor in tensors(SHAPE) if tensor[0] != missing]
    with Model(write_gguf(tmp_path / "m.gguf", metadata(SHAPE), found), n_ctx=256) as model:
        assert model.plan.head == 0
        assert model.draft_head() is None and missing in (model.head_refusal or "") and missing in model.draft_heads()
        with pytest.raises(ModelFileError, match=rf"{missing} is missing.*announces a draft head"):
            model.draft_head(required=True)
        assert np.isfinite(step(model, model.new_sequence(), [1, 2, 3])).all(), "the trunk goes on"


def test_auto_declines_a_head_without_its_tensors_and_a_wish_for_it_is_an_error(tmp_path: Path) -> None:
    missing = "blk.4.nextn.eh_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", metadata(SHAPE), [t for t in tensors(SHAPE) if t[0] != missing])
    with LLM(path, n_ctx=256, n_threads=1) as llm:
        assert re.search(f"suffix, up to .* left out: .*{missing} is missing", llm.speculation_report())
        plain = llm.generate([1, 2, 3], temperature=0, max_tokens=8, speculation=None).tokens
        assert llm.generate([1, 2, 3], temperature=0, max_tokens=8).tokens == plain
        with pytest.raises(ModelFileError, match=rf"{missing} is missing.*announces a draft head"):
            llm.generate([1, 2, 3], max_tokens=8, speculation="draft-head")
        with pytest.raises(ModelFileError, match=missing):
            llm.update_speculation("draft-head")
        assert llm.generate([1, 2, 3], temperature=0, max_tokens=8).tokens == plain
    with pytest.raises(ModelFileError, match=missing):
        LLM(path, n_ctx=256, n_threads=1, speculation="draft-head")


def test_a_head_of_several_blocks_is_left_out_with_a_reason_and_the_trunk_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Model(write_qwen35(tmp_path / "m.gguf", TinyQwen35(nextn=2)), n_ctx=256) as model:
        assert model.draft_head() is None
        assert "nextn_predict_layers is 2" in caplog.text
        assert np.isfinite(step(model, model.new_sequence(), [1, 2, 3])).all()


def test_a_head_without_a_norm_of_its_own_takes_the_trunks(tmp_path: Path) -> None:
    own = f"blk.{SHAPE.layers}.nextn.shared_head_norm.weight"
    found = list(tensors(SHAPE))
    (norm,) = (tensor for tensor in found if tensor[0] == "output_norm.weight")
    drafts = []
    for number, kept in enumerate(
        (
            [t if t[0] != own else (own, *norm[1:]) for t in found],
            [t for t in found if t[0] != own],
        )
    ):
        with Model(write_gguf(tmp_path / f"{number}.gguf", metadata(SHAPE), kept), n_ctx=256, n_threads=1) as model:
            sequence = model.new_sequence()
            features = captured(model, sequence, [1, 2, 3, 4])
            drafts += head_of(model).draft([head_rows(sequence, features, [2, 3, 4, 5], 0)], 4, 0.0)
    assert drafts[0] == drafts[1]


# -- the loop ----------------------------------------------------------------------------------------------------------

# Tokens drafted and accepted by llama.cpp b11434 (`llama-server --spec-type draft-mtp`, F32 cache, no flash attention) in 48
# greedy tokens after the golden prompt: file -> [(window, gate, drafted, accepted)].
PEER = {
    "qwen35-mtp-accepting": [(1, 0.0, 23, 23), (3, 0.0, 35, 35), (7, 0.15, 41, 41)],
    "qwen35-moe-mtp": [(1, 0.0, 45, 1), (1, 0.15, 37, 1), (3, 0.0, 132, 1), (3, 0.15, 85, 1), (7, 0.15, 128, 1)],
    "qwen35-dense-mtp": [(1, 0.15, 40, 0), (3, 0.0, 135, 0), (3, 0.15, 96, 0), (7, 0.0, 301, 0), (7, 0.15, 156, 0)],
}


@pytest.mark.parametrize("name", PEER)
def test_as_many_tokens_are_drafted_and_accepted_as_by_another_engine(golden_dir: Path, name: str) -> None:
    path = golden_dir / "trunks" / f"{name}.gguf"
    with np.load(path.with_suffix(".npz")) as file:
        prompt, greedy = file["prompt"].tolist(), file["greedy"].tolist()
    with Model(path, n_ctx=100, n_threads=1, **F32_CACHE) as model:
        for window, gate, drafted, accepted in PEER[name]:
            sampler = RowSampler(SamplingParams(temperature=0, max_tokens=48), model.vocab_size, prompt=prompt)
            stats = run(model, prompt, sampler, window, gate)
            assert sampler.tokens == greedy
            assert (stats.drafted, stats.accepted) == (drafted, accepted), f"window {window}, gate {gate}"


def run(model: Model, prompt: list[int], sampler: RowSampler, window: int, gate: float) -> SpeculationStats:
    execution = SpeculativeExecution(
        model, head_speculator(model, gate), SpeculationOptions(enabled=True, draft=window)
    )
    sequence = model.new_sequence()
    request = execution.arm(sequence, sampler, remaining=47)
    rows = model.forward(Batch((sequence,), np.array([prompt], np.int32), execution.prefill_want(request)))
    request.last = sampler.sample(rows.logits(0, len(prompt) - 1), len(prompt))
    sequence.commit(len(prompt))
    execution.catch_up(request, rows, 0)
    while request.finished is None:
        list(execution.step([request]))
    execution.disarm(request)
    model.release(sequence)
    return execution.counters.snapshot()


def head_speculator(model: Model, gate: float | None = None) -> Speculator:
    options = SpeculationOptions(enabled=True, type="draft-head", pmin=gate)
    made = REGISTRY.create("draft-head", model, options, model.draft_head())
    assert isinstance(made, DraftHeadSpeculator)
    return made


@pytest.mark.parametrize("kind", ["draft-head", "ngram"])
@pytest.mark.parametrize("name", WITH_HEAD)
def test_the_stream_is_that_of_plain_decoding_at_every_window(name: str, kind: str) -> None:
    """Not one row is forwarded twice: the trunk's rows are the prompt, and one more than the drafts for each step."""
    with Model(GOLDEN / "trunks" / f"{name}.gguf", n_ctx=300, n_threads=1) as model:
        prompt = prompt_of(model, 30) * 2
        for params, windows in ((GREEDY, WINDOWS), (SEEDED, (3, 8))):
            expected = plain(model, prompt, params)
            for window in windows:
                options = SpeculationOptions(enabled=True, type=kind, draft=window)
                speculator = REGISTRY.create(kind, model, options, model.draft_head())
                assert isinstance(speculator, Speculator)
                (stream,), execution = speculate(model, [prompt], params, speculator, window)
                assert stream == expected, f"{kind}, window {window}"
                stats = execution.counters.snapshot()
                assert stats.dropped is None and stats.emitted == COUNT - 1
                assert kind == "ngram" or stats.drafted > 0
                assert "accepting" not in name or kind == "ngram" or stats.acceptance > 0.8


def test_no_row_is_forwarded_twice(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    with Model(golden_dir / "trunks" / "qwen35-dense-mtp.gguf", n_ctx=300, n_threads=1) as model:
        forward = model.forward

        def note(batch: Batch) -> object:
            rows.append(batch.tokens.size)
            return forward(batch)

        monkeypatch.setattr(model, "forward", note)
        prompt = prompt_of(model, 40)
        _, execution = speculate(model, [prompt], GREEDY, head_speculator(model, 0.0), 5)
        stats = execution.counters.snapshot()
    assert stats.accepted < stats.drafted and sum(rows) == len(prompt) + stats.steps + stats.drafted
    assert stats.again == 0


def test_requests_together_give_what_each_gives_alone(golden_dir: Path) -> None:
    with Model(golden_dir / "trunks" / "qwen35-mtp-accepting.gguf", n_ctx=300, n_seq=3, n_threads=1) as model:
        prompts = [prompt_of(model, length, length) for length in (30, 120, 4)]
        expected = [plain(model, prompt, SEEDED) for prompt in prompts]
        streams, execution = speculate(model, prompts, SEEDED, head_speculator(model), 4)
        assert streams == expected and execution.counters.snapshot().accepted > 20


def test_a_sequence_that_goes_on_from_a_prefix_drafts_after_its_first_step(golden_dir: Path) -> None:
    """Nobody captured the prefix's rows: the first step hands out one, and from there on the head drafts."""
    with Model(golden_dir / "trunks" / "qwen35-mtp-accepting.gguf", n_ctx=300, n_threads=1) as model:
        prompt = prompt_of(model, 60)
        expected = plain(model, prompt, GREEDY)
        sequence = model.new_sequence()
        execution = SpeculativeExecution(model, head_speculator(model), SpeculationOptions(enabled=True, draft=4))
        sampler = RowSampler(GREEDY, model.vocab_size, prompt=prompt)
        last = sampler.sample(step(model, sequence, prompt, want=Want("last"))[-1], len(prompt))
        request = execution.arm(sequence, sampler, last=last)
        while request.finished is None:
            list(execution.step([request]))
        stats = request.counters.snapshot()
        assert sampler.tokens == expected.tokens and stats.dropped is None
        assert dict(stats.silence_reasons) == {NO_ROW: 1} and stats.acceptance > 0.8
