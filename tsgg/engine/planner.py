"""Which drafter serves a request, or why none does: one execution per set of options, drafters and governors shared."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace

from tsgg.model import Model
from tsgg.speculative import (
    AUTO,
    REGISTRY,
    CostGovernor,
    Decline,
    DraftHead,
    SpeculationOptions,
    SpeculativeExecution,
    Speculator,
)

MOST_EXECUTIONS = 16  # sets of options remembered: a caller who varies them with every call must not fill the memory


class Planner:
    """Loads drafters into the model: for the thread that owns it, but for `knows`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._executions: OrderedDict[SpeculationOptions, SpeculativeExecution] = OrderedDict()
        self._speculators: dict[SpeculationOptions, Speculator | Decline] = {}
        self._governors: dict[tuple[str, str | None], CostGovernor] = {}  # by drafter and its file
        self._keys = itertools.count()  # names of requests, the same for all who share a governor

    def knows(self, options: SpeculationOptions) -> bool:
        """Whether `execution` has nothing to load. From any thread."""
        return options in self._executions

    def execution(self, options: SpeculationOptions) -> SpeculativeExecution:
        """The latest MOST_EXECUTIONS are kept. Raises what loading a drafter raises; then nothing has changed."""
        if options not in self._executions:
            speculator = self._speculator(options)
            policy = self._governor(speculator, options)
            self._executions[options] = SpeculativeExecution(self._model, speculator, options, policy, keys=self._keys)
            while len(self._executions) > MOST_EXECUTIONS:
                self._executions.popitem(last=False)
        self._executions.move_to_end(options)
        return self._executions[options]

    def describe(self, options: SpeculationOptions) -> str:
        """What drafts, or why nothing does; and why the head in the file does not. Raises what `execution` raises."""
        execution = self.execution(options)
        refusal = self._refusal(options)
        if refusal is None or execution.counters.dropped is not None:  # what was dropped says it already
            return execution.describe()
        return f"{execution.describe()}; the draft head in the file is left out: {refusal}"

    def _speculator(self, options: SpeculationOptions) -> Speculator | Decline:
        """The drafter of these options, or why there is none; one for all that differ in the window only."""
        same = replace(options, draft=None, adaptive=True)
        if same not in self._speculators:
            wants_head = options.enabled and (options.type == AUTO or REGISTRY.requires_draft_head(options.type))
            head = self._head(options) if wants_head else None
            made = REGISTRY.create(options.type, self._model, options, head)
            if isinstance(made, Decline) and (refusal := self._refusal(options)):
                made = Decline(f"{made.reason}; the draft head in the file is left out: {refusal}")
            self._speculators[same] = made
            while len(self._speculators) > MOST_EXECUTIONS:
                del self._speculators[next(iter(self._speculators))]
        return self._speculators[same]

    def _head(self, options: SpeculationOptions) -> DraftHead | None:
        """Drafter weights: those of the file that was named, else those that the model's own file carries.

        A head of the file that cannot be had is an error only where it was asked for by name.
        """
        if options.draft_model is not None:
            return self._model.draft_model(options.draft_model)
        return self._model.draft_head(required=options.type != AUTO)

    def _refusal(self, options: SpeculationOptions) -> str | None:
        """Why "auto" does without the head that the file announces."""
        if not options.enabled or options.type != AUTO or options.draft_model is not None:
            return None
        return self._model.head_refusal

    def _governor(self, speculator: Speculator | Decline, options: SpeculationOptions) -> CostGovernor | None:
        """What chooses the windows: one per drafter, so that what it has learned of costs serves all options and requests."""
        if isinstance(speculator, Decline) or not options.adaptive:
            return None
        return self._governors.setdefault((speculator.name, options.draft_model), CostGovernor())
