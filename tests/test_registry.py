"""Which speculator runs, or why none: the registry, and what the operator may say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import ScriptedDrafter, ScriptedSequence, ScriptedTrunk, empty
from tsgg.errors import UsageError
from tsgg.speculative import (
    REGISTRY,
    Decline,
    Draft,
    DraftContext,
    DraftHead,
    HeadRows,
    Sequence,
    SpeculationOptions,
    Speculator,
    SpeculatorRegistry,
    Trunk,
)
from tsgg.speculative.ngram import NgramSpeculator

ON = SpeculationOptions(enabled=True)


class Head:
    kind = "per_token"
    block_size = 1
    taps = ()
    resumes_after_gap = False

    def draft(self, rows: list[HeadRows], n_max: int, min_prob: float) -> list[Draft]:
        return [Draft() for _ in rows]

    def forget(self, sequence: Sequence) -> None:
        pass


class Outside(ScriptedDrafter):
    name = "outside"

    def __init__(self) -> None:
        super().__init__(empty)


def outside(trunk: Trunk, options: SpeculationOptions, head: DraftHead | None) -> Speculator | None:
    return Outside()


def for_blocks_only(trunk: Trunk, options: SpeculationOptions, head: DraftHead | None) -> Speculator | None:
    assert head is not None
    return Outside() if head.kind == "block" else None


@pytest.fixture
def registry() -> SpeculatorRegistry:
    registry = SpeculatorRegistry()
    registry.register("lookup", lambda trunk, options, head: NgramSpeculator())
    registry.register("head", outside, requires_draft_head=True)
    return registry


def test_a_speculator_defined_outside_the_package_runs_under_its_registered_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(REGISTRY, "_entries", dict(REGISTRY._entries))
    with pytest.raises(UsageError, match="'outside'"):
        SpeculationOptions(type="outside")
    REGISTRY.register("outside", outside)
    options = SpeculationOptions.parse("outside")
    assert isinstance(REGISTRY.create(options.type, ScriptedTrunk(), options), Outside)


def test_ngram_is_registered_and_takes_the_confidence_gate() -> None:
    text = [1, 2, 3, 9, 1, 2, 3]
    for pmin, drafts in ((None, True), (0.0, True), (1.0, False)):
        options = dataclasses.replace(ON, type="ngram", pmin=pmin)
        speculator = REGISTRY.create("ngram", ScriptedTrunk(), options)
        assert isinstance(speculator, NgramSpeculator)
        sequence = ScriptedSequence()
        sequence.tokens = text[:-1]
        speculator.open(0, sequence)
        (draft,) = speculator.propose([DraftContext(0, 3, 6, 8)])
        assert bool(draft.tokens) == drafts


def test_a_name_can_be_taken_once(registry: SpeculatorRegistry) -> None:
    for name in ("lookup", "auto", ""):
        with pytest.raises(UsageError, match="taken"):
            registry.register(name, outside)
    assert registry.names() == ("lookup", "head")


def test_an_unknown_name_is_a_usage_error_that_lists_the_known(registry: SpeculatorRegistry) -> None:
    with pytest.raises(UsageError, match="lookup, head"):
        registry.create("nothing", ScriptedTrunk(), ON)


def test_auto_prefers_loaded_drafter_weights_over_lookup(registry: SpeculatorRegistry) -> None:
    assert isinstance(registry.create("auto", ScriptedTrunk(), ON, Head()), Outside)  # type: ignore[arg-type]
    assert isinstance(registry.create("auto", ScriptedTrunk(), ON), NgramSpeculator)


def test_auto_passes_over_an_algorithm_that_cannot_serve_the_head() -> None:
    registry = SpeculatorRegistry()
    registry.register("block", for_blocks_only, requires_draft_head=True)
    registry.register("lookup", lambda trunk, options, head: NgramSpeculator())
    assert isinstance(registry.create("auto", ScriptedTrunk(), ON, Head()), NgramSpeculator)  # type: ignore[arg-type]
    declined = registry.create("block", ScriptedTrunk(), ON, Head())  # type: ignore[arg-type]
    assert isinstance(declined, Decline) and "block cannot serve this draft head" in declined.reason


def test_a_missing_head_is_a_reason_not_an_error(registry: SpeculatorRegistry) -> None:
    declined = registry.create("head", ScriptedTrunk(), ON)
    assert isinstance(declined, Decline) and "needs drafter weights" in declined.reason


def test_a_refusing_trunk_is_never_drafted_for(registry: SpeculatorRegistry) -> None:
    trunk = ScriptedTrunk(refusal="a verify row differs from its decode")
    for name in ("auto", "lookup", "head"):
        declined = registry.create(name, trunk, ON, Head())  # type: ignore[arg-type]
        assert isinstance(declined, Decline) and "a verify row differs" in declined.reason


def test_the_speed_verdict_stops_auto_without_weights_but_not_a_name_that_was_typed(
    registry: SpeculatorRegistry,
) -> None:
    trunk = ScriptedTrunk()
    trunk.speculation_profitable = False
    declined = registry.create("auto", trunk, ON)
    assert isinstance(declined, Decline) and "slower" in declined.reason
    assert isinstance(registry.create("lookup", trunk, ON), NgramSpeculator)
    assert isinstance(registry.create("auto", trunk, ON, Head()), Outside)  # type: ignore[arg-type]


def test_switched_off_is_a_reason_too(registry: SpeculatorRegistry) -> None:
    declined = registry.create("auto", ScriptedTrunk(), SpeculationOptions())
    assert isinstance(declined, Decline) and "off" in declined.reason


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("enabled", 1),
        ("type", "medusa"),
        ("type", None),
        ("type", ["ngram"]),
        ("draft", 0),
        ("draft", 65),
        ("draft", 2.0),
        ("draft", True),
        ("draft", "8"),
        ("pmin", -0.1),
        ("pmin", 1.1),
        ("pmin", float("nan")),
        ("pmin", "0.5"),
        ("draft_model", ""),
        ("draft_model", 3),
    ],
)
def test_a_wrong_option_is_a_usage_error_that_names_it_and_what_was_found(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"(?s)'{option}' is .*expected"):
        SpeculationOptions.parse({option: value})


@pytest.mark.parametrize("draft", [1, 8, 64, None])
@pytest.mark.parametrize("pmin", [0, 0.0, 1, 0.35, None])
def test_values_inside_the_bounds_are_kept(draft: int | None, pmin: float | None) -> None:
    options = SpeculationOptions.parse({"draft": draft, "pmin": pmin, "draft_model": Path("d.gguf")})
    assert options == SpeculationOptions(True, "auto", draft, pmin, "d.gguf")


def test_drafter_weights_for_a_type_that_uses_none_are_a_contradiction() -> None:
    with pytest.raises(UsageError, match="uses no drafter weights"):
        SpeculationOptions.parse({"type": "ngram", "draft_model": "d.gguf"})


def test_an_unknown_key_is_a_usage_error_that_names_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"num_speculative_tokens; .*enabled, type, draft, pmin, draft_model"):
        SpeculationOptions.parse({"num_speculative_tokens": 4})


def test_what_the_caller_says_goes_on_top_of_the_base() -> None:
    base = SpeculationOptions(True, "ngram", 4, 0.5)
    off = dataclasses.replace(base, enabled=False)
    assert SpeculationOptions.parse() == SpeculationOptions(enabled=False)
    assert SpeculationOptions.parse(None, base) == base
    assert SpeculationOptions.parse(False, base) == SpeculationOptions.parse("off", base) == off
    assert SpeculationOptions.parse(True, off) == base
    assert SpeculationOptions.parse("auto", off) == dataclasses.replace(base, type="auto")
    assert SpeculationOptions.parse({"draft": 2}, off) == dataclasses.replace(base, draft=2)
    assert SpeculationOptions.parse({"enabled": False, "draft": 2}, base) == dataclasses.replace(off, draft=2)
    assert SpeculationOptions.parse(ON, base) is ON


@pytest.mark.parametrize("value", [3, 0.5, ["ngram"], object()])
def test_anything_else_is_a_usage_error(value: object) -> None:
    with pytest.raises(UsageError, match="expected a type"):
        SpeculationOptions.parse(value)


def test_the_environment_is_read_from_the_mapping_that_is_passed_in() -> None:
    read = SpeculationOptions.from_environment
    assert read({}) == read({"PATH": "/", "TS_THREADS": "2", "TS_SPEC_TYPE": ""}) == SpeculationOptions()
    assert read({"TS_SPEC": "1"}) == read({"TS_SPEC": "on"}) == ON
    assert read({"TS_SPEC_TYPE": "ngram"}) == SpeculationOptions(True, "ngram")
    assert read({"TS_SPEC_TYPE": "ngram", "TS_SPEC": "0"}) == SpeculationOptions(False, "ngram")
    assert read({"TS_SPEC_ADAPTIVE": "0"}) == SpeculationOptions(adaptive=False)
    everything = {"TS_SPEC": "1", "TS_SPEC_DRAFT": "4", "TS_SPEC_PMIN": "0.5", "TS_SPEC_DRAFT_MODEL": "d.gguf"}
    assert read(everything) == SpeculationOptions(True, "auto", 4, 0.5, "d.gguf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TS_SPEC", "maybe"),
        ("TS_SPEC_TYPE", "medusa"),
        ("TS_SPEC_DRAFT", "many"),
        ("TS_SPEC_DRAFT", "100"),
        ("TS_SPEC_PMIN", "high"),
        ("TS_SPEC_PMIN", "nan"),
        ("TS_SPEC_WINDOW", "4"),
    ],
)
def test_a_wrong_or_misspelt_variable_is_a_usage_error_that_names_it(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        SpeculationOptions.from_environment({name: value})


def test_a_type_without_weights_leaves_the_drafter_file_of_the_defaults_out() -> None:
    base = SpeculationOptions(enabled=True, draft_model="head.gguf")
    assert SpeculationOptions.parse("suffix", base).draft_model is None
    assert SpeculationOptions.parse({"type": "ngram", "draft": 2}, base).draft_model is None
    assert SpeculationOptions.parse("draft-head", base).draft_model == "head.gguf"
    with pytest.raises(UsageError, match="no drafter weights"):
        SpeculationOptions.parse({"type": "ngram", "draft_model": "head.gguf"}, base)
