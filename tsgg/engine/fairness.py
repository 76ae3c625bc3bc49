"""Who takes part in a step: a verify takes time from the requests beside it, and is paid for by sitting out.

Beside neighbours a verify of many rows takes longer than the plain row that the request would have forwarded. The difference is
the request's debt. In every step that it sits out, its neighbours gain the time of that plain row, and the debt is less by as
much. So a neighbour's usual time between two tokens is that of plain company, and its tokens per second as well, while the one
that drafts well is still quicker than plain.
"""

from __future__ import annotations

from collections.abc import Sequence

from tsgg.engine.request import Request
from tsgg.speculative import StepSample

MEMORY = 0.9  # of the price of a plain row, per sample: it follows the length of the texts


class Fairness:
    """One for all requests that decode side by side."""

    def __init__(self) -> None:
        self._plain = 0.0  # seconds of a plain row, a request's share of its forward; 0: none was seen

    def choose(self, decoding: Sequence[Request]) -> list[Request]:
        """Those that take part in the next step: one at least. The others' debts are less by what they leave to them."""
        least = min((request.debt for request in decoding), default=0.0)
        for request in decoding:  # equals owe each other nothing
            request.debt -= least
        chosen = [request for request in decoding if request.debt < self._plain or request.debt == 0.0]
        for request in decoding:
            if request not in chosen:
                request.debt -= self._plain
        return chosen

    def charge(self, request: Request, sample: StepSample) -> None:
        """Accounts for a step of the request."""
        if sample.drafted:
            if self._plain and sample.sequences > 1:
                request.debt += max(0.0, sample.forward_seconds + sample.draft_seconds - self._plain)
            return
        known = self._plain or sample.forward_seconds
        self._plain = MEMORY * known + (1 - MEMORY) * min(sample.forward_seconds, 4 * known)  # a stall is no price
