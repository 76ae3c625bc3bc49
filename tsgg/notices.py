"""One warning, in the log, for each thing that was asked for and cannot be had, or does harm. Nothing is refused for it."""

from __future__ import annotations

import logging
import re

from tsgg.engine import Engine
from tsgg.platform import usable_cores
from tsgg.speculative import AUTO

log = logging.getLogger("tsgg")


class Notices:
    """What one `LLM` has warned of already: each sentence is said once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def loaded(self, engine: Engine, n_ctx: int | None, n_threads: int | None) -> None:
        """After loading, with what the caller asked for."""
        trained, cores = engine.model.arch.context, usable_cores()
        if n_threads is not None and n_threads > cores and engine.model.device.is_cpu:
            self._say(f"{n_threads} threads on {cores} usable cores: more threads than cores only wait for each other")
        if n_ctx is not None and n_ctx > trained:
            self._say(
                f"a context of {n_ctx} tokens, and the model was trained on {trained}: beyond them answers are poor"
            )
        self.speculation(engine)

    def speculation(self, engine: Engine) -> None:
        """Where a drafter was named and there is none."""
        options = engine.options
        if not options.enabled or (options.type == AUTO and options.draft_model is None):
            return
        reason = engine.call(lambda: engine.planner.execution(options).counters.dropped)
        if reason is not None:
            self._say(f"no speculation of type {options.type}: {reason}. Decoding is plain")

    def template(self, source: str, tools: object, enable_thinking: bool | None) -> None:
        """Where the file's chat template reads nothing of what it is given."""
        if enable_thinking is not None and not re.search(r"\benable_thinking\b", source):
            self._say("the file's chat template has no switch for thinking: enable_thinking changes nothing")
        if tools and not re.search(r"\btools\b", source):
            self._say("the file's chat template does not show tools to the model: tools changes nothing")

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("%s", sentence)
