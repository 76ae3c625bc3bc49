"""Memory of sequences: slots in arenas that are allocated once. Rolling back is bookkeeping."""

from tsgg.memory.memory import Memory
from tsgg.memory.sequence import Sequence, Slots

__all__ = ["Memory", "Sequence", "Slots"]
