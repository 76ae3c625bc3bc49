"""Gemma 4's assistant head against golden drafts and float64; it reads the trunk's caches and leaves them alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gguf_writer import write_gguf
from tests.lone_loop import Answer
from tests.lone_loop import generate as answer
from tests.numpy_gemma4 import Array, Assistant, Gemma4, read_tensors, stored
from tests.test_gemma3 import SAMPLED
from tests.trunk_steps import same_bits, step
from tsgg.assistant import AssistantHead
from tsgg.candidates import best_token
from tsgg.errors import ModelFileError, TsggError, UnsupportedError, UsageError
from tsgg.gguf import GGML_TYPES, read_gguf
from tsgg.memory import Sequence
from tsgg.model import Model
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.speculative import REGISTRY, SpeculationOptions, SpeculativeExecution
from tsgg.speculative.protocol import Batch, HeadRows, Want
from tsgg.windows import preferred_window

NAMES = ("dense", "e")
RING = 768  # cells of a window layer's slot
UNSEEN = Want("none")


@dataclass
class Pair:
    model: Model
    head: AssistantHead
    target_path: Path
    head_path: Path
    golden: dict[str, NDArray[Any]]


def open_head(path: Path, model: Model) -> AssistantHead:
    backends = model._forward.backends
    return AssistantHead(
        read_gguf(path), model.arch, model.weights, model.memory, model.device, backends, model.vocab_size
    )


def load(path: Path, **more: Any) -> Model:
    """One thread, F32 caches."""
    return Model(path, device="cpu", n_threads=1, cache_type_k="f32", cache_type_v="f32", **more)


@pytest.fixture(scope="module", params=NAMES)
def pair(golden_dir: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    target = golden_dir / "trunks" / f"gemma4-{request.param}.gguf"
    path = golden_dir / "heads" / f"gemma4-assistant-{request.param}.gguf"
    with load(target, n_ctx=1700, n_seq=2) as model:
        head = open_head(path, model)
        yield Pair(model, head, target, path, dict(np.load(path.with_suffix(".npz"))))
        head.close()


def _take(pair: Pair) -> Iterator[Sequence]:
    sequence = pair.model.new_sequence()
    yield sequence
    pair.model.release(sequence)


@pytest.fixture
def sequence(pair: Pair) -> Iterator[Sequence]:
    yield from _take(pair)


@pytest.fixture
def verified(pair: Pair) -> Iterator[Sequence]:
    yield from _take(pair)


def read(model: Model, sequence: Sequence, tokens: list[int], kept: int | None = None) -> Array:
    """Forwards tokens and keeps `kept` of them: hidden rows of all [tokens, embedding]."""
    rows = model.forward(Batch((sequence,), np.array([tokens], np.int32), Want("all", "all")))
    hidden = np.array(rows.hidden(0))
    sequence.commit(len(tokens) if kept is None else kept)
    return hidden


def random_tokens(count: int, seed: int = 3) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(20, 300, count)]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_four_chained_drafts_are_the_golden_ones(pair: Pair, sequence: Sequence) -> None:
    prompt = pair.golden["prompt"].tolist()
    hidden = read(pair.model, sequence, prompt)
    tokens = np.array([*prompt[1:], int(pair.golden["last_token"])], np.int32)
    (draft,) = pair.head.draft([HeadRows(sequence, hidden, tokens, 0)], 4, 0.0)
    assert list(draft.tokens) == pair.golden["drafts"].tolist()
    assert all(0.1 <= confidence <= 1 for confidence in draft.confidences)  # best of ten


def test_every_golden_step_agrees_in_logits_and_next_hidden_row(pair: Pair, sequence: Sequence) -> None:
    """Each step from the golden row before it: attention without a scale multiplies what is left over by ten a step."""
    golden = pair.golden
    read(pair.model, sequence, golden["prompt"].tolist())
    tokens = [int(golden["last_token"]), *golden["drafts"].tolist()]
    rows = [golden["target_last_hidden"], *golden["step_hidden"]]
    for i in range(4):
        logits, hidden = pair.head.run(sequence.slot, tokens[i], rows[i], sequence.length)
        assert np.abs(logits - golden["step_logits"][i]).max() < 0.01  # of a standard deviation of 0.27
        assert np.abs(hidden - golden["step_hidden"][i]).max() < 0.03  # of 0.9


@pytest.mark.parametrize("context", [1, 3, 40, RING - 1, RING + 5])
def test_steps_agree_with_float64_at_every_length(pair: Pair, sequence: Sequence, context: int) -> None:
    target = Gemma4(read_gguf(pair.target_path).metadata, read_tensors(pair.target_path))
    assistant = Assistant(read_gguf(pair.head_path).metadata, read_tensors(pair.head_path))
    tokens = random_tokens(context)
    for start in range(0, context, 300):
        step(pair.model, sequence, tokens[start : start + 300], want=UNSEEN)
    target.hidden(tokens)
    errors = []
    for seed in range(8):
        row = np.random.default_rng(seed).standard_normal(64)
        expected = assistant.step(target, 30 + seed, row)
        ours = pair.head.run(sequence.slot, 30 + seed, np.asarray(row, np.float32), context)
        errors += [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(ours, expected, strict=True)]
    assert float(np.median(errors)) < 1e-2 and max(errors) < 5e-2, errors


# -- it keeps nothing, and leaves the trunk alone ----------------------------------------------------------------------


@pytest.mark.parametrize("context", [5, RING - 3, 2 * RING - 2])
def test_rejected_rows_are_never_seen_and_drafting_changes_no_cell(
    pair: Pair, sequence: Sequence, verified: Sequence, context: int
) -> None:
    model, tokens = pair.model, random_tokens(context + 12)
    for each in (sequence, verified):
        for start in range(0, context, 300):
            step(model, each, tokens[start : min(start + 300, context)], want=UNSEEN)
    row = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    expected = [array.copy() for array in pair.head.run(sequence.slot, 40, row, context)]
    read(model, verified, tokens[context : context + 8], kept=0)  # a verify of which nothing is kept
    ours = pair.head.run(verified.slot, 40, row, context)
    assert all(same_bits(a, b) for a, b in zip(ours, expected, strict=True))
    assert same_bits(*(step(model, each, tokens[context:]) for each in (sequence, verified)))


def test_only_the_last_row_matters_so_a_gap_does_not_exist(pair: Pair, sequence: Sequence) -> None:
    tokens = random_tokens(30)
    hidden = read(pair.model, sequence, tokens[:-1])
    following = np.array(tokens[1:], np.int32)
    whole = pair.head.draft([HeadRows(sequence, hidden, following, 0)], 5, 0.0)
    last = pair.head.draft([HeadRows(sequence, hidden[-1:], following[-1:], 28)], 5, 0.0)
    assert last == whole and len(whole[0].tokens) == 5
    assert pair.head.draft([HeadRows(sequence, hidden, following, 0)], 0, 0.0)[0].tokens == ()
    unsure = pair.head.draft([HeadRows(sequence, hidden, following, 0)], 5, 0.99)[0]
    assert unsure.tokens == () and unsure.silence


# -- speculation changes nothing ---------------------------------------------------------------------------------------


def generate(
    model: Model, head: AssistantHead | None, prompt: list[int], how: str, window: int | None = None
) -> Answer:
    bias = dict.fromkeys((31, 32, 33, 34), 6.0)  # a stream of four tokens, of which the head below guesses
    options = SpeculationOptions.parse({"type": "draft-head", "pmin": 0.0, "draft": window} if head else "off")
    speculator = REGISTRY.create("draft-head", model, options, head) if head else None
    sampler = RowSampler(SamplingParams.parse(max_tokens=90, logit_bias=bias, **SAMPLED[how]), 300, prompt=prompt)
    sequence = model.new_sequence()
    given = answer(model, SpeculativeExecution(model, speculator, options), sequence, sampler, prompt)
    model.release(sequence)
    assert len(given.tokens) == 90
    return given


@pytest.fixture
def guessing(pair: Pair, tmp_path: Path) -> Path:
    """A head that drafts the tokens that `generate` favours."""
    weights = read_tensors(pair.head_path)
    weights["token_embd.weight"][31:35] *= 20
    return write_gguf(tmp_path / "head.gguf", read_gguf(pair.head_path).metadata, stored(weights))


@pytest.mark.parametrize("how", SAMPLED)
def test_the_stream_is_the_plain_one_past_the_ring(pair: Pair, guessing: Path, how: str) -> None:
    head, prompt = open_head(guessing, pair.model), random_tokens(720)
    plain, drafted = (generate(pair.model, given, prompt, how) for given in (None, head))
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.speculation.accepted < drafted.speculation.drafted
    head.close()


@pytest.mark.parametrize("how", SAMPLED)
def test_a_draft_model_of_a_model_changes_no_stream_at_any_window(pair: Pair, guessing: Path, how: str) -> None:
    """The drafter as the operator gives it: a path, opened by the model and freed with it."""
    prompt = random_tokens(30)
    with load(pair.target_path, n_ctx=256) as model:
        head = model.draft_model(guessing)
        assert model.draft_model(str(guessing)) is head  # one file, one head
        plain = generate(model, None, prompt, how)
        for window in (1, 2, 3, 4, 7, 8):
            drafted = generate(model, head, prompt, how, window)
            assert drafted.tokens == plain.tokens, window
            assert 0 < drafted.speculation.accepted < drafted.speculation.drafted, window
    with pytest.raises(UsageError, match="closed"):
        model.draft_model(guessing)


def test_a_draft_model_that_is_not_there_is_named(pair: Pair, tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", "nul\0.gguf"):
        with pytest.raises(ModelFileError, match="cannot be read"):
            pair.model.draft_model(path)


# -- files that do not fit ---------------------------------------------------------------------------------------------


def test_a_drafter_of_another_target_is_refused_with_the_fields_that_disagree(golden_dir: Path) -> None:
    with load(golden_dir / "trunks" / "gemma4-e.gguf") as model, pytest.raises(UsageError) as refused:
        open_head(golden_dir / "heads" / "gemma4-assistant-dense.gguf", model)
    assert "attention.head_count_kv 4 (the target has 2)" in str(refused.value)
    assert "key_length" not in str(refused.value)
    with load(golden_dir / "trunks" / "gemma3.gguf") as model, pytest.raises(UsageError, match="gemma3 of 7 layers"):
        open_head(golden_dir / "heads" / "gemma4-assistant-dense.gguf", model)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("attention.sliding_window", 5, UsageError, "attention.sliding_window 5 .the target has 4"),
        ("attention.sliding_window", 1, ModelFileError, "sliding_window is 1"),
        ("embedding_length_out", 48, UsageError, "embedding_length_out 48 .the target has 64"),
        ("nextn_predict_layers", 3, ModelFileError, "nextn_predict_layers is 3, expected all 4"),
        ("block_count", None, ModelFileError, "block_count"),
        ("attention.value_length", 32, UsageError, "attention.value_length 32 .the target has 64"),
    ],
)
def test_a_key_that_does_not_fit_is_named(
    key: str, value: object, error: type[TsggError], message: str, pair: Pair, tmp_path: Path
) -> None:
    metadata = dict(read_gguf(pair.head_path).metadata) | {f"gemma4-assistant.{key}": value}
    metadata = {name: entry for name, entry in metadata.items() if entry is not None}
    path = write_gguf(tmp_path / "head.gguf", metadata, stored(read_tensors(pair.head_path)))
    with pytest.raises(error, match=message):
        open_head(path, pair.model)


def test_another_vocabulary_a_missing_tensor_and_another_architecture_are_refused(pair: Pair, tmp_path: Path) -> None:
    metadata, weights = read_gguf(pair.head_path).metadata, read_tensors(pair.head_path)
    short = weights | {"token_embd.weight": weights["token_embd.weight"][:-1]}
    with pytest.raises(UsageError, match=r"rows of token_embd.weight 299 \(the target has 300\)"):
        open_head(write_gguf(tmp_path / "short.gguf", metadata, stored(short)), pair.model)
    del weights["blk.1.layer_output_scale.weight"]
    with pytest.raises(ModelFileError, match=r"blk.1.layer_output_scale.weight is missing"):
        open_head(write_gguf(tmp_path / "less.gguf", metadata, stored(weights)), pair.model)
    with pytest.raises(UnsupportedError, match="is a gemma4, expected a drafter"):
        open_head(pair.target_path, pair.model)


def test_a_clustered_head_is_loaded_and_its_clusters_are_left_alone(pair: Pair, tmp_path: Path) -> None:
    """Real E2B and E4B drafters carry them; the whole table in vocabulary order says all that they say."""
    weights = read_tensors(pair.head_path)
    clusters = {
        "masked_embd_centroids.weight": np.zeros((16, 32), np.float32),
        "masked_embd_ordering": np.zeros(300, np.float32),
    }
    path = write_gguf(tmp_path / "m.gguf", read_gguf(pair.head_path).metadata, stored(weights | clusters))
    head, row = open_head(path, pair.model), np.random.default_rng(2).standard_normal(64).astype(np.float32)
    assert head.weight_bytes == pair.head.weight_bytes
    expected = [array.copy() for array in pair.head.run(0, 40, row, 1)]
    assert all(same_bits(a, b) for a, b in zip(head.run(0, 40, row, 1), expected, strict=True))
    head.close()


@pytest.mark.parametrize(
    ("older", "tensor"), [("gemma4_assistant", "mtp.pre_projection"), ("gemma4_mtp", "mtp_pre_proj")]
)
def test_an_older_dialect_is_refused_by_name(pair: Pair, tmp_path: Path, older: str, tensor: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": older, f"{older}.block_count": 4})
    with pytest.raises(
        UnsupportedError, match=rf"is a {older}, an older dialect .* {tensor}.*convert the drafter again"
    ):
        pair.model.draft_model(path)


# -- the window that a trunk prefers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "types", "wish", "expected"),
    [
        ("CUDA0", "Q4_0", None, 7),
        ("CUDA0", "Q4_0", 3, 3),  # an architecture with a recurrent state
        ("CUDA0", "BF16", None, None),
        ("ROCm0", "BF16", None, 7),
        ("Vulkan0", "IQ4_XS", None, 7),
        ("Metal", "Q4_K", None, 7),
        ("Metal", "IQ4_XS", None, 3),
        ("MTL0", "IQ4_XS", 2, 2),
        ("CPU", "IQ4_XS", None, None),
        ("CPU", "Q8_0", 3, 3),
    ],
)
def test_windows_end_where_the_kernels_for_few_rows_end(
    device: str, types: str, wish: int | None, expected: int | None
) -> None:
    """reference/ggml.md, section 4. A type that holds a tenth of the bytes or less (here IQ3_S) changes nothing."""
    kinds = {info.name.upper(): number for number, info in GGML_TYPES.items()}
    assert preferred_window(wish, device, {kinds[types]: 95, kinds["IQ3_S"]: 5}) == expected


def test_gemma4_on_the_cpu_leaves_the_window_to_what_its_rows_cost(pair: Pair) -> None:
    assert pair.model.preferred_draft_window is None


# -- confidence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 9, 10, 63, 64, 300, 640, 704, 5003])
@pytest.mark.parametrize("kind", ["spread", "sorted", "equal", "few levels", "masked"])
def test_the_confidence_is_the_probability_among_the_ten_best(vocab: int, kind: str) -> None:
    rng = np.random.default_rng(vocab)
    row = {
        "spread": rng.standard_normal(vocab) * 3,
        "sorted": np.linspace(-4, 4, vocab),
        "equal": np.zeros(vocab),
        "few levels": rng.integers(0, 3, vocab),
        "masked": np.where(np.arange(vocab) == vocab // 2, 1.0, -np.inf),
    }[kind].astype(np.float32)
    best = np.sort(row)[::-1][:10].astype(np.float64)
    token, confidence = best_token(row)
    assert token == int(np.flatnonzero(row == row.max())[0])
    assert confidence == pytest.approx(1 / np.exp(best - best[0]).sum(), rel=1e-6)
