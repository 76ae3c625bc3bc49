"""Many requests on one model: continuous batching, a prefix cache, and streams that do not depend on company or history.

    submit ─> inbox ─> Scheduler ──────> Executor ─────────────────────> Engine.report ─> Stream ─> reader
              (any     which request     one prefill chunk, then draft,   tokens, ends     (any
              thread)  runs what         forward, accept, commit                            thread)
                           │                  │
                       PrefixCache         Planner
                       slots, tree         which drafter, or why none

Everything between inbox and stream belongs to the engine's thread. Token ids only: text is made by whoever reads.
"""

from tsgg.engine.aio import AsyncEngine, AsyncStream
from tsgg.engine.engine import Engine
from tsgg.engine.stats import EngineStats
from tsgg.engine.stream import MOST_UNREAD, Event, Outcome, Stream

__all__ = ["MOST_UNREAD", "AsyncEngine", "AsyncStream", "Engine", "EngineStats", "Event", "Outcome", "Stream"]
