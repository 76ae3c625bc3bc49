"""`qwen3`: the plain decoder with NEOX rope and normalised query and key heads."""

from __future__ import annotations

from typing import ClassVar

from tsgg.models.llama import Llama


class Qwen3(Llama):
    name: ClassVar[str] = "qwen3"
    neox: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    qkv_bias: ClassVar[str] = "no"
