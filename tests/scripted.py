"""A trunk whose every row is a known function of its prefix, with a real one's memory semantics; samplers; drafters.

The function (`ScriptedTrunk.truth`) is computed from a list of tokens, without any memory; what the trunk hands back
comes from the state that its memory holds. So a row that saw a wrong prefix, or a commit of the wrong rows, shows as
other logits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tsgg.errors import ContextFullError
from tsgg.speculative import Batch, CommittedRows, Draft, DraftContext, Sequence, Speculator, Want

VOCAB = 13
FEATURES = 4
_START = 0x9E3779B97F4A7C15


def mix(state: int, token: int) -> int:
    """State after one more token: 64 bits that depend on every token before."""
    z = (state ^ (token + 1)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 29)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF


def fold(tokens: Iterable[int]) -> int:
    state = _START
    for token in tokens:
        state = mix(state, token)
    return state


def logits_of(state: int, token: int) -> np.ndarray:
    """`[VOCAB]` f32. Mostly ruled by the last token, so that text repeats; one state in five by the whole prefix."""
    return _random_row(state if state % 5 == 0 else token)


@functools.lru_cache(maxsize=10_000)
def _random_row(seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
    row.setflags(write=False)
    return row


def features_of(state: int, position: int, layer: int = 0) -> np.ndarray:
    """`[FEATURES]` f32 that name the prefix and the layer."""
    return np.array([position, state % 65521, state % 8191, layer], np.float32)


class ScriptedSequence:
    """Memory of one sequence: the state after every committed token."""

    def __init__(self, slot: int = 0) -> None:
        self.slot = slot
        self.tokens: list[int] = []
        self.states = [_START]
        self.pending: list[tuple[int, int]] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def commit(self, kept: int) -> int:
        assert 1 <= kept <= len(self.pending), f"{kept} rows kept of {len(self.pending)}"
        for token, state in self.pending[:kept]:
            self.tokens.append(token)
            self.states.append(state)
        self.pending = []
        return 0

    def truncate(self, n: int) -> int:
        del self.tokens[n:], self.states[n + 1 :]
        self.pending = []
        return self.length


def slot_of(sequence: Sequence) -> int:
    assert isinstance(sequence, ScriptedSequence)
    return sequence.slot


class ScriptedRows:
    """Raises when it is read after the next forward, or for what the forward was not asked to hand back."""

    def __init__(self, trunk: ScriptedTrunk, batch: Batch, states: list[list[int]]) -> None:
        self.trunk, self.batch, self.states, self.forward = trunk, batch, states, len(trunk.forwards)
        self.starts = [sequence.length for sequence in batch.sequences]

    def logits(self, sequence: int, row: int) -> np.ndarray:
        self._alive()
        rows = self.batch.tokens.shape[1]
        assert self.batch.want.logits == "all" or (self.batch.want.logits == "last" and row == rows - 1)
        return logits_of(self.states[sequence][row], int(self.batch.tokens[sequence, row]))

    def hidden(self, sequence: int) -> np.ndarray:
        self._alive()
        assert self.batch.want.hidden != "none"
        rows = self._features(sequence, 0)
        return rows if self.batch.want.hidden == "all" else rows[-1:]

    def tap(self, layer: int, sequence: int) -> np.ndarray:
        self._alive()
        assert layer in self.batch.want.taps
        return self._features(sequence, layer)

    def _features(self, sequence: int, layer: int) -> np.ndarray:
        start = self.starts[sequence]
        return np.stack([features_of(state, start + i, layer) for i, state in enumerate(self.states[sequence])])

    def _alive(self) -> None:
        assert len(self.trunk.forwards) == self.forward, "rows read after the trunk's next forward"


class ScriptedTrunk:
    """`tsgg.speculative.Trunk` over `truth`."""

    vocab_size = VOCAB
    feature_size = FEATURES
    speculation_profitable = True

    def __init__(self, context: int = 1000, preferred: int | None = None, refusal: str | None = None) -> None:
        self.context = context
        self.preferred_draft_window = preferred
        self.speculation_refusal = refusal
        self.forwards: list[tuple[int, int, Want]] = []  # sequences, rows, want
        self.fails: Callable[[Batch], bool] = lambda batch: False

    @staticmethod
    def truth(prefix: list[int]) -> np.ndarray:
        """The logits behind a prefix, without any memory."""
        return logits_of(fold(prefix), prefix[-1])

    def forward(self, batch: Batch) -> ScriptedRows:
        sequences, rows = batch.tokens.shape
        slots = [slot_of(sequence) for sequence in batch.sequences]
        assert slots == list(range(slots[0], slots[0] + sequences)), "a forward takes neighbouring slots, in order"
        assert batch.tokens.dtype == np.int32 and ((batch.tokens >= 0) & (batch.tokens < VOCAB)).all()
        self.forwards.append((sequences, rows, batch.want))
        if self.fails(batch):
            raise RuntimeError("the device refused")
        states = []
        for sequence, tokens in zip(batch.sequences, batch.tokens.tolist(), strict=True):
            assert isinstance(sequence, ScriptedSequence)
            if sequence.length + rows > self.context:
                raise ContextFullError(f"{rows} rows behind {sequence.length} in a context of {self.context}")
            state, sequence.pending = sequence.states[-1], []
            for token in tokens:
                state = mix(state, token)
                sequence.pending.append((token, state))
            states.append([state for _, state in sequence.pending])
        return ScriptedRows(self, batch, states)

    def batches(self, sequences: list[Sequence]) -> list[list[int]]:
        place = {slot_of(sequence): i for i, sequence in enumerate(sequences)}
        assert len(place) == len(sequences), "two requests in one slot"
        starts = [slot for slot in sorted(place) if slot - 1 not in place]
        return [[place[s] for s in itertools.takewhile(place.__contains__, itertools.count(start))] for start in starts]

    def context_left(self, sequence: Sequence) -> int:
        return self.context - sequence.length


class ScriptedSampler:
    """Greedy (seed None) or drawn by a generator that depends on (seed, position) only.

    Checks at every draw that the logits are the truth behind the prompt and what was drawn so far, and the position.
    """

    def __init__(self, prompt: list[int], limit: int, stops: tuple[int, ...] = (), seed: int | None = None) -> None:
        self.prompt, self.limit, self.stops, self.seed = prompt, limit, stops, seed
        self.tokens: list[int] = []
        self.finished: str | None = None

    def sample(self, logits: np.ndarray, position: int) -> int:
        assert self.finished is None, "drawn past a stop"
        assert position == len(self.prompt) + len(self.tokens)
        np.testing.assert_array_equal(logits, ScriptedTrunk.truth(self.prompt + self.tokens))
        noise: np.ndarray | float = 0.0
        if self.seed is not None:
            noise = 0.7 * np.random.default_rng((self.seed, position)).gumbel(size=VOCAB)
        token = int(np.argmax(logits + noise))
        self.tokens.append(token)
        if token in self.stops:
            self.finished = "stop"
        elif len(self.tokens) == self.limit:
            self.finished = "length"
        return token


def plain_stream(prompt: list[int], limit: int, stops: tuple[int, ...] = (), seed: int | None = None) -> list[int]:
    """What plain decoding emits, computed from the truth alone: no trunk, no loop."""
    sampler = ScriptedSampler(prompt, limit, stops, seed)
    while sampler.finished is None:
        prefix = prompt + sampler.tokens
        sampler.sample(ScriptedTrunk.truth(prefix), len(prefix))
    return sampler.tokens


def true_continuation(prefix: list[int], count: int) -> list[int]:
    """The greedy continuation."""
    text = list(prefix)
    for _ in range(count):
        text.append(int(np.argmax(ScriptedTrunk.truth(text))))
    return text[len(prefix) :]


Guess = Callable[[list[int], int], Iterable[object]]  # (committed tokens + last, window) -> draft tokens


class ScriptedDrafter(Speculator):
    """Drafts what `guess` says. Its corpus is what it was told; it refuses to be told of anything but what follows."""

    name = "scripted"

    def __init__(self, guess: Guess, fail_in: str | None = None, fail_at: int = 0) -> None:
        self.guess, self.fail_in, self.fail_at = guess, fail_in, fail_at
        self.corpus: dict[int, list[int]] = {}
        self.contexts: list[DraftContext] = []
        self.rows: dict[int, list[np.ndarray]] = {}
        self.closed: list[int] = []
        self.calls = 0

    def open(self, key: int, sequence: Sequence) -> None:
        self._fail("open")
        self.corpus[key] = list(sequence.tokens)
        self.rows[key] = []

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        self._fail("propose")
        self.contexts += contexts
        for context in contexts:
            assert context.position == len(self.corpus[context.key])
        drafts: list[Any] = [self.guess([*self.corpus[c.key], c.last], c.window) for c in contexts]
        return [Draft(tuple(draft), silence="" if draft else "nothing to say") for draft in drafts]

    def commit(self, key: int, tokens: list[int], start_position: int, rows: CommittedRows | None) -> None:
        self._fail("commit")
        assert start_position == len(self.corpus[key])
        self.corpus[key] += tokens
        if rows is not None:
            assert rows.kept == len(tokens)
            self.rows[key].append(np.hstack([rows.hidden()[:, :3], *(rows.tap(layer)[:, 3:] for layer in self.taps)]))

    def close(self, key: int) -> None:
        self.closed.append(key)
        self._fail("close")

    def _fail(self, method: str) -> None:
        if method == self.fail_in:
            self.calls += 1
            if self.calls > self.fail_at:
                raise RuntimeError(f"broken in {method}")


def right(prefix: list[int], window: int) -> list[int]:
    return true_continuation(prefix, window)


def wrong(prefix: list[int], window: int) -> list[int]:
    return [(token + 1) % VOCAB for token in true_continuation(prefix, window)]


def random_tokens(prefix: list[int], window: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(fold(prefix)).integers(0, VOCAB, window)]


def mixed(prefix: list[int], window: int) -> list[int]:
    """Right up to a point that varies from step to step, and of varying length."""
    rng = np.random.default_rng(fold(prefix) ^ 1)
    draft = true_continuation(prefix, int(rng.integers(0, window + 1)))
    bad = int(rng.integers(0, window + 1))
    return [token if i < bad else (token + 3) % VOCAB for i, token in enumerate(draft)]


def too_long(prefix: list[int], window: int) -> list[int]:
    return true_continuation(prefix, window + 5)


def empty(prefix: list[int], window: int) -> list[int]:
    return []


def out_of_range(prefix: list[int], window: int) -> list[int]:
    """One good token, then one beyond the vocabulary or below zero."""
    return [*true_continuation(prefix, 1), VOCAB if len(prefix) % 2 else -1, 0, 0]


def numpy_integers(prefix: list[int], window: int) -> list[np.int64]:
    return [np.int64(token) for token in mixed(prefix, window)]
