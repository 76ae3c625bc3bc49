"""What a draw owes to the tokens before it: penalties on recent tokens, and the guard against endless loops."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tsgg.sampling.params import RepetitionGuard, SamplingParams


class Penalties:
    """Counts of the tokens in the penalty window (prompt and answer), applied to a row of logits.

    The formulas of llama.cpp, for every token in the window:
        logit = logit * repetition if logit <= 0 else logit / repetition
        logit -= count * frequency + presence
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._size = params.penalty_last_n  # tokens; -1: all
        recent = prompt if self._size < 0 else prompt[-self._size :]
        self._window: deque[int] = deque(recent if self._size > 0 else ())  # what will have to leave; unused for "all"
        self._counts: Counter[int] = Counter(recent)

    def push(self, token: int) -> None:
        """`token` was emitted: it enters the window, the oldest leaves."""
        self._counts[token] += 1
        if self._size < 0:
            return
        self._window.append(token)
        if len(self._window) > self._size:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change `logits` [vocab] f32 in place."""
        size = len(self._counts)
        ids = np.fromiter(self._counts.keys(), np.intp, size)
        counts = np.fromiter(self._counts.values(), np.float32, size)
        seen = logits[ids]
        seen = np.where(seen <= 0, seen * self._repetition, seen / self._repetition)
        logits[ids] = seen - (counts * self._frequency + self._presence)


class LoopWatch:
    """Says when the emitted tokens have ended in a loop (see RepetitionGuard), in O(max_cycle) per token."""

    def __init__(self, guard: RepetitionGuard) -> None:
        cycles = np.arange(1, guard.max_cycle + 1)
        # A run of n tokens with period p is n - p tokens in a row that equal the token p places before them.
        self._needed = np.maximum((guard.min_repeats - 1) * cycles, guard.min_tokens - cycles)
        self._equal = np.zeros(guard.max_cycle, np.int64)  # [cycle - 1]: such tokens in a row, up to now
        self._recent = np.full(guard.max_cycle, -1, np.int64)  # newest first: index p - 1 is p places before the next

    def push(self, token: int) -> bool:
        """`token` was emitted; True where it completes a loop."""
        self._equal += 1
        self._equal[self._recent != token] = 0
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        return bool((self._equal >= self._needed).any())
