"""The speculator that drives heads drafting token by token: which rows it hands over, when, and what it says instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tests.scripted import ScriptedTrunk
from tsgg.speculative import REGISTRY, Decline, SpeculationOptions
from tsgg.speculative.draft_head import MOST_WAITING, NO_ROW, DraftHeadSpeculator
from tsgg.speculative.protocol import CommittedRows, Draft, DraftContext, HeadRows, Sequence, Speculator


@dataclass
class ScriptedHead:
    """Keeps what it is given; row features are (position, ...), so that a wrong pairing shows."""

    kind: Literal["per_token", "block"] = "per_token"
    block_size: int = 1
    resumes_after_gap: bool = True
    taps: tuple[int, ...] = ()
    calls: list[tuple[list[HeadRows], int, float]] = field(default_factory=list)
    forgotten: list[Sequence] = field(default_factory=list)

    def draft(self, rows: list[HeadRows], n_max: int, min_prob: float) -> list[Draft]:
        self.calls.append((rows, n_max, min_prob))
        for entry in rows:
            positions = entry.start_position + np.arange(len(entry.tokens))
            assert entry.features[:, 0].tolist() == positions.tolist(), "row r is that of start_position + r"
            known = entry.sequence.tokens[entry.start_position + 1 :]
            assert entry.tokens.tolist()[: len(known)] == known[: len(entry.tokens)], "each with the token that follows"
        return [Draft((1,) * n_max, (0.5,) * n_max) for _ in rows]

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)


@dataclass
class Text:
    """A sequence, and trunk rows whose features begin with their position."""

    tokens: list[int] = field(default_factory=list)
    first: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def commit(self, kept: int) -> int: ...

    def truncate(self, n: int) -> int:
        return n

    def logits(self, sequence: int, row: int) -> np.ndarray:
        raise AssertionError("no head reads logits")

    def hidden(self, sequence: int) -> np.ndarray:
        return np.arange(self.first, self.first + 200, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)

    def tap(self, layer: int, sequence: int) -> np.ndarray:
        return np.array(self.hidden(sequence) + np.array([[0, layer, layer]]))

    def add(self, speculator: Speculator, tokens: list[int], captured: bool = True) -> None:
        """Commits tokens, with their rows or without."""
        self.first = len(self.tokens)
        self.tokens += tokens
        speculator.commit(0, tokens, self.first, CommittedRows(self, 0, len(tokens)) if captured else None)

    def propose(self, speculator: Speculator, last: int, window: int = 3) -> Draft:
        return speculator.propose([DraftContext(0, last, len(self.tokens), window)])[0]


def test_it_hands_over_the_rows_since_the_last_draft_with_the_tokens_that_follow_them() -> None:
    head, text = ScriptedHead(), Text()
    speculator = DraftHeadSpeculator(head, 0.25)
    speculator.open(0, text)
    assert head.forgotten == [text]
    assert text.propose(speculator, 9) == Draft(silence=NO_ROW)
    text.add(speculator, [5, 6, 7])
    assert text.propose(speculator, 8).tokens == (1, 1, 1)
    text.add(speculator, [8, 1])
    text.add(speculator, [2])
    assert text.propose(speculator, 3, window=2).tokens == (1, 1)
    given = [(r[0].start_position, r[0].tokens.tolist(), n, p) for r, n, p in head.calls]
    assert given == [(0, [6, 7, 8], 3, 0.25), (3, [1, 2, 3], 2, 0.25)]
    speculator.close(0)
    assert head.forgotten == [text, text]


def test_a_gap_drops_what_waits_and_the_next_row_begins_anew() -> None:
    head, text = ScriptedHead(), Text()
    speculator = DraftHeadSpeculator(head)
    speculator.open(0, text)
    text.add(speculator, [1, 2, 3])
    text.add(speculator, [4, 5], captured=False)  # parked
    assert text.propose(speculator, 6) == Draft(silence=NO_ROW) and not head.calls
    text.add(speculator, [6])
    assert text.propose(speculator, 7).tokens
    ((rows,), _, _) = head.calls[0]
    assert (rows.start_position, rows.tokens.tolist()) == (5, [7])


def test_a_prompt_goes_to_the_head_chunk_by_chunk_all_but_the_last_row() -> None:
    head, text = ScriptedHead(), Text()
    speculator = DraftHeadSpeculator(head)
    speculator.open(0, text)
    tokens = list(range(100, 100 + 2 * MOST_WAITING + 9))
    text.add(speculator, tokens[: MOST_WAITING + 1])
    text.add(speculator, tokens[MOST_WAITING + 1 :])
    assert [(rows[0].start_position, len(rows[0].tokens), n) for rows, n, _ in head.calls] == [
        (0, MOST_WAITING, 0),
        (MOST_WAITING, MOST_WAITING + 8, 0),
    ]
    text.propose(speculator, 7)
    ((rows,), _, _) = head.calls[-1]
    assert (rows.start_position, rows.tokens.tolist()) == (len(tokens) - 1, [7])


def test_a_head_that_reads_taps_is_given_them_side_by_side() -> None:
    head, text = ScriptedHead(taps=(2, 5)), Text()
    speculator = DraftHeadSpeculator(head)
    assert speculator.taps == (2, 5)
    speculator.open(0, text)
    text.add(speculator, [1, 2])
    text.propose(speculator, 3)
    ((rows,), _, _) = head.calls[0]
    assert rows.features.tolist() == [[0, 2, 2, 0, 5, 5], [1, 3, 3, 1, 6, 6]]


def test_sequences_with_different_windows_get_what_each_may_have() -> None:
    head, texts = ScriptedHead(), [Text() for _ in range(4)]
    speculator = DraftHeadSpeculator(head)
    for key, text in enumerate(texts):
        speculator.open(key, text)
        if key != 2:
            text.tokens = [key]
            speculator.commit(key, [key], 0, CommittedRows(text, 0, 1))
    contexts = [DraftContext(key, 9, len(text.tokens), 2 + key % 2) for key, text in enumerate(texts)]
    assert [len(draft.tokens) for draft in speculator.propose(contexts)] == [2, 3, 0, 3]
    assert [(len(rows), n) for rows, n, _ in head.calls] == [(1, 2), (2, 3)]


def test_the_registry_gives_a_per_token_head_to_this_speculator() -> None:
    trunk = ScriptedTrunk()
    assert REGISTRY.requires_draft_head("draft-head")
    made = REGISTRY.create("auto", trunk, SpeculationOptions(enabled=True), ScriptedHead())
    assert isinstance(made, DraftHeadSpeculator) and made.needs_hidden_state and not made.handles_own_prefill
    assert made.can_arm_after_prefix_reuse and made.default_min_draft_prob == 0.15
    assert not DraftHeadSpeculator(ScriptedHead(resumes_after_gap=False)).can_arm_after_prefix_reuse
    block = ScriptedHead(kind="block")
    refused = REGISTRY.create("draft-head", trunk, SpeculationOptions(enabled=True, type="draft-head"), block)
    assert isinstance(refused, Decline) and "cannot serve" in refused.reason
