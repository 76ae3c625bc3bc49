"""`qwen3moe`: Qwen 3 attention, and a mixture of experts in every layer."""

from __future__ import annotations

from typing import ClassVar

from tsgg.errors import ModelFileError
from tsgg.models import blocks
from tsgg.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    name: ClassVar[str] = "qwen3moe"

    def _experts(self) -> blocks.Experts:
        experts = super()._experts()
        if experts is None:
            raise ModelFileError("qwen3moe.expert_count is 0, expected one expert or more")
        return experts

    def _expert_width(self, used: int) -> int:
        """The key of its own, or the width of the dense layer that the used experts together replace."""
        if self.keys.has("expert_feed_forward_length"):
            return self.keys.integer("expert_feed_forward_length", high=1 << 20)
        width = self.keys.integer("feed_forward_length", high=1 << 20)
        if width % used:
            raise ModelFileError(f"qwen3moe.feed_forward_length is {width}, expected a multiple of {used} used experts")
        return width // used
