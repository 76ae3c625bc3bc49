"""The guard around a speculator: whatever it raises or hands back costs one request its speculation, and nothing else."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from tsgg.errors import TsggError
from tsgg.speculative.protocol import CommittedRows, Draft, DraftContext, Sampler, Sequence, Speculator
from tsgg.speculative.stats import SpeculationCounters

log = logging.getLogger("tsgg.speculative")

NO_REASON = "no reason given"
INVALID = "no valid token in the draft"

Proposal = tuple[tuple[int, ...], int, str]  # tokens to verify, tokens discarded, why there are none


@dataclass(slots=True, eq=False)
class SpeculativeRequest:
    """One request in the loop. Whoever prefills it sets `last` to the token drawn from the prompt's last row."""

    key: int
    sequence: Sequence
    sampler: Sampler
    last: int | None = None  # drawn, not in memory
    remaining: int | None = None  # tokens still wanted behind `last`; None = no limit
    armed: bool = False  # a speculator drafts for it
    seen: int = 0  # committed tokens that the speculator was told of
    context_full: bool = False
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)

    @property
    def finished(self) -> str | None:
        """Finish reason, or None while another step may run."""
        if self.sampler.finished is not None:
            return self.sampler.finished
        return "length" if self.context_full or self.remaining == 0 else None

    @property
    def next_input(self) -> int:
        """The token that the next step forwards first."""
        if self.last is None:
            raise TsggError(f"request {self.key} has no drawn token to go on from")
        return self.last

    def advance(self, tokens: list[int]) -> None:
        """A step drew `tokens`: all but the last now lie in memory."""
        self.last = tokens[-1]
        if self.remaining is not None:
            self.remaining = max(0, self.remaining - len(tokens))


class Guard:
    """Calls one speculator for all requests; a request for which it raises is dropped, with one logged reason."""

    def __init__(self, speculator: Speculator, vocab_size: int) -> None:
        self.speculator = speculator
        self._vocab_size = vocab_size

    def open(self, request: SpeculativeRequest) -> None:
        """Arms the request over the tokens that its memory holds."""
        request.armed = True
        if request.sequence.length and not self.speculator.takes_tokens_alone():
            self._drop([request], "the drafter needs the hidden rows of a prefix that it did not see", logging.INFO)
            return
        self._call([request], "open", lambda: self.speculator.open(request.key, request.sequence))
        request.seen = request.sequence.length

    def commit(self, request: SpeculativeRequest, tokens: list[int], rows: CommittedRows | None) -> None:
        """Tells the speculator of tokens that now lie in memory; they follow those it was told of before."""
        start = request.seen
        request.seen += len(tokens)
        self._call([request], "commit", lambda: self.speculator.commit(request.key, tokens, start, rows))

    def propose(self, requests: list[SpeculativeRequest], contexts: list[DraftContext]) -> list[Proposal]:
        """One proposal per request, cut to what may be verified. One call for all: if it raises, all are dropped."""
        found: list[Draft] = []

        def ask() -> None:
            drafts = self.speculator.propose(contexts)
            if len(drafts) != len(contexts):
                raise TsggError(f"{len(drafts)} drafts came back for {len(contexts)} contexts")
            found.extend(drafts)

        self._call(requests, "propose", ask)
        proposals: list[Proposal] = []
        for i, (request, context) in enumerate(zip(requests, contexts, strict=True)):
            proposal: Proposal = ((), 0, "")
            if request.armed:
                checked: list[Proposal] = []
                self._call([request], "propose", lambda i=i, c=context: checked.append(self._check(found[i], c)))  # type: ignore[misc]
                proposal = checked[0] if checked else proposal
            proposals.append(proposal)
        return proposals

    def close(self, request: SpeculativeRequest) -> None:
        """The request leaves or goes on plainly."""
        self._call([request], "close", lambda: self.speculator.close(request.key))
        request.armed = False

    def _check(self, draft: Draft, context: DraftContext) -> Proposal:
        """Cuts a draft at the window and before the first token that the model does not have."""
        tokens = [operator.index(token) for token in draft.tokens]
        kept = tokens[: context.window]
        for i, token in enumerate(kept):
            if not 0 <= token < self._vocab_size:
                kept = kept[:i]
                break
        silence = "" if kept else (INVALID if tokens else draft.silence or NO_REASON)
        return tuple(kept), len(tokens) - len(kept), silence

    def _call(self, requests: list[SpeculativeRequest], name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it is: the request's output does not depend on its drafter
            self._drop(requests, f"{self.speculator.name} failed in {name}: {type(error).__name__}: {error}", logging.WARNING)

    def _drop(self, requests: list[SpeculativeRequest], reason: str, level: int) -> None:
        armed = [request for request in requests if request.armed]
        for request in armed:
            request.armed = False
            request.counters.dropped = reason
        if armed:
            log.log(level, "%s; the request goes on plainly", reason)
