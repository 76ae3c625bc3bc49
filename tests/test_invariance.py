"""On the CPU what lies in a cell, and what a row gives, depends on the tokens before it only: not on how a prompt was cut into
forwards, nor on who shared them. Everything is compared with the same tokens decoded one at a time, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.test_exact_rows import CACHES, SHAPES, prefix
from tests.tiny_models import TinyLlama, write_tiny
from tests.trunk_steps import GOLDEN, PLAIN, Array, batch, decode, differing_cells, golden_trunks, same_bits, step
from tsgg.memory.kv import BLOCK_ROWS, MANY_ROWS
from tsgg.model import Model
from tsgg.sampling import SamplingParams

LENGTH = 330
# Sizes of the forwards that a text is read in; the last ones leave a block of one row, and cross borders of the KV buckets.
CHUNKS = (
    (LENGTH,),
    (BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, LENGTH - 3 * BLOCK_ROWS),
    (MANY_ROWS - 1, MANY_ROWS + 1, LENGTH - 2 * MANY_ROWS),
    (250, 2 * BLOCK_ROWS // 8, LENGTH - 250 - 2 * BLOCK_ROWS // 8),
    (1, 2 * BLOCK_ROWS + 1, LENGTH - 2 * BLOCK_ROWS - 2),
)


def check_chunks(model: Model) -> None:
    """Every way of `CHUNKS` to read a text leaves the cells, and gives the rows, of one-row decodes."""
    text = prefix(model.vocab_size, LENGTH + 1)
    alone, together = model.new_sequence(), model.new_sequence()
    rows = decode(model, alone, text[:LENGTH])
    for sizes in CHUNKS:
        assert sum(sizes) == LENGTH
        together.truncate(0)
        first = 0
        for size in sizes:
            found = step(model, together, text[first : first + size])
            wrong = [i for i in range(size) if not same_bits(found[i], rows[first + i])]
            assert not wrong, f"{sizes}: rows {[first + i for i in wrong][:5]} of {len(wrong)} wrong ones"
            first += size
        assert not differing_cells(model, together, alone), sizes
        following = [step(model, s, text[-1:], 0, PLAIN) for s in (together, alone)]
        assert same_bits(*following), sizes


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_the_size_of_prefill_chunks_does_not_matter_whatever_the_weights(tmp_path: Path, shape: TinyLlama) -> None:
    with Model(write_tiny(tmp_path / "m.gguf", shape), n_ctx=400, n_seq=2, n_threads=1) as model:
        check_chunks(model)


@pytest.mark.parametrize("types", CACHES, ids="/".join)
def test_the_size_of_prefill_chunks_does_not_matter_whatever_the_cache(tmp_path: Path, types: tuple[str, str]) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    with Model(path, n_ctx=400, n_seq=2, n_threads=1, cache_type_k=types[0], cache_type_v=types[1]) as model:
        check_chunks(model)


@pytest.mark.parametrize("name", golden_trunks())
def test_the_size_of_prefill_chunks_does_not_matter_on_any_architecture(name: str) -> None:
    with Model(GOLDEN / "trunks" / f"{name}.gguf", n_ctx=400, n_seq=2, n_threads=1) as model:
        check_chunks(model)


@pytest.mark.parametrize("count", [BLOCK_ROWS + 1, MANY_ROWS])
def test_a_prompt_read_beside_others_leaves_what_it_leaves_alone(tmp_path: Path, count: int) -> None:
    with Model(write_tiny(tmp_path / "m.gguf"), n_ctx=400, n_seq=4, n_threads=1) as model:
        sequences = [model.new_sequence() for _ in range(3)]
        texts = [prefix(model.vocab_size, before + count, before) for before in (0, 100, 7)]
        rows: list[Array] = []
        for sequence, text in zip(sequences, texts, strict=True):
            rows.append(decode(model, sequence, text)[-count:])
            sequence.truncate(len(text) - count)
        company = batch(model, sequences, [text[-count:] for text in texts])
        for found, expected in zip(company, rows, strict=True):
            assert same_bits(found, expected)


def test_the_same_seeded_request_gives_the_same_answer_when_a_part_of_its_prompt_is_cached(tmp_path: Path) -> None:
    from tsgg import LLM

    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=1, ignore_eos=True)
    with LLM(write_tiny(tmp_path / "m.gguf"), n_ctx=500, speculation=None) as llm:
        prompt = prefix(llm.model.vocab_size, 300)
        fresh = llm.generate(prompt, params)
        for shared in (0, 100, 170, 299):
            llm.generate([*prompt[:shared], (prompt[shared] + 1) % 50], params)  # leaves `shared` tokens, and others
            again = llm.generate(prompt, params)
            assert again.usage.cached_tokens >= shared - 1
            assert (again.tokens, again.logprobs) == (fresh.tokens, fresh.logprobs)


def test_the_same_seeded_request_gives_the_same_answer_on_a_real_model(smollm2_path: Path) -> None:
    from tsgg import LLM

    params = SamplingParams(temperature=0.9, seed=3, max_tokens=10, logprobs=1, ignore_eos=True)
    with LLM(smollm2_path, n_ctx=600) as llm:
        prompt = np.random.default_rng(1).integers(0, 40000, 150).tolist()
        answers = [llm.generate(prompt, params) for _ in range(3)]
        assert [answer.usage.cached_tokens for answer in answers] == [0, 149, 149]
        assert len({answer.tokens for answer in answers}) == len({answer.logprobs for answer in answers}) == 1
