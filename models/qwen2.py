"""`qwen2`: Qwen 1.5 to 2.5 and their distillations. NEOX rope, biases on Q, K and V."""

from __future__ import annotations

from typing import ClassVar

from tsgg.models.llama import Llama


class Qwen2(Llama):
    name: ClassVar[str] = "qwen2"
    neox: ClassVar[bool] = True
    qkv_bias: ClassVar[str] = "required"
