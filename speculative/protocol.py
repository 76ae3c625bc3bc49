"""What the draft-verify-accept-commit loop and its neighbours require of each other.

The loop sees a model only as a `Trunk`, a sequence's memory only as a `Sequence`, a drafting algorithm only as a
`Speculator` and drafter weights only as a `DraftHead`. Nothing here knows ggml or a model. A new signal is a new field
of one of the frozen dataclasses, never a new overload.

Words: a sequence holds n *committed* tokens in memory; its `last` token was drawn but lies in no memory yet. A verify
forwards `[last, d1..dK]` at positions n..n+K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

    from tsgg.speculative.stats import StepSample


Origin = Literal["drawn", "drafted", "forced"]
"""Where an emitted token came from: the row of a token before it, a drafter's draft that was accepted, or a draft of what the
request's constraint left no choice about."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a forward hands back, for each of its sequences (part of the key of a model's graph)."""

    logits: Literal["none", "last", "all"] = "last"
    hidden: Literal["none", "last", "all"] = "none"  # rows after the final norm, [rows, embedding] f32
    taps: tuple[int, ...] = ()  # residual entering layer l (l = number of layers: output of the last), all rows


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward: B sequences x T rows; the rows of a sequence take the positions `sequence.length + 0..T-1`."""

    sequences: tuple[Sequence, ...]
    tokens: np.ndarray  # [B, T] int32
    want: Want


class Rows(Protocol):
    """What a forward handed back: an opaque handle whose arrays may be views, valid until the trunk's next forward."""

    def logits(self, sequence: int, row: int) -> np.ndarray:
        """`[vocab]` f32 of one row; `sequence` is the place in the batch, `row` counts from the sequence's first."""
        ...

    def hidden(self, sequence: int) -> np.ndarray:
        """`[rows, embedding]` f32 after the final norm: all rows of the sequence or its last, as the `Want` asked."""
        ...

    def tap(self, layer: int, sequence: int) -> np.ndarray:
        """`[rows, embedding]` f32, the residual entering `layer`, all rows of the sequence."""
        ...


class Sequence(Protocol):
    """One sequence's tokens and its rows in the trunk's memory; only `commit` and `truncate` change its length.

    A forward that no commit follows leaves the sequence as it was.
    """

    @property
    def tokens(self) -> list[int]:
        """Exactly the committed tokens: those whose rows memory holds. Read only for everybody else."""
        ...

    @property
    def length(self) -> int:
        """`len(tokens)`, the position of the next row."""
        ...

    def commit(self, kept: int) -> int:
        """Keep the first `kept` rows of the last forward; returns how many of them had to be forwarded again for it."""
        ...

    def truncate(self, n: int) -> int:
        """Forget the rows past `n`; returns the length reached (<= n: windows and recurrent states limit it)."""
        ...


class Trunk(Protocol):
    """What the loop needs of a model: nothing about drafting."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def feature_size(self) -> int:
        """Width of a hidden row and of a tap."""
        ...

    @property
    def preferred_draft_window(self) -> int | None:
        """Draft tokens beyond which a verify gets disproportionately dear; narrows the default, not what was asked."""
        ...

    @property
    def speculation_refusal(self) -> str | None:
        """Correctness verdict: why a verify of this model cannot reproduce its own decode, or None."""
        ...

    @property
    def speculation_profitable(self) -> bool:
        """Speed verdict: False where drafting without drafter weights would not pay."""
        ...

    def forward(self, batch: Batch) -> Rows: ...

    def batches(self, sequences: list[Sequence]) -> list[list[int]]:
        """Which of these sequences, all with equally many rows, one forward takes: indices, in the order it wants."""
        ...

    def context_left(self, sequence: Sequence) -> int:
        """Rows that still fit behind the committed ones."""
        ...


class Sampler(Protocol):
    """Draws one request's tokens. Equal streams need it to depend on the prefix and the position only."""

    @property
    def finished(self) -> str | None:
        """Finish reason set by the token just drawn ("stop", "length", ...): nothing is drawn or accepted after it."""
        ...

    def sample(self, logits: np.ndarray, position: int) -> int:
        """Draw AND record the next emitted token; called once per emitted token, in order.

        logits: `[vocab]` f32, a view that must not be kept or written. position: where the drawn token will stand in
        the sequence (the first token after a prompt of n tokens has position n).
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a speculator is told when it may draft for one sequence."""

    key: int  # the sequence, as named in `Speculator.open`
    last: int  # token drawn but not committed: the drafts follow it
    position: int  # of `last` == number of committed tokens
    window: int  # most tokens wanted, >= 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess at what follows `last`."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()  # per token: its probability if those before it are right; () = unknown
    silence: str = ""  # why there are no tokens: a short fixed phrase, it is counted


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """The trunk rows of tokens being committed: read inside `commit`, and copied where kept, for they are reused."""

    rows: Rows
    sequence: int  # place in the batch
    kept: int  # committed rows: the first `kept` of the sequence

    def hidden(self) -> np.ndarray:
        """`[kept, embedding]` f32, rows after the final norm."""
        return self.rows.hidden(self.sequence)[: self.kept]

    def tap(self, layer: int) -> np.ndarray:
        """`[kept, embedding]` f32, the residual entering `layer`."""
        return self.rows.tap(layer, self.sequence)[: self.kept]


class Speculator(ABC):
    """A drafting algorithm, serving many sequences. It is free to be wrong; it must not be slow.

    Its corpus for a sequence is exactly the committed tokens: those found at `open` plus those of each `commit`. It
    never changes a `Sequence`. Whatever it raises costs one request its speculation and nothing else.
    """

    name: str
    needs_hidden_state: bool = False  # commit is given trunk rows
    taps: tuple[int, ...] = ()  # layers whose entering residuals those rows carry
    handles_own_prefill: bool = False  # reads the prompt by itself, so a prefill chunk need not capture rows for it
    # With needs_hidden_state: bears tokens without their rows all the same (a reused prefix, parked steps, a gap).
    # Without it tokens are all that a speculator takes, and it can always be armed.
    can_arm_after_prefix_reuse: bool = False
    default_min_draft_prob: float = 0.0  # confidence gate when the operator names none, on the algorithm's own scale
    max_draft_tokens: int = 64  # of one proposal

    @abstractmethod
    def open(self, key: int, sequence: Sequence) -> None:
        """Begin (or begin anew) with the tokens that `sequence` holds now; the handle may be kept for reading."""

    @abstractmethod
    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        """One draft for each context, in order; a draft with no tokens says why in `silence`."""

    @abstractmethod
    def commit(self, key: int, tokens: list[int], start_position: int, rows: CommittedRows | None) -> None:
        """`tokens` now lie in memory at `start_position...`; `rows` is None where the trunk captured none."""

    @abstractmethod
    def close(self, key: int) -> None:
        """The sequence is gone: release what is held for it."""

    def takes_tokens_alone(self) -> bool:
        """Whether it can be told of committed tokens without the trunk rows that made them."""
        return self.can_arm_after_prefix_reuse or not self.wants_prompt_rows()

    def wants_prompt_rows(self) -> bool:
        """Whether a prefill chunk has to capture rows for it."""
        return self.needs_hidden_state and not self.handles_own_prefill


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The trunk rows that a draft head has not seen yet, each with the token that FOLLOWS it; the last token is `last`.

    Row r is the trunk's row at position `start_position + r`; `tokens[r]` stands at `start_position + r + 1`.
    """

    sequence: Sequence
    features: np.ndarray  # [R, n * feature_size] f32: hidden rows, or the head's n taps side by side
    tokens: np.ndarray  # [R] int32
    start_position: int


class DraftHead(Protocol):
    """Adapter over drafter weights bound to one target; all state of its own (private KV, ring) is behind it."""

    @property
    def kind(self) -> Literal["per_token", "block"]: ...

    @property
    def block_size(self) -> int:
        """Tokens that one run drafts: 1 for a per-token head."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Trunk layers whose entering residuals it reads; () = the row after the final norm."""
        ...

    @property
    def resumes_after_gap(self) -> bool:
        """Whether `start_position` may jump past rows that it never saw."""
        ...

    def draft(self, rows: list[HeadRows], n_max: int, min_prob: float) -> list[Draft]:
        """Catch up over `rows` (one entry per sequence), then draft up to `n_max` tokens after each entry's last token
        (0: only catch up).

        A chain or block ends before the first token whose confidence is under `min_prob`.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state held for `sequence`."""
        ...


@dataclass(frozen=True, slots=True)
class WindowContext:
    """What a window policy is told before a sequence's step."""

    key: int
    ceiling: int  # most draft tokens possible in this step, >= 1
    length: int  # committed tokens
    sequences: int  # sequences in this step


class WindowPolicy(Protocol):
    """Chooses how many tokens to draft, step by step, from what earlier steps cost and gave."""

    def choose(self, context: WindowContext) -> int:
        """0..ceiling; 0 = a plain decode step, by the same graph as plain decoding."""
        ...

    def keep(self, context: WindowContext, draft: Draft) -> int:
        """How many tokens of a draft to verify, 0..len(draft.tokens), now that it is known.

        Asked where there are any; the ceiling is the window that the drafter was given.
        """
        ...

    def record(self, sample: StepSample) -> None:
        """Told of every step, the plain ones too."""
        ...


@dataclass(frozen=True, slots=True)
class Decline:
    """Why no speculator was made, in words for the operator; decoding goes on plainly."""

    reason: str
