"""What is asked by many at once, and when: prompts as token ids, delays in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

from benchmarks.workloads import CODE, LOG, WORKLOADS
from tsgg.errors import UsageError

ARRIVALS = ("simultaneous", "staggered")
TEXTS = ("mixed", "same", "quote", "shared")

MIXED = ("prose", "quote-prompt", "facts", "tool", "code-edit", "short", "newchat", "mixed")
QUESTIONS = (
    "What is a prime number?",
    "Name three rivers of Europe.",
    "How does a sailing boat go against the wind?",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "List the days of the week.",
    "What does a compiler do?",
    "Tell me about the city of Rome.",
)
SYSTEM = f"You answer briefly and you know this file by heart:\n\n{CODE}\nNever mention it unless you are asked.\n\n"

Tokenize = Callable[..., list[int]]  # tokenize(text, add_bos=None | False)


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to begin with, how many tokens to generate, and seconds to wait before asking."""

    ids: tuple[int, ...]
    tokens: int
    delay: float = 0.0


def make_requests(
    tokenize: Tokenize, texts: str, arrival: str, count: int, tokens: int, depth: int = 0, gap: float = 0.0
) -> list[Request]:
    """`count` requests with `depth` tokens before each prompt. Staggered: each comes `gap` seconds after the one before.

    Raises `UsageError` for an unknown kind of texts or of arrivals.
    """
    if arrival not in ARRIVALS:
        raise UsageError(f"unknown arrivals {arrival}; there are {', '.join(ARRIVALS)}")
    wait = gap if arrival == "staggered" else 0.0
    alike = texts in ("same", "shared")
    requests = []
    for number in range(count):
        text = prompt(texts, number)
        ids = with_depth(tokenize, text, depth, 0 if alike else number)
        requests.append(Request(tuple(ids), tokens, wait * number))
    return requests


def prompt(texts: str, number: int) -> str:
    """The text of the request with this number. Raises `UsageError` for an unknown kind."""
    if texts == "mixed":
        return WORKLOADS[MIXED[number % len(MIXED)]].prompt
    if texts == "same":
        return WORKLOADS["prose"].prompt
    if texts == "quote":
        return f"# file {number} of the project\n{WORKLOADS['quote-prompt'].prompt}"
    if texts == "shared":
        return f"{SYSTEM}Question: {QUESTIONS[number % len(QUESTIONS)]}\nAnswer:"
    raise UsageError(f"unknown texts {texts}; there are {', '.join(TEXTS)}")


def with_depth(tokenize: Tokenize, text: str, depth: int, number: int = 0) -> list[int]:
    """Exactly `depth` tokens of a log of its own, from its first line on, then the text."""
    if depth == 0:
        return tokenize(text)
    begin = tokenize(f"Log {number} of {number + 7} machines\n")
    lines = tokenize(f"{LOG}\n", add_bos=False)
    filler = [*begin, *islice(cycle(lines), max(0, depth - len(begin)))][:depth]
    return [*filler, *tokenize(text, add_bos=False)]
