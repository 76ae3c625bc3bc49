"""The Python API: generation, streaming, sampling inside verify windows, prefix reuse, bad input."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import TinyLlama, write_tiny
from tsgg import LLM, ContextFullError, SamplingParams, TsggError, UsageError
from tsgg.results import GenerationResult

WINDOWS = (1, 2, 3, 4, 7, 8, 15, 16)
PROMPT = "the hell the hell the hell the"
# A fixed window: what is drafted must not depend on how busy this machine is.
NGRAM: dict[str, object] = {"type": "ngram", "adaptive": False}
QUOTE = "Repeat: red, green, blue, red, green, blue, red, green, blue, red, green,"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny(tmp_path_factory.mktemp("llm") / "tiny.gguf", TinyLlama())
    with LLM(path, n_ctx=256, speculation=NGRAM) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, n_ctx=1024, speculation=NGRAM) as llm:
        yield llm


def ngram(window: int) -> dict[str, object]:
    return NGRAM | {"draft": window}


def same(a: GenerationResult, b: GenerationResult) -> None:
    assert a.tokens == b.tokens
    assert a.text == b.text
    assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
    assert a.logprobs == b.logprobs
    assert a.usage.completion_tokens == b.usage.completion_tokens


@pytest.mark.parametrize("window", WINDOWS)
def test_seeded_sampling_with_penalties_and_logprobs_is_the_same_for_every_window(tiny: LLM, window: int) -> None:
    params = SamplingParams(
        max_tokens=60, temperature=0.7, top_k=30, seed=11, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.05, logprobs=3, logit_bias={40: 1.0}, ignore_eos=True,
    )  # fmt: skip
    same(tiny.generate(PROMPT, params, speculation=ngram(window)), tiny.generate(PROMPT, params, speculation=None))


@pytest.mark.parametrize("window", WINDOWS)
def test_greedy_streams_are_the_same_for_every_window_and_drafts_are_accepted(smollm2: LLM, window: int) -> None:
    plain = smollm2.generate(QUOTE, max_tokens=40, temperature=0, speculation=None)
    fast = smollm2.generate(QUOTE, max_tokens=40, temperature=0, speculation=ngram(window))
    same(plain, fast)
    assert fast.speculation.accepted > 0
    assert plain.speculation.drafted == 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_stop_string_ends_the_answer_wherever_the_window_ends(smollm2: LLM, window: int) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, stop=("green, bl",))
    plain = smollm2.generate(QUOTE, params, speculation=None)
    fast = smollm2.generate(QUOTE, params, speculation=ngram(window))
    same(plain, fast)
    assert (plain.finish_reason, plain.stop_reason) == ("stop", "green, bl")
    assert "green, bl" not in plain.text


@pytest.mark.parametrize("window", WINDOWS)
def test_an_end_token_inside_an_accepted_window_ends_the_answer_and_the_memory(smollm2: LLM, window: int) -> None:
    prompt = smollm2.tokenize("<|im_start|>a b c d<|im_end|>\n<|im_start|>a b c d<|im_end|>\n<|im_start|>a b")
    blue = smollm2.tokenize(" d")[0]
    params = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=(blue,))
    plain = smollm2.generate(prompt, params, speculation=None)
    fast = smollm2.generate(prompt, params, speculation=ngram(window))
    same(plain, fast)
    engine = smollm2.engine
    held = engine.call(lambda: next(s.tokens for s in reversed(engine.cache.idle) if s.tokens[: len(prompt)] == prompt))
    assert held == (prompt + list(fast.tokens))[: len(held)]
    assert len(held) == len(prompt) + len(fast.tokens) - 1  # all but the last drawn token


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 13])
def test_max_tokens_is_exact_inside_a_window(smollm2: LLM, window: int, limit: int) -> None:
    fast = smollm2.generate(QUOTE, max_tokens=limit, temperature=0, speculation=ngram(window))
    same(fast, smollm2.generate(QUOTE, max_tokens=limit, temperature=0, speculation=None))
    assert (len(fast.tokens), fast.finish_reason) == (limit, "length")


@pytest.mark.parametrize("window", WINDOWS)
def test_the_contexts_end_inside_a_window_ends_the_answer(tiny: LLM, window: int) -> None:
    prompt = tiny.tokenize(PROMPT * 40)[:240]
    params = SamplingParams(temperature=0, ignore_eos=True)
    fast = tiny.generate(prompt, params, speculation=ngram(window))
    same(fast, tiny.generate(prompt, params, speculation=None))
    assert (len(fast.tokens), fast.finish_reason) == (256 - 240 + 1, "context")
    assert tiny.generate(prompt, params, max_tokens=17).finish_reason == "length"  # a tie


def test_chat_turns_compute_only_what_is_new_and_draft_from_the_first_step(smollm2: LLM, smollm2_path: Path) -> None:
    messages = [{"role": "user", "content": f"Say this again: {QUOTE}"}]
    fresh: list[tuple[int, ...]] = []
    reused: list[GenerationResult] = []
    for turn in range(3):
        answer = smollm2.chat(messages, temperature=0, max_tokens=24)
        reused.append(answer.generation)
        with LLM(smollm2_path, n_ctx=1024, speculation=None) as other:
            fresh.append(other.chat(messages, temperature=0, max_tokens=24).generation.tokens)
        if turn:
            held = reused[-2].usage.prompt_tokens + len(reused[-2].tokens) - 1
            assert reused[-1].usage.cached_tokens >= held - 1  # re-encoding the answer may merge its last token
            assert reused[-1].speculation.drafted > 0
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": "Once more, exactly."},
        ]
    assert [result.tokens for result in reused] == fresh


def test_the_same_prompt_again_is_cached_but_for_its_last_token(tiny: LLM) -> None:
    first = tiny.generate(PROMPT, max_tokens=8, temperature=0)
    again = tiny.generate(PROMPT, max_tokens=8, temperature=0)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert again.tokens == first.tokens


def test_a_stream_has_one_chunk_per_token_and_its_texts_are_the_answer(tiny: LLM) -> None:
    chunks = list(tiny.stream(PROMPT, max_tokens=30, temperature=0, logprobs=0))
    result = tiny.last
    assert result is not None
    assert tuple(chunk.token for chunk in chunks) == result.tokens
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == result.finish_reason
    assert all(chunk.logprob is not None and chunk.logprob.token == chunk.token for chunk in chunks)
    assert sum(chunk.from_draft for chunk in chunks) == result.speculation.accepted


def test_a_closed_stream_leaves_the_sequence_reusable(tiny: LLM) -> None:
    expected = tiny.generate(PROMPT, max_tokens=20, temperature=0, speculation=None).tokens
    stream = tiny.stream(PROMPT, max_tokens=20, temperature=0)
    taken = [next(stream) for _ in range(7)]
    stream.close()  # type: ignore[attr-defined]
    assert tiny.last is not None and tiny.last.finish_reason == "cancelled"
    assert tuple(chunk.token for chunk in taken) == expected[:7]
    assert tiny.generate(PROMPT, max_tokens=20, temperature=0).tokens == expected


def test_a_list_of_texts_gives_a_list_of_results(tiny: LLM) -> None:
    results = tiny.generate(["the", "hell"], max_tokens=4, temperature=0)
    assert [result.tokens for result in results] == [
        tiny.generate(text, max_tokens=4, temperature=0).tokens for text in ("the", "hell")
    ]


def test_calls_from_several_threads_run_side_by_side(tiny: LLM) -> None:
    expected = tiny.generate(PROMPT, max_tokens=20, temperature=0).tokens
    found: list[tuple[int, ...]] = []
    threads = [
        threading.Thread(target=lambda: found.append(tiny.generate(PROMPT, max_tokens=20, temperature=0).tokens))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_a_thread_that_streams_may_call_again_forget_and_hand_its_stream_to_another(tiny: LLM) -> None:
    expected = tiny.generate(PROMPT, max_tokens=20, temperature=0).tokens
    stream = tiny.stream(PROMPT, max_tokens=20, temperature=0)
    found = [next(stream).token]
    assert tiny.generate(PROMPT, max_tokens=20, temperature=0).tokens == expected
    tiny.forget()
    other = threading.Thread(target=lambda: found.extend(chunk.token for chunk in stream))
    other.start()
    other.join()
    assert tuple(found) == expected


def test_more_requests_than_slots_wait_for_their_turn(tmp_path: Path) -> None:
    with LLM(write_tiny(tmp_path / "tiny.gguf", TinyLlama()), n_ctx=256, n_seq=1, speculation=NGRAM) as llm:
        streams = [llm.stream(PROMPT, max_tokens=50, temperature=0, ignore_eos=True) for _ in range(3)]
        first = [next(stream).token for stream in streams]  # each pauses the one before: its reader is behind
        rest = [[chunk.token for chunk in stream] for stream in streams]
        assert len({(token, *more) for token, more in zip(first, rest, strict=True)}) == 1 and len(rest[0]) == 49


def test_a_model_that_is_closed_ends_its_streams_with_an_error(tmp_path: Path) -> None:
    llm = LLM(write_tiny(tmp_path / "tiny.gguf", TinyLlama()), n_ctx=256)
    stream = llm.stream(PROMPT, max_tokens=200, ignore_eos=True)
    next(stream)
    llm.close()
    with pytest.raises(TsggError, match="closed"):
        list(stream)
    with pytest.raises(TsggError, match="closed"):
        llm.generate(PROMPT)


def test_two_models_run_side_by_side(tiny: LLM, tmp_path: Path) -> None:
    expected = tiny.generate(PROMPT, max_tokens=10, temperature=0).tokens
    with LLM(write_tiny(tmp_path / "other.gguf", TinyLlama(layers=1)), n_ctx=256) as other:
        mine, theirs = (
            tiny.stream(PROMPT, max_tokens=10, temperature=0),
            other.stream(PROMPT, max_tokens=10, temperature=0),
        )
        pairs = list(zip(mine, theirs, strict=False))
    assert pairs and tuple(mine.token for mine, _ in pairs) == expected[: len(pairs)]


def test_an_idle_drafter_says_why(tiny: LLM) -> None:
    result = tiny.generate("abcdefg", max_tokens=2, temperature=0)
    assert result.speculation.drafted == 0
    assert "no drafts" in result.statistics() or "no speculation" in result.statistics()


BAD_INPUT = {
    "prompt longer than the context": (lambda llm: llm.generate([40] * 300), ContextFullError, "n_ctx"),
    "empty prompt": (lambda llm: llm.generate(""), UsageError, "empty"),
    "no tokens": (lambda llm: llm.generate([]), UsageError, "empty"),
    "token id out of range": (lambda llm: llm.generate([10**6]), UsageError, "token ids"),
    "negative token id": (lambda llm: llm.generate([-1]), UsageError, "token ids"),
    "prompt of another type": (lambda llm: llm.generate(3.5), UsageError, "prompt"),
    "window 0": (lambda llm: llm.generate("a", speculation=ngram(0)), UsageError, "1 to 64"),
    "window 65": (lambda llm: llm.generate("a", speculation=ngram(65)), UsageError, "1 to 64"),
    "unknown drafter": (lambda llm: llm.generate("a", speculation="magic"), UsageError, "ngram"),
    "unknown speculation option": (lambda llm: llm.generate("a", speculation={"windw": 3}), UsageError, "windw"),
    "unknown sampling parameter": (lambda llm: llm.generate("a", temprature=1), UsageError, "temprature"),
    "temperature below zero": (lambda llm: llm.generate("a", temperature=-1), UsageError, "temperature"),
    "penalty without a window": (
        lambda llm: llm.generate("a", presence_penalty=1, penalty_last_n=0), UsageError, "penalty_last_n"
    ),
    "bias outside the vocabulary": (lambda llm: llm.generate("a", logit_bias={10**6: 1}), UsageError, "vocabulary"),
    "text that is not Unicode": (lambda llm: llm.generate("\ud800"), UsageError, "surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_a_clear_error_and_the_model_goes_on(tiny: LLM, name: str) -> None:
    call, kind, words = BAD_INPUT[name]
    with pytest.raises(kind, match=words):
        call(tiny)
    assert tiny.generate(PROMPT, max_tokens=2, temperature=0).tokens


def test_chat_without_a_template_says_what_to_do(tiny: LLM) -> None:
    with pytest.raises(UsageError, match="generate"):
        tiny.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("path", ["missing.gguf", "."])
def test_a_missing_file_or_a_folder_is_a_clear_error(path: str) -> None:
    with pytest.raises(TsggError, match=r"no model|folder"):
        LLM(path)


def test_close_twice_and_repr(tmp_path: Path) -> None:
    llm = LLM(write_tiny(tmp_path / "tiny.gguf", TinyLlama(layers=1)))
    assert "tiny.gguf" in repr(llm) and "auto" in repr(llm)
    llm.close()
    llm.close()
