"""What the operator said about speculation (flags, environment, API), validated in one place before the model loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from tsgg.errors import UsageError
from tsgg.speculative.registry import AUTO, REGISTRY

if TYPE_CHECKING:
    from tsgg.speculative.protocol import Speculator, Trunk

DEFAULT_DRAFT = 8
MAX_DRAFT = 64

ENVIRONMENT_PREFIX = "TS_SPEC"
_ENVIRONMENT = {  # variable -> option
    "TS_SPEC": "enabled",
    "TS_SPEC_TYPE": "type",
    "TS_SPEC_DRAFT": "draft",
    "TS_SPEC_PMIN": "pmin",
    "TS_SPEC_DRAFT_MODEL": "draft_model",
    "TS_SPEC_SHARED_CORPUS": "shared_corpus",
    "TS_SPEC_ADAPTIVE": "adaptive",
}
_SWITCHES = ("enabled", "shared_corpus", "adaptive")
_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Every field is checked on construction; a wrong one raises `UsageError`."""

    enabled: bool = False
    type: str = AUTO  # "auto" or a name in the registry
    draft: int | None = None  # most tokens drafted per step, 1..64; None = 8, narrowed by what the model prefers
    pmin: float | None = None  # confidence gate, 0..1; None = the algorithm's own default
    draft_model: str | None = None  # path of a drafter file
    shared_corpus: bool = True  # drafters may draw on the answers to other requests; a server of many users says False
    adaptive: bool = True  # the window is what pays, step by step; False = all that may be drafted, whatever it costs

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"speculation option {name!r} is {getattr(self, name)!r}; expected True or False")
        if not isinstance(self.type, str) or self.type not in (AUTO, *REGISTRY.names()):
            known = ", ".join((AUTO, *REGISTRY.names()))
            raise UsageError(f"speculation option 'type' is {self.type!r}; expected one of: {known}")
        if self.draft is not None and (not _is_int(self.draft) or not 1 <= self.draft <= MAX_DRAFT):
            raise UsageError(
                f"speculation option 'draft' is {self.draft!r}; expected a whole number from 1 to {MAX_DRAFT} "
                "(to switch speculation off, disable it)"
            )
        if self.pmin is not None and (not _is_real(self.pmin) or not 0.0 <= self.pmin <= 1.0):
            raise UsageError(f"speculation option 'pmin' is {self.pmin!r}; expected a number from 0 to 1")
        if self.draft_model is not None and (not isinstance(self.draft_model, str) or not self.draft_model):
            raise UsageError(f"speculation option 'draft_model' is {self.draft_model!r}; expected a path")
        if self.draft_model is not None and self.type != AUTO and not REGISTRY.requires_draft_head(self.type):
            raise UsageError(
                f"speculation type {self.type!r} uses no drafter weights, but draft_model is {self.draft_model!r}; "
                "leave one of the two out"
            )

    @classmethod
    def parse(cls, value: object = None, base: SpeculationOptions | None = None) -> SpeculationOptions:
        """Options from what an API caller passed, on top of `base` (the environment's; default: off).

        None keeps `base`; True and False switch; a string names a type ("off" switches off); a mapping sets the fields
        that it names and enables unless it says otherwise; options are taken as they are.
        Raises `UsageError` for anything else, and for unknown keys.
        """
        base = cls() if base is None else base
        if value is None:
            return base
        if isinstance(value, cls):
            return value
        if isinstance(value, bool):
            return replace(base, enabled=value)
        if isinstance(value, str):
            return replace(base, enabled=False) if value == "off" else cls.parse({"type": value}, base)
        if not isinstance(value, Mapping):
            raise UsageError(
                f"speculation is {value!r}; "
                "expected a type such as 'auto' or 'ngram', 'off', a bool or a mapping of options"
            )
        names = [f.name for f in fields(cls)]
        unknown = [str(key) for key in value if key not in names]
        if unknown:
            raise UsageError(f"unknown speculation option {', '.join(unknown)}; valid ones are: {', '.join(names)}")
        changes: dict[str, Any] = {"enabled": True, **value}
        if "draft_model" not in value and not _takes_weights(value.get("type", AUTO)):
            changes["draft_model"] = None  # named for another type
        if isinstance(changes.get("draft_model"), os.PathLike):
            changes["draft_model"] = os.fspath(changes["draft_model"])
        return replace(base, **changes)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SpeculationOptions:
        """Options from the `TS_SPEC` and `TS_SPEC_*` variables of a mapping; an empty value counts as not set.

        Naming a type enables speculation unless `TS_SPEC` says otherwise. Raises `UsageError`, naming the variable, for
        a value that cannot be read and for a `TS_SPEC_*` variable that does not exist (misspelt, it would do nothing).
        """
        known = tuple(_ENVIRONMENT)
        unknown = [n for n in environment if n.startswith(f"{ENVIRONMENT_PREFIX}_") and n not in known]
        if unknown:
            raise UsageError(f"unknown environment variable {', '.join(unknown)}; valid ones are: {', '.join(known)}")
        said = {option: (name, environment[name]) for name, option in _ENVIRONMENT.items() if environment.get(name)}
        changes: dict[str, Any] = {"enabled": "type" in said}
        changes |= {option: _read(name, option, text) for option, (name, text) in said.items()}
        try:
            return cls(**changes)
        except UsageError as error:
            named = ", ".join(f"{name}={text}" for name, text in said.values())
            raise UsageError(f"in the environment ({named}): {error}") from None

    def window(self, trunk: Trunk, speculator: Speculator) -> int:
        """Most tokens to draft in a step, >= 1: the explicit number, else the default, narrowed as the trunk likes."""
        wanted = self.draft
        if wanted is None:
            preferred = trunk.preferred_draft_window
            wanted = DEFAULT_DRAFT if preferred is None else min(DEFAULT_DRAFT, preferred)
        return max(1, min(wanted, speculator.max_draft_tokens))


def _takes_weights(kind: object) -> bool:
    """Whether drafter weights make sense with a type; of one that does not exist the check of options speaks."""
    return kind == AUTO or kind not in REGISTRY.names() or REGISTRY.requires_draft_head(str(kind))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read(name: str, option: str, text: str) -> object:
    """The value of one environment variable, as the type that its option wants."""
    try:
        if option == "draft":
            return int(text)
        if option == "pmin":
            return float(text)
    except ValueError:
        raise UsageError(f"environment variable {name} is {text!r}; expected a number") from None
    if option in _SWITCHES:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise UsageError(f"environment variable {name} is {text!r}; expected one of: {', '.join(_TRUE + _FALSE)}")
    return text
