"""Constrained answers: every answer meets its constraint, whatever the model would like; what cannot be met is told at once."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.gguf_writer import write_gguf
from tests.tiny_models import TinyLlama, metadata, tensors, write_tiny
from tests.tiny_vocab import KINDS, extended
from tsgg import LLM
from tsgg.errors import TsggError, UsageError
from tsgg.sampling import Constraints, RowSampler, SamplingParams
from tsgg.sampling.constraint import MOST_GRAMMARS
from tsgg.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "$defs": {"tag": {"type": "string", "pattern": "^[a-z]{1,4}$"}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["alpha", "beta"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
KINDS_OF_TEXT = list(KINDS)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_tiny(tmp_path_factory.mktemp("constraint") / "tiny.gguf", TinyLlama()), n_ctx=512) as llm:
        yield llm


def answer(constraints: Constraints, seed: int = 0, **fields: Any) -> RowSampler:
    """Drawn from random rows until it ends: a model that has no idea."""
    size = constraints._vocab_size
    params = SamplingParams.parse(fields, SamplingParams(temperature=1, seed=seed))
    tokenizer = constraints._tokenizer
    text = tokenizer.stream()
    sampler = RowSampler(
        params,
        size,
        end_of_generation=tokenizer.end_of_generation,
        decode_step=text.push,
        decode_end=text.flush,
        constraint=constraints.start(params),
    )
    rng = np.random.default_rng(seed)
    while sampler.finished is None:
        sampler.sample((4 * rng.standard_normal(size)).astype(np.float32), len(sampler.tokens))
    return sampler


def constraints_of(kind: str, *texts: str, types: list[int] | None = None) -> Constraints:
    tokenizer = Tokenizer.from_metadata(extended(KINDS[kind], list(texts), types or [1] * len(texts)))
    return Constraints(tokenizer, tokenizer.vocab_size)


# --- every answer meets its constraint --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS_OF_TEXT)
@pytest.mark.parametrize("seed", range(5))
def test_an_answer_of_noise_is_valid_json_with_every_kind_of_tokenizer(kind: str, seed: int) -> None:
    sampler = answer(constraints_of(kind), seed, json_schema=SCHEMA)
    assert (sampler.finished, sampler.stop_reason) == ("stop", None)
    text = sampler.visible_text()
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == json.dumps(json.loads(text), ensure_ascii=False) or "\\" in text, "laid out as json.dumps does"


@pytest.mark.parametrize("kind", KINDS_OF_TEXT)
def test_an_answer_of_noise_matches_its_expression_and_is_one_of_the_choices(kind: str) -> None:
    constraints = constraints_of(kind)
    options = ["a.b", "abc\n", "ünïcode", "a|b", "0"]
    for seed in range(8):
        assert re.fullmatch(r"[a-c]{2,5}-\d/x?", answer(constraints, seed, regex=r"[a-c]{2,5}-\d/x?").visible_text())
        assert answer(constraints, seed, choice=options).visible_text() in options


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" ("+" term)*\nterm: /[bc]/ | "(" start ")"',
        'root ::= "a" ("+" term)*\nterm ::= [bc] | "(" root ")"',
    ],
    ids=["lark", "gbnf"],
)
def test_an_answer_is_a_sentence_of_its_grammar(grammar: str) -> None:
    constraints = constraints_of("gpt2")
    bias = dict.fromkeys(constraints._tokenizer.end_of_generation, 1.0)
    texts = {
        answer(constraints, seed, grammar=grammar, logit_bias=bias, max_tokens=500).visible_text() for seed in range(12)
    }
    assert len(texts) > 3
    for text in texts:
        while "(" in text:  # the innermost brackets first
            text, found = re.subn(r"\(a(\+[bc])*\)", "b", text)
            assert found
        assert re.fullmatch(r"a(\+[bc])*", text)


def test_any_object_is_asked_for_by_true() -> None:
    for seed in range(4):
        sampler = answer(constraints_of("gpt2"), seed, json_schema=True, max_tokens=2000)
        if sampler.finished == "stop":
            assert isinstance(json.loads(sampler.visible_text()), dict)


def test_where_more_may_follow_the_end_token_is_the_models_choice() -> None:
    constraints = constraints_of("gpt2")
    ends = constraints._tokenizer.end_of_generation
    sampler = answer(constraints, regex="a+", logit_bias=dict.fromkeys(ends, 50.0))
    assert sampler.visible_text() == "a" and sampler.stop_reason in ends
    sampler = answer(constraints, regex="a{1,3}", logit_bias=dict.fromkeys(ends, -50.0))
    assert sampler.visible_text() == "aaa" and sampler.stop_reason is None, "complete: no end token is needed"


# --- control tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS_OF_TEXT)
def test_no_text_is_a_control_token_and_no_control_token_is_text(kind: str) -> None:
    constraints = constraints_of(kind, "<tool>", "<|mark|>", "<call>", "<unused0>", types=[4, 4, 4, 5])
    tokenizer = constraints._tokenizer
    texts = tokenizer.vocabulary.texts
    named = [
        token for token, text in enumerate(texts) if len(text) > 3 and text[0] + text[-1] == "<>" and "x" not in text
    ]
    bias = {token: 100.0 for token in named}
    for text in ("<|im_end|></s>", "<tool>x<|mark|>", "<call><unused0>"):
        sampler = answer(constraints, choice=[text], logit_bias=bias)
        assert not set(sampler.tokens) & set(named)
        assert tokenizer.decode_bytes(sampler.tokens).decode() == text


def test_padding_behind_the_vocabulary_is_never_allowed(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    matcher = Constraints(tokenizer, llm.model.vocab_size).start(SamplingParams(regex="(?s:.*)x"))
    assert matcher is not None
    allowed = matcher.allowed()
    assert allowed.shape == (llm.model.vocab_size,)
    assert not allowed[sorted(tokenizer.marks)].any() and allowed[tokenizer.vocabulary.ids["x"]]


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": {"type": "strin"}}, "json_schema cannot be used: Invalid type: strin"),
        ({"json_schema": {"enum": []}}, "Unsatisfiable"),
        ({"json_schema": {"$ref": "#/nope"}}, "does not exist"),
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
        ({"regex": "("}, "regex cannot be used: .*unclosed group"),
        ({"regex": "a(?=b)"}, "look-ahead"),
        ({"regex": r"[^\s\S]"}, "regex cannot be met"),
        ({"regex": "a{0}"}, "no text but the empty one"),
        ({"grammar": "start: nope"}, 'unknown name: "nope"'),
        ({"grammar": 'start: x\nx: x "a"'}, "grammar cannot be met"),
        ({"grammar": "root ::= x"}, "grammar cannot be read: Rule 'x' not found"),
        ({"grammar": "start: <nope>"}, "unknown special token"),
        ({"choice": ["abc"], "stop": "b"}, "stop string 'b' can stand in an answer that choice describes"),
        ({"regex": r"[0-9]{3}/", "stop": ["x", "4/"]}, "stop string '4/' can stand"),
        ({"json_schema": True, "stop": "}"}, "stop string '}' can stand"),
        ({"grammar": 'start: "a"', "stop": "b"}, "stop string 'b' can stand"),
        ({"regex": "a", "stop_token_ids": [98]}, "stop_token_ids names 98"),
        ({"regex": "[ab]c", "logit_bias": {97: -math.inf, 98: -math.inf}}, "logit_bias forbids every token that regex"),
        ({"choice": ["abc"], "logit_bias": {99: -math.inf}}, r"at one place, such as 'c' \(99\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_told_before_anything_is_computed(llm: LLM, fields: dict[str, Any], message: str) -> None:
    before = llm.engine.stats().steps
    with pytest.raises(UsageError, match=message):
        llm.generate("the", **fields)
    with pytest.raises(UsageError, match=message):
        llm.stream("the", **fields)
    assert llm.engine.stats().steps == before


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": ["abc"], "stop": ["d", "<|end|>"], "stop_token_ids": [263]},
        {"regex": "[a-c]{2}", "stop": "abc"},
        {"json_schema": {"enum": ["a", 1]}, "stop": ["\n", "\n\n"]},
        {"regex": "[ab]c", "logit_bias": {97: -math.inf}},
    ],
)
def test_stops_and_biases_that_leave_a_way_are_no_conflict(llm: LLM, fields: dict[str, Any]) -> None:
    assert llm.generate("the", temperature=0, **fields).finish_reason == "stop"


def test_without_a_vocabulary_a_constraint_is_refused_and_not_ignored() -> None:
    with pytest.raises(UsageError, match="regex needs the model's vocabulary"):
        RowSampler(SamplingParams(regex="a"), 10)


def test_a_token_that_does_not_follow_is_an_error_of_the_caller() -> None:
    matcher = constraints_of("gpt2").start(SamplingParams(regex="ab"))
    assert matcher is not None
    with pytest.raises(TsggError, match="does not follow"):
        matcher.consume(ord("b"))


# --- in the API -------------------------------------------------------------------------------------------------------


def test_answers_side_by_side_have_a_state_each(llm: LLM) -> None:
    both = llm.generate(["the", "hell"], json_schema=SCHEMA, n=3, temperature=1.5, seed=1, max_tokens=200)
    texts = [choice.text for result in both for choice in result.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == len(texts)
    alone = llm.generate("hell", json_schema=SCHEMA, temperature=1.5, seed=2, max_tokens=200)
    assert alone.tokens == both[1].choices[1].tokens


def test_too_few_tokens_end_an_answer_as_any_other(llm: LLM) -> None:
    result = llm.generate("the", json_schema=SCHEMA, max_tokens=4)
    assert (result.finish_reason, len(result.tokens)) == ("length", 4)


def test_log_probabilities_are_those_of_the_raw_row(llm: LLM) -> None:
    free = llm.generate("the", max_tokens=1, temperature=0, logprobs=5)
    bound = llm.generate("the", choice=["q"], temperature=0, logprobs=5)
    assert bound.text == "q" and bound.logprobs[0].top == free.logprobs[0].top


def test_logits_processors_see_the_row_before_the_constraint(llm: LLM) -> None:
    def prefer_c(ids: Any, row: Any) -> Any:
        assert np.isfinite(row).all()
        row[ord("c")] = 100
        row[ord("z")] = 200
        return row

    result = llm.generate("the", regex="[a-c]{3}", logits_processors=prefer_c)
    assert llm.tokenizer.decode(result.tokens) == "ccc"


def test_a_constraint_that_was_compiled_is_not_compiled_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate("the", regex="[xyz]{2}")
    monkeypatch.setattr(Constraints, "_compile", None)
    assert llm.generate("the", regex="[xyz]{2}").finish_reason == "stop"


def test_compiled_constraints_do_not_pile_up() -> None:
    constraints = constraints_of("gpt2")
    for number in range(MOST_GRAMMARS + 9):
        constraints.start(SamplingParams(choice=[str(number)]))
    assert len(constraints._grammars) == MOST_GRAMMARS


def test_a_file_without_a_tokenizer_refuses_constraints(tmp_path: Path) -> None:
    values = {key: value for key, value in metadata(TinyLlama()).items() if not key.startswith("tokenizer.")}
    path = write_gguf(tmp_path / "bare.gguf", values, list(tensors(TinyLlama())))
    with LLM(path, n_ctx=64) as bare, pytest.raises(UsageError, match="has no tokenizer"):
        bare.generate([1, 2], regex="a")
