"""What a request asks of sampling: one frozen dataclass, every number checked here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import UsageError
from tsgg.sampling import constraint_fields
from tsgg.sampling.constraint_fields import ConstraintText
from tsgg.suggest import did_you_mean

GREEDY_BELOW = 1e-4  # smaller temperatures only overflow exp((logit - max) / temperature): they mean greedy
MAX_LOGPROBS = 20  # the field's limit of top alternatives per token
LogitsProcessor = Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]
"""(the tokens so far [n] with the whole prompt, read only; a copy of their last row of logits [vocab]) -> the row to use."""

# What llama.cpp, llama-cpp-python, transformers and ollama call a parameter that has another name here.
ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_last_n",
    "eos_token_id": "stop_token_ids",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}


@dataclass(frozen=True, slots=True)
class RepetitionGuard:
    """When an endless loop ends the answer: the last tokens are one short cycle, over and over.

    All three must hold, counted over emitted tokens only: the cycle has at most `max_cycle` tokens, it stands there
    at least `min_repeats` times in a row, and the run is at least `min_tokens` long (a table's ruler or an indented
    block repeats one token dozens of times and is no loop).
    """

    max_cycle: int = 32
    """Longest cycle looked for, tokens, 1..256."""
    min_repeats: int = 8
    """Times the cycle stands in a row, >= 2."""
    min_tokens: int = 128
    """Length of the whole run, tokens, >= 2."""

    def __post_init__(self) -> None:
        for name, low, high in (("max_cycle", 1, 256), ("min_repeats", 2, None), ("min_tokens", 2, None)):
            value = _integer(f"repetition_guard.{name}", getattr(self, name), low, high)
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when they end.

    The defaults are those of llama.cpp (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05), because GGUF files are
    tuned and compared there; vLLM's plain softmax is `SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)`, and
    greedy decoding is `SamplingParams(temperature=0)`.

    The chain of one row, in llama.cpp's order: logits_processors, logit_bias, penalties, top_k, top_p, min_p, temperature,
    draw. So top_p and min_p look at probabilities before temperature, and top_p at those of the top_k survivors. With
    temperature 0 the filters cannot remove the greatest logit and are skipped. Of equal logits the lowest id counts as the
    greater.

    Raises UsageError naming the field, its value and the allowed range.
    """

    n: int = 1
    """Answers to each prompt, >= 1, side by side: answer i is the one that seed + i gives alone."""
    max_tokens: int | None = None
    """Most tokens to emit, >= 1; None or -1: until the answer ends by itself or the context is full."""
    temperature: float = 0.8
    """Logits are divided by it, 0..100; 0 (and anything under 1e-4) is greedy."""
    top_k: int = 40
    """Keep this many of the greatest logits; 0 or -1: all."""
    top_p: float = 0.95
    """Keep the fewest tokens whose probabilities reach this sum, 0..1; 1: all. At least one token stays."""
    min_p: float = 0.05
    """Keep tokens at least this fraction as probable as the most probable one, 0..1; 0: all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the penalty window are divided by it where positive, else multiplied; 0.01..100, 1: off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the penalty window, -2..2; 0: off."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as it stands in the penalty window, -2..2; 0: off."""
    penalty_last_n: int = 64
    """The penalty window: the last n tokens, those of the prompt included; 0: none, -1: all."""
    logit_bias: Mapping[int, float] | None = field(default_factory=dict, hash=False)
    """Token id -> number added to its logit before any penalty or filter; -inf forbids the token. None: no bias."""
    logits_processors: Iterable[LogitsProcessor] | LogitsProcessor | None = field(default=(), hash=False)
    """Functions that may change the raw row before anything else, in order: once per emitted token, on the engine's thread,
    with speculation as without. What they return is copied. One that raises fails its request. Kept as a tuple."""
    seed: int | None = None
    """0..2**64-1; None or -1: one is chosen for the request and reported as `RowSampler.seed`."""
    logprobs: int | None = None
    """Record the natural log-probability (of the raw logits) of every emitted token and of this many of the most
    probable ones, 0..20; None: record nothing."""
    stop: str | Iterable[str] | None = ()
    """Text that ends the answer and is not shown: one string, several (none empty), or None. Kept as a tuple."""
    stop_token_ids: Iterable[int] | None = ()
    """Tokens that end the answer besides the model's own end-of-generation tokens, or None. Kept as a tuple."""
    ignore_eos: bool = False
    """Never draw the model's end-of-generation tokens (benchmarks); ids in stop_token_ids still end the answer."""
    repetition_guard: RepetitionGuard | bool | None = None
    """End an endless loop with finish reason "repetition"; True: the guard's defaults. Off unless asked for."""
    json_schema: Mapping[str, Any] | str | bool | None = None
    """The answer is JSON on one line that this schema (a mapping or JSON text) describes, and ends when it is complete. True or
    an empty schema: any JSON object. Kept as JSON text. At most one of this and the next three; none goes with ignore_eos."""
    regex: str | None = None
    """The whole answer matches this regular expression (syntax of Rust's regex crate: no lookaround, no back references)."""
    grammar: str | None = None
    """The answer is a sentence of this context-free grammar, in Lark's syntax or llama.cpp's (GBNF)."""
    choice: Iterable[str] | None = None
    """The answer is one of these strings. Kept as a tuple."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "n", _integer("n", self.n, 1, None))
        put(
            self, "max_tokens", _integer("max_tokens", _unless_minus_one(self.max_tokens, None), 1, None, optional=True)
        )
        put(self, "temperature", _number("temperature", self.temperature, 0.0, 100.0))
        put(self, "top_k", _integer("top_k", _unless_minus_one(self.top_k, 0), 0, None, off="0 or -1 keeps all tokens"))
        put(self, "top_p", _number("top_p", self.top_p, 0.0, 1.0))
        put(self, "min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put(self, "repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        put(self, "presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put(self, "frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(self, "penalty_last_n", _integer("penalty_last_n", self.penalty_last_n, -1, None, off="-1 is all tokens"))
        put(self, "logit_bias", _biases(self.logit_bias))
        put(self, "logits_processors", _processors(self.logits_processors))
        put(self, "seed", _integer("seed", _unless_minus_one(self.seed, None), 0, 2**64 - 1, optional=True))
        put(self, "logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True))
        put(self, "stop", _stop_strings(self.stop))
        put(
            self,
            "stop_token_ids",
            _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids),
        )
        put(self, "ignore_eos", _flag("ignore_eos", self.ignore_eos))
        put(self, "repetition_guard", _guard(self.repetition_guard))
        put(self, "json_schema", constraint_fields.json_schema(self.json_schema))
        put(self, "regex", constraint_fields.pattern("regex", self.regex))
        put(self, "grammar", constraint_fields.pattern("grammar", self.grammar))
        put(self, "choice", constraint_fields.choice(self.choice))
        if (constraint := self.constraint) is not None and self.ignore_eos:
            raise UsageError(
                f"ignore_eos is set and {constraint.kind} too: an answer that is complete has to end; leave one of them out"
            )
        if self.penalty_last_n == 0 and self.has_penalties:
            raise UsageError(
                "penalty_last_n is 0 (no tokens are penalized) although a penalty is set; leave the penalties at "
                "repetition_penalty=1, presence_penalty=0, frequency_penalty=0 or give a window, -1 for all tokens"
            )

    @classmethod
    def parse(
        cls,
        params: SamplingParams | Mapping[str, Any] | None = None,
        defaults: SamplingParams | None = None,
        /,
        **keywords: Any,
    ) -> SamplingParams:
        """`params` with the given fields replaced. A mapping holds fields to replace too; those, and None, are on top of
        `defaults`. Raises UsageError for an unknown field."""
        base = (defaults or cls()) if params is None or isinstance(params, Mapping) else params
        if not isinstance(base, SamplingParams):
            raise UsageError(
                f"params is a {type(base).__name__}; expected SamplingParams, a mapping of its fields or None"
            )
        given = {**params, **keywords} if isinstance(params, Mapping) else keywords
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                hint = did_you_mean(str(name), known, ELSEWHERE)
                raise UsageError(f"unknown sampling parameter {name}{hint} (valid ones: {', '.join(known)})")
        return replace(base, **given)

    @property
    def is_greedy(self) -> bool:
        """True where the greatest logit is taken and no random number is used."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """True where a token already seen has another logit than the row gives it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def constraint(self) -> ConstraintText | None:
        """What the answer has to look like; None where anything may come. Raises UsageError where several are given."""
        return constraint_fields.one_of({kind: getattr(self, kind) for kind in constraint_fields.KINDS})

    def check_vocab(self, vocab_size: int) -> None:
        """Raises UsageError where a token id named here is not in a vocabulary of `vocab_size` tokens."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = [token for token in ids or () if token >= vocab_size]
            if outside:
                shown = ", ".join(map(str, outside[:5]))
                raise UsageError(f"{name} names token {shown}; the model's vocabulary is 0..{vocab_size - 1}")


def _range(low: object, high: object) -> str:
    return f">= {low}" if high is None else f"{low}..{high}"


def _unless_minus_one(value: object, otherwise: int | None) -> object:
    """llama.cpp's way to say "off" or "any" is -1."""
    return otherwise if isinstance(value, Integral) and int(value) == -1 else value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} is {value!r}; expected True or False")
    return bool(value)


def _integer(
    name: str, value: object, low: int, high: int | None, *, optional: bool = False, off: str = ""
) -> int | None:
    if optional and value is None:
        return None
    expected = f"a whole number {_range(low, high)}" + (" or None" if optional else "") + (f" ({off})" if off else "")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} is {value!r}; expected {expected}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise UsageError(f"{name} is {number}; expected {expected}")
    return number


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:  # NaN fails too
        raise UsageError(f"{name} is {value!r}; expected a number {_range(low, high)}")
    return float(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise UsageError(f"{name} is {value!r}; expected a list of token ids")
    ids: list[int] = []
    for item in value:
        token = _integer(f"a token id in {name}", item, 0, None)
        assert token is not None  # not optional
        ids.append(token)
    return tuple(ids)


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if strings is None:
        return ()
    if isinstance(strings, (bytes, Mapping)) or not isinstance(strings, Iterable):
        raise UsageError(f"stop is {value!r}; expected a string or a list of strings")
    stops = tuple(strings)
    for text in stops:
        if not isinstance(text, str):
            raise UsageError(f"stop holds {text!r}; expected strings (token ids go to stop_token_ids)")
        if not text:
            raise UsageError("stop holds an empty string, which would end every answer at once; leave it out")
    return stops


def _biases(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias is {value!r}; expected a mapping of token ids to numbers")
    _token_ids("logit_bias", list(value))
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, Real) or not _bias_fits(float(bias)):
            raise UsageError(f"logit_bias of token {token} is {bias!r}; expected -1e9..1e9, or -inf to forbid it")
        biases[int(token)] = float(bias)
    return biases


def _bias_fits(bias: float) -> bool:
    return bias == -math.inf or abs(bias) <= 1e9  # NaN fits neither


def _processors(value: object) -> tuple[LogitsProcessor, ...]:
    listed = () if value is None else (value,) if callable(value) else value
    functions = tuple(listed) if isinstance(listed, Iterable) else (listed,)
    if not all(map(callable, functions)):
        raise UsageError(f"logits_processors is {value!r}; expected functions of (token ids, logits)")
    return functions


def _guard(value: object) -> RepetitionGuard | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        return RepetitionGuard() if value else None
    if not isinstance(value, RepetitionGuard):
        raise UsageError(f"repetition_guard is {value!r}; expected True, False, None or a RepetitionGuard")
    return value
