"""An architecture from outside the package: a llama whose even layers see a sliding window. Registered on import.

Its files are those of `tests.tiny_models` with `arch="tinywindow"`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tsgg.models import register
from tsgg.models.base import Attention
from tsgg.models.llama import Llama

WINDOW = 20  # tokens


class TinyWindow(Llama):
    name: ClassVar[str] = "tinywindow"

    def attention(self) -> list[Attention]:
        return [replace(layer, window=0 if i % 2 else WINDOW) for i, layer in enumerate(super().attention())]


register(TinyWindow)
