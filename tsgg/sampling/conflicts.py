"""Parameters that contradict a constraint: they would end the answer before it is complete, or leave it no token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tsgg.errors import UsageError
from tsgg.sampling.constraint_fields import ConstraintText
from tsgg.sampling.grammar import holding
from tsgg.sampling.params import SamplingParams
from tsgg.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tsgg.sampling.constraint import Matcher

MOST_FORCED = 256  # tokens of the only possible beginning of an answer that are looked at


def check(
    params: SamplingParams,
    text: ConstraintText,
    matcher: Matcher,
    tokenizer: Tokenizer,
    matches_some: Callable[[str], bool],
) -> None:
    """Raises UsageError. `matches_some(grammar)`: whether any text matches."""
    for stop in params.stop or ():
        if stop not in tokenizer.control_tokens and _may_hold(text, stop, matches_some):
            raise UsageError(
                f"the stop string {stop!r} can stand in an answer that {text.kind} describes and would cut it off; "
                "leave it out: the answer ends when it is complete"
            )
    for token in params.stop_token_ids or ():
        if token not in tokenizer.end_of_generation and token not in tokenizer.marks:
            raise UsageError(
                f"stop_token_ids names {token} ({tokenizer.token_text(token)!r}), which is text and would cut off an answer "
                f"that {text.kind} describes; leave it out: the answer ends when it is complete"
            )
    banned = {token for token, bias in (params.logit_bias or {}).items() if bias == -math.inf}
    if banned and (impasse := _impasse(matcher.copy(), banned)) is not None:
        named = f"{tokenizer.token_text(impasse)!r} ({impasse})"
        raise UsageError(f"logit_bias forbids every token that {text.kind} allows at one place, such as {named}")


def _may_hold(text: ConstraintText, part: str, matches_some: Callable[[str], bool]) -> bool:
    """Whether an answer may hold `part`. Of a grammar, and of texts within JSON, that is not known: it may."""
    if text.kind == "choice":
        return any(part in option for option in json.loads(text.text))
    if text.kind == "regex":
        return matches_some(holding(text.text, part))
    return text.kind == "grammar" or not any(character < " " for character in part)  # JSON escapes those


def _impasse(matcher: Matcher, banned: set[int]) -> int | None:
    """A token at the beginning of every answer that is banned with all its alternatives, or None."""
    for _ in range(MOST_FORCED):
        if matcher.complete:
            return None
        allowed = list(matcher.forced(1)) or np.flatnonzero(matcher.allowed()).tolist()
        if banned.issuperset(allowed):
            return int(allowed[0])
        if len(allowed) > 1:
            return None
        matcher.consume(int(allowed[0]))
    return None
