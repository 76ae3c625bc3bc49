"""Memory of sequences: slots in arenas that are allocated once. Rolling back is bookkeeping."""

from tsgg.memory.kv import KVArena
from tsgg.memory.sequence import Sequence, Slots

__all__ = ["KVArena", "Sequence", "Slots"]
