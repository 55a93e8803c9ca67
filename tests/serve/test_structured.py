"""Answers with a required structure: masks over tokens, and schemas that cost too much."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import make_tokenizer

from weir.serve import Sampler, SamplingParams
from weir.serve.engine.sampler import sample
from weir.serve.structured import BadSchema, GrammarCompiler, check_schema
from weir.stream import Sampling

TOKENIZER = make_tokenizer()
(END,) = ENDS = frozenset([TOKENIZER.convert_tokens_to_ids("<|im_end|>")])
GRAMMARS = GrammarCompiler(TOKENIZER, ENDS, len(TOKENIZER))


def said(mask, seed=0, most=2000) -> str:
    """Generate text from a model for which all tokens are equally likely."""
    sampler = Sampler(
        SamplingParams(sampling=Sampling(temperature=1.0), seed=seed), constraint=mask
    )
    tokens = []
    while not sampler.done and len(tokens) < most:
        (token,) = sample([sampler], torch.zeros(1, len(TOKENIZER)))
        if isinstance(token, Exception):
            raise token
        tokens.append(token.id)
    assert sampler.done
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


LEAVES = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
    st.builds(lambda n: {"type": "integer", "minimum": n, "maximum": n + 9}, st.integers(-99, 99)),
    st.builds(lambda *these: {"enum": list(these)}, st.text(max_size=4), st.booleans()),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, None]}}]),
    st.just({"type": "string", "pattern": "^[a-f]{2}-\\d{3}$"}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda below: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, below),
        st.builds(lambda one, other: {"anyOf": [one, other]}, below, below),
        st.builds(
            lambda named: {
                "type": "object",
                "properties": named,
                "required": list(named)[:1],
                "additionalProperties": False,
            },
            st.dictionaries(st.text('abé" \\', min_size=1, max_size=3), below, max_size=3),
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(SCHEMAS, st.integers(0, 2**31))
def test_whatever_a_model_says_is_valid_to_the_schema(schema, seed):
    answer = said(GRAMMARS.compile_schema(schema, strict=True)(), seed)
    jsonschema.validate(json.loads(answer), schema)


def test_nobody_fills_an_answer_with_spaces():
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    answers = [said(GRAMMARS.compile_schema(schema, strict=True)(), seed) for seed in range(20)]
    assert {json.dumps(json.loads(answer)) for answer in answers} == {"[1, 1, 1]"}
    assert any("\n" in answer for answer in answers)
    assert max(len(run) for answer in answers for run in re.findall(r"\s+", answer)) <= 9
    schema["x-guidance"] = {"whitespace_pattern": " {1,100000}", "lenient": True}
    assert len(said(GRAMMARS.compile_schema(schema, strict=True)())) < 200


def test_an_answer_ends_by_itself_where_no_token_ends_one():
    shape = GrammarCompiler(TOKENIZER, frozenset(), len(TOKENIZER)).compile_schema(
        {"type": "integer"}, strict=True
    )
    assert re.fullmatch(r"-?\d", said(shape()))
    number = GRAMMARS.compile_schema({"type": "integer"}, strict=True)
    longer = [said(number(), seed) for seed in range(30)]
    assert max(map(len, longer)) > 2


def test_answers_of_one_shape_do_not_know_of_each_other():
    shape = GRAMMARS.compile_schema({"enum": ["ab", "cd"]}, strict=True)
    one, other = shape(), shape()
    for token in TOKENIZER('"a')["input_ids"]:
        one.accept(token)
    for token in TOKENIZER('"c')["input_ids"]:
        other.accept(token)
    allowed = [mask.allow(torch.zeros(len(TOKENIZER))).argmax().item() for mask in (one, other)]
    assert TOKENIZER.decode(allowed) == "bd"
    with pytest.raises(BadSchema, match="does not follow its grammar"):
        one.accept(END)
    other.accept(allowed[1])


def test_a_grammar_that_becomes_too_complex_is_given_up():
    # Each property is optional, so any of hundreds can follow after `{`.
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(700)}}
    mask = GRAMMARS.compile_schema(wide, strict=True)()
    with pytest.raises(BadSchema, match="does not follow its grammar"):
        said(mask)


def test_probabilities_told_are_those_before_the_mask():
    mask = GRAMMARS.compile_schema({"const": True}, strict=True)()
    sampler = Sampler(SamplingParams(logprobs=2), constraint=mask)
    logits = torch.arange(len(TOKENIZER), dtype=torch.float32)
    (choice,) = sample([sampler], logits[None])
    assert TOKENIZER.decode([choice.id]) == "t"
    assert choice.logprob == pytest.approx(float(logits.log_softmax(-1)[choice.id]))
    assert [token for token, _ in choice.top] == [len(TOKENIZER) - 1, len(TOKENIZER) - 2]


def test_a_model_may_have_more_or_fewer_logits_than_its_tokenizer_has_tokens():
    for size in (len(TOKENIZER) + 61, 200):
        mask = GrammarCompiler(TOKENIZER, ENDS, size).compile_schema({"const": True}, strict=True)()
        assert TOKENIZER.decode([mask.allow(torch.zeros(size)).argmax().item()]) == "t"


def nested(depth, wrap=lambda below: {"items": below}):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


BOMBS = {
    "deep": (nested(60), "deeper than 48"),
    "very deep": (nested(5000), "deeper than 48"),
    "large": ({"enum": ["x" * 1000] * 70}, "more than 65,536 bytes"),
    "no number": ({"minimum": float("nan")}, "numbers that JSON does not allow"),
    "repetitions of repetitions": (
        {"pattern": "^(ab{300}){300}$"},
        ("patterns, with repetitions written out"),
    ),
    "hidden ones": ({"anyOf": [{"patternProperties": {"((a{40}){40}){40}": {}}}]}, "patterns"),
    "many": ({"allOf": [{"pattern": "[a-z]{999}"}] * 3}, "patterns, with repetitions written out"),
    "an absurd one": ({"pattern": "a{99999999999999}"}, "patterns, with repetitions written out"),
    "multiples": ({"type": "integer", "multipleOf": 999_983}, "least common multiple 999,983"),
    "multiples of several": (
        {"allOf": [{"multipleOf": 97}, {"multipleOf": 0.89}]},
        "least common multiple 8,633",
    ),
    "enormous multiples": ({"multipleOf": 1e300}, "multipleOf"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_take_for_ever_is_refused_before_it_is_compiled(name):
    schema, why = BOMBS[name]
    with pytest.raises(BadSchema, match=why):
        check_schema(schema)
    with pytest.raises(BadSchema, match=why):
        GRAMMARS.compile_schema(schema, strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "king"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/none"},
        {"allOf": [{"$ref": "#"}]},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"enum": []},
    ],
)
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(BadSchema):
        GRAMMARS.compile_schema(schema, strict=False)


def test_a_schema_that_is_itself_and_nothing_else_is_refused_in_words():
    with pytest.raises(BadSchema, match=r"a \$ref leads only to itself"):
        GRAMMARS.compile_schema({"$ref": "#"}, strict=True)
    again = {"type": "object", "properties": {"more": {"$ref": "#"}}, "maxProperties": 1}
    GRAMMARS.compile_schema(again, strict=False)


def test_what_is_not_known_is_left_aside_unless_strict():
    schema = {"const": 1, "not": {"const": 2}}
    assert said(GRAMMARS.compile_schema(schema, strict=False)()) == "1"
    with pytest.raises(BadSchema, match="not"):
        GRAMMARS.compile_schema(schema, strict=True)


def test_no_more_of_a_schema_is_looked_at_than_it_may_have():
    looked = 0

    class Many(list):
        def __iter__(self):
            nonlocal looked
            for each in super().__iter__():
                looked += 1
                yield each

    with pytest.raises(BadSchema, match="more than 65,536 bytes"):
        check_schema({"enum": Many(["abc"] * 1_000_000)})
    assert looked < 20_000


def test_usual_schemas_are_not_too_large():
    for schema in (
        {"pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2})?$"},
        {"pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"},
        {"multipleOf": 0.01},
        {"properties": {"pattern": {"type": "string"}, "multipleOf": {"type": "number"}}},
        {"pattern": r"[\]{9}(]{1,200}\{99999\}"},
    ):
        check_schema(schema)
