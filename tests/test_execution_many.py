"""Many requests in one step, and any history of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted import (
    VOCAB,
    ScriptedDrafter,
    ScriptedSampler,
    ScriptedTrunk,
    mixed,
    plain_stream,
    right,
)
from tests.scripted_loop import GUESSES, PROMPT, Windows, assert_memory, begin, finish, options
from tsgg.speculative import (
    Draft,
    DraftContext,
    SpeculativeExecution,
    Step,
    Want,
)
from tsgg.speculative.execution import PLAIN


def test_one_step_of_many_requests_is_one_proposal_and_one_forward_per_row_count() -> None:
    def by_length(prefix: list[int], window: int) -> list[int]:
        return right(prefix, len(prefix) % 3)

    trunk, calls = ScriptedTrunk(), list[int]()

    class Counting(ScriptedDrafter):
        def propose(self, contexts: list[DraftContext]) -> list[Draft]:
            calls.append(len(contexts))
            return super().propose(contexts)

    drafter = Counting(by_length)
    execution = SpeculativeExecution(trunk, drafter, options(8))
    prompts = [PROMPT[:n] for n in (5, 8, 6, 9, 7, 10)]  # neighbours draft equally many tokens
    begun = [begin(execution, prompt, 30, slot=i) for i, prompt in enumerate(prompts)]
    before = len(trunk.forwards)
    steps = list(execution.step([request for request, _, _ in begun]))
    assert calls == [6]
    assert sorted(trunk.forwards[before:], key=lambda f: f[1]) == [
        (2, 1, PLAIN),
        (2, 2, Want(logits="all")),
        (2, 3, Want(logits="all")),
    ]
    assert {step.request.key for step in steps} == {request.key for request, _, _ in begun}
    finish(execution, *(request for request, _, _ in begun))
    for prompt, (request, sequence, sampler) in zip(prompts, begun, strict=True):
        assert sampler.tokens == plain_stream(prompt, 30)
        assert_memory(sequence, prompt, sampler.tokens)
        assert drafter.corpus[request.key] == sequence.tokens


def test_requests_that_the_trunk_does_not_take_in_one_forward_get_one_per_batch_that_it_names() -> None:
    trunk = ScriptedTrunk()  # asserts that the slots of a forward are neighbours, in order
    drafter = ScriptedDrafter(mixed)
    execution = SpeculativeExecution(trunk, drafter, options(3))
    slots = (4, 0, 2, 1, 9, 5)
    begun = [begin(execution, [slot, *PROMPT], 30, slot=slot) for slot in slots]
    trunk.forwards.clear()
    execution.policy = Windows([0])
    steps = list(execution.step([request for request, _, _ in begun]))
    assert sorted(trunk.forwards, key=lambda f: f[0]) == [(1, 1, PLAIN), (2, 1, PLAIN), (3, 1, PLAIN)]
    assert all(step.sample.sequences == 6 for step in steps if step.sample), "what the window policy was told"
    execution.policy = Windows([3])
    finish(execution, *(request for request, _, _ in begun))
    for slot, (request, sequence, sampler) in zip(slots, begun, strict=True):
        assert sampler.tokens == plain_stream([slot, *PROMPT], 30)
        assert_memory(sequence, [slot, *PROMPT], sampler.tokens)
        assert drafter.corpus[request.key] == sequence.tokens


def test_among_many_requests_only_the_one_whose_draft_raises_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    def fails_for_the_short(prefix: list[int], window: int) -> list[int]:
        if prefix[:7] == [*PROMPT[:6], 0]:
            raise RuntimeError("cannot stand this prompt")
        return right(prefix, window)

    execution = SpeculativeExecution(ScriptedTrunk(), ScriptedDrafter(fails_for_the_short), options(4))
    prompts = [PROMPT, [*PROMPT[:6], 0, 5], PROMPT[::-1]]
    begun = [begin(execution, prompt, 25, slot=i) for i, prompt in enumerate(prompts)]
    finish(execution, *(request for request, _, _ in begun))
    assert [sampler.tokens for _, _, sampler in begun] == [plain_stream(prompt, 25) for prompt in prompts]
    assert [request.armed for request, _, _ in begun] == [True, False, True]
    assert len(caplog.records) == 1
    assert execution.counters.snapshot().emitted == 24 * 3


def test_a_forward_that_raises_leaves_its_sequences_and_all_others_whole() -> None:
    trunk = ScriptedTrunk()
    drafter = ScriptedDrafter(lambda prefix, window: right(prefix, window if prefix[0] == 3 else 1))
    execution = SpeculativeExecution(trunk, drafter, options(4))
    prompts = [PROMPT, PROMPT[::-1], [*PROMPT[::-1], 7]]
    begun = [begin(execution, prompt, 30, slot=i) for i, prompt in enumerate(prompts)]
    requests = [request for request, _, _ in begun]
    trunk.fails = lambda batch: batch.tokens.shape[1] == 2
    done: list[Step] = []
    with pytest.raises(RuntimeError, match="refused"):
        for step in execution.step(requests):
            done.append(step)
    assert [step.request for step in done] == requests[:1]
    trunk.fails = lambda batch: False
    finish(execution, *requests)
    for prompt, (request, sequence, sampler) in zip(prompts, begun, strict=True):
        assert sampler.tokens == plain_stream(prompt, 30)
        assert_memory(sequence, prompt, sampler.tokens)
        assert drafter.corpus[request.key] == sequence.tokens


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_sampler_that_raises_takes_no_token_from_the_other_requests_of_its_forward(culprit: int) -> None:
    drafter = ScriptedDrafter(right)
    execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(4))
    prompts = [PROMPT, PROMPT[::-1], [*PROMPT[::-1], 7]]
    begun = [begin(execution, prompt, 30, slot=i) for i, prompt in enumerate(prompts)]
    request, sequence, _ = begun[culprit]

    class Broken(ScriptedSampler):
        def sample(self, logits: np.ndarray, position: int) -> int:
            raise RuntimeError("sampler broke")

    request.sampler = Broken(prompts[culprit], 30)
    streams: dict[int, list[int]] = {request.key: [] for request, _, _ in begun}
    with pytest.raises(RuntimeError, match="sampler broke"):
        for step in execution.step([request for request, _, _ in begun]):
            streams[step.request.key] += step.tokens
    assert sequence.tokens == prompts[culprit]
    del begun[culprit], prompts[culprit]
    for step in finish(execution, *(request for request, _, _ in begun)):
        streams[step.request.key] += step.tokens
    for prompt, (request, sequence, sampler) in zip(prompts, begun, strict=True):
        assert streams[request.key] == plain_stream(prompt, 30)[1:]
        assert_memory(sequence, prompt, sampler.tokens)
        assert drafter.corpus[request.key] == sequence.tokens


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_history_of_windows_drafts_arrivals_and_departures_keeps_every_stream_and_corpus_exact(
    data: st.DataObject,
) -> None:
    windows = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6), label="windows")
    guesses = data.draw(st.lists(st.sampled_from(GUESSES), min_size=4, max_size=4), label="guesses")
    slots = data.draw(st.permutations(range(5)), label="slots")

    def by_prompt(prefix: list[int], window: int) -> Iterable[object]:
        return guesses[prefix[0]](prefix, window)

    drafter = ScriptedDrafter(by_prompt)
    execution = SpeculativeExecution(ScriptedTrunk(), drafter, options(9), Windows(windows))
    begun = []
    for arrival in range(4):
        prompt = [arrival, *data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=9), label="prompt")]
        limit, seed = data.draw(st.integers(2, 25)), data.draw(st.sampled_from([None, 1, 2]))
        stops = tuple(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=1)))
        begun.append((prompt, limit, stops, seed, *begin(execution, prompt, limit, stops, seed, slots[arrival])))
        for _ in range(data.draw(st.integers(0, 4), label="steps")):
            list(execution.step([entry[4] for entry in begun]))
    finish(execution, *(entry[4] for entry in begun))
    for prompt, limit, stops, seed, request, sequence, sampler in begun:
        assert sampler.tokens == plain_stream(prompt, limit, stops, seed)
        assert_memory(sequence, prompt, sampler.tokens)
        if request.armed:
            assert drafter.corpus[request.key] == sequence.tokens
