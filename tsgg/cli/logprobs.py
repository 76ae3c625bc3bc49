"""Log-probabilities for people: a line per token."""

from __future__ import annotations

from collections.abc import Sequence

from tsgg.results import TokenLogprob
from tsgg.tokenizer import Tokenizer


def table(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> str:
    """Per emitted token its log-probability and text, then the most probable ones."""

    def text(token: int) -> str:
        return repr(tokenizer.decode_bytes([token]).decode("utf-8", "backslashreplace"))

    width = max((len(text(item.token)) for item in logprobs), default=0)
    lines = []
    for item in logprobs:
        top = "  ".join(f"{text(other.token)} {other.logprob:.3f}" for other in item.top)
        lines.append(f"{item.logprob:8.3f}  {text(item.token):<{width}}  {top}".rstrip())
    return "\n".join(lines)
