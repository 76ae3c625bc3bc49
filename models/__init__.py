"""Architectures: one file each, and this table. A new family is a file here plus one entry."""

from __future__ import annotations

from tsgg.errors import UnsupportedError
from tsgg.models.base import Architecture
from tsgg.models.gemma3 import Gemma3
from tsgg.models.gemma4 import Gemma4
from tsgg.models.llama import Llama
from tsgg.models.qwen2 import Qwen2
from tsgg.models.qwen3 import Qwen3
from tsgg.models.qwen3moe import Qwen3Moe
from tsgg.models.qwen35 import Qwen35, Qwen35MoE

ARCHITECTURES: dict[str, type[Architecture]] = {
    cls.name: cls for cls in (Gemma3, Gemma4, Llama, Qwen2, Qwen3, Qwen3Moe, Qwen35, Qwen35MoE)
}


def register(architecture: type[Architecture]) -> None:
    """Adds an architecture from outside the package under its `name` (what `general.architecture` says)."""
    ARCHITECTURES[architecture.name] = architecture


def find(name: str) -> type[Architecture]:
    """The class for `general.architecture`; raises `UnsupportedError` that lists the known ones."""
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"architecture {name!r} is not implemented; known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]
