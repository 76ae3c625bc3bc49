"""GGUF files: metadata and tensor directory, read from untrusted input without ggml.

ggml's own reader divides by a zero dimension (SIGFPE) and aborts on others, so no file reaches ggml before this
package has checked every number in its header.
"""

from __future__ import annotations

from tsgg.gguf.header import GGUFFile, TensorInfo
from tsgg.gguf.metadata import Metadata
from tsgg.gguf.reader import read_gguf
from tsgg.gguf.types import GGML_TYPES, REMOVED_GGML_TYPES, TypeInfo

__all__ = ["GGML_TYPES", "REMOVED_GGML_TYPES", "GGUFFile", "Metadata", "TensorInfo", "TypeInfo", "read_gguf"]
