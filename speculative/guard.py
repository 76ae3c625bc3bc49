"""The guard around a speculator: what it raises or hands back costs one request its speculation, and nothing else."""

from __future__ import annotations

import logging
import operator
import traceback
from dataclasses import dataclass, field

from tsgg.errors import TsggError
from tsgg.speculative.protocol import CommittedRows, Draft, DraftContext, Sampler, Sequence, Speculator
from tsgg.speculative.stats import SpeculationCounters

log = logging.getLogger("tsgg.speculative")

NO_REASON = "no reason given"
INVALID = "no valid token in the draft"

Proposal = tuple[Draft, int]  # cut to what may be verified, and how many tokens that discarded
NOTHING: Proposal = (Draft(), 0)


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
        if self.remaining == 0:
            return "length"
        return "context" if self.context_full else None

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
        self.name = str(getattr(speculator, "name", type(speculator).__name__))
        self._vocab_size = vocab_size

    def open(self, request: SpeculativeRequest) -> None:
        """Arms the request over the tokens that its memory holds."""
        request.armed, request.seen = True, request.sequence.length
        if request.seen and not self.speculator.takes_tokens_alone():
            self._drop(request, self._unseen(request.seen))
            return
        try:
            self.speculator.open(request.key, request.sequence)
        except Exception as error:
            self._fail(request, "open", error)

    def commit(self, request: SpeculativeRequest, tokens: list[int], rows: CommittedRows | None) -> None:
        """Tells the speculator of tokens that now lie in memory; they follow those it was told of before."""
        start = request.seen
        request.seen += len(tokens)
        if rows is None and not self.speculator.takes_tokens_alone():
            self._drop(request, self._unseen(len(tokens)))
            return
        try:
            self.speculator.commit(request.key, tokens, start, rows)
        except Exception as error:
            self._fail(request, "commit", error)

    def propose(self, requests: list[SpeculativeRequest], contexts: list[DraftContext]) -> list[Proposal]:
        """One proposal per request, cut to what may be verified; one call for all.

        Where that call raises, each request is asked for alone, so that only the one at fault is dropped.
        """
        try:
            return self._ask(contexts)
        except Exception as error:
            if len(requests) == 1:
                self._fail(requests[0], "propose", error)
                return [NOTHING]
        return [self.propose([request], [context])[0] for request, context in zip(requests, contexts, strict=True)]

    def close(self, request: SpeculativeRequest) -> None:
        """The request leaves, or goes on plainly."""
        request.armed = False
        try:
            self.speculator.close(request.key)
        except Exception as error:
            self._report(request, "close", error)

    def _ask(self, contexts: list[DraftContext]) -> list[Proposal]:
        drafts = self.speculator.propose(contexts)
        if len(drafts) != len(contexts):
            raise TsggError(f"{len(drafts)} drafts came back for {len(contexts)} contexts")
        return [self._check(draft, context) for draft, context in zip(drafts, contexts, strict=True)]

    def _check(self, draft: Draft, context: DraftContext) -> Proposal:
        """Cuts a draft at the window and before the first token that the model does not have."""
        kept: list[int] = []
        for token in draft.tokens[: context.window]:
            kept.append(operator.index(token))  # a numpy integer too; anything else is the drafter's fault
            if not 0 <= token < self._vocab_size:
                kept.pop()
                break
        discarded = len(draft.tokens) - len(kept)
        silence = "" if kept else (INVALID if discarded else str(draft.silence or NO_REASON))
        sure = tuple(float(c) for c in draft.confidences[: len(kept)])
        return Draft(tuple(kept), sure if len(sure) == len(kept) else (), silence), discarded

    def _unseen(self, tokens: int) -> str:
        return f"{self.name} needs the hidden rows of {tokens} tokens that it did not see"

    def _drop(self, request: SpeculativeRequest, reason: str) -> None:
        """It cannot serve this request: nobody's fault."""
        request.counters.dropped = reason
        log.info("request %d: %s; it goes on plainly", request.key, reason)
        self._release(request)

    def _fail(self, request: SpeculativeRequest, method: str, error: Exception) -> None:
        self._report(request, method, error)
        self._release(request)

    def _report(self, request: SpeculativeRequest, method: str, error: Exception) -> None:
        what = traceback.format_exception_only(error)[0].strip()  # bears an error whose own str() raises
        reason = f"{self.name} failed in {method}: {what}"
        request.counters.dropped = reason
        trace = error if log.isEnabledFor(logging.DEBUG) else None
        log.warning("request %d: %s; it goes on plainly", request.key, reason, exc_info=trace)

    def _release(self, request: SpeculativeRequest) -> None:
        """Lets a dropped request's state go; the reason is told already, whatever else goes wrong here."""
        request.armed = False
        try:
            self.speculator.close(request.key)
        except Exception:
            log.debug("request %d: closing after the failure failed too", request.key, exc_info=True)
