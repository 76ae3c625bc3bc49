"""GGUF language models on unpatched ggml, made faster by speculative decoding.

from tsgg import LLM
with LLM("model.gguf") as llm:
    print(llm.generate("The capital of France is", max_tokens=16).text)
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tsgg import process as _process  # noqa: F401  before any native library loads
from tsgg.errors import (
    ContextFullError,
    ModelFileError,
    OutOfMemoryError,
    TsggError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from tsgg.llm import LLM
    from tsgg.results import ChatResult, Chunk, GenerationResult
    from tsgg.sampling import SamplingParams
    from tsgg.speculative.options import SpeculationOptions

    __version__: str

__all__ = [
    "LLM",
    "ChatResult",
    "Chunk",
    "ContextFullError",
    "GenerationResult",
    "ModelFileError",
    "OutOfMemoryError",
    "SamplingParams",
    "SpeculationOptions",
    "TsggError",
    "UnsupportedError",
    "UsageError",
    "__version__",
]

_LAZY = {
    "LLM": "tsgg.llm",
    "ChatResult": "tsgg.results",
    "Chunk": "tsgg.results",
    "GenerationResult": "tsgg.results",
    "SamplingParams": "tsgg.sampling",
    "SpeculationOptions": "tsgg.speculative.options",
}


def __getattr__(name: str) -> Any:
    """Loads ggml, and reads the version, only when something asks for it."""
    if name == "__version__":
        return version("tsgg")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tsgg' has no attribute {name!r}")
