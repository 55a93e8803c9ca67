"""`response_format`, requested with OpenAI's client, and a model with random weights."""

from __future__ import annotations

import enum
import json

import jsonschema
import openai
import pytest
from anything import random_client
from pydantic import BaseModel, Field
from servers import serving

USER = {"role": "user", "content": "Who?"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "maxItems": 2},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
    "$defs": {"friend": {"enum": ["Ann", "Bob"]}},
}


@pytest.fixture(scope="module")
def client():
    with serving(random_client()) as server:
        yield server.client()


def ask(client, messages=(USER,), **given):
    given = {"model": "small", "max_tokens": 400, "temperature": 1, "seed": 1, **given}
    return client.chat.completions.create(messages=list(messages), **given)


def schema_of(schema, **given) -> dict:
    named = {"name": "person", "schema": schema, **given}
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize("strict", [True, False])
def test_every_answer_is_valid_to_the_schema(client, strict):
    answer = ask(client, n=3, response_format=schema_of(PERSON, strict=strict))
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert len({choice.message.content for choice in answer.choices}) == 3
    chunks = list(ask(client, n=3, response_format=schema_of(PERSON), stream=True))
    for choice in answer.choices:
        pieces = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(p.delta.content or "" for p in pieces) == choice.message.content
        assert pieces[-1].finish_reason == "stop"


def test_the_client_reads_a_type_of_its_own(client):
    class Kind(enum.StrEnum):
        CAT = "cat"
        DOG = "dog"

    class Pet(BaseModel):
        kind: Kind
        tail: bool
        legs: list[int] = Field(max_length=2)

    given = {"model": "small", "messages": [USER], "max_tokens": 600}
    message = client.chat.completions.parse(response_format=Pet, seed=2, **given).choices[0].message
    assert isinstance(message.parsed, Pet)
    with client.chat.completions.stream(response_format=Pet, seed=2, **given) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == message.parsed
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(response_format=Pet, **given | {"max_tokens": 4})


def test_an_answer_that_has_no_room_ends_by_its_length(client):
    answer = ask(client, response_format=schema_of(PERSON))
    whole, tokens = answer.choices[0].message.content, answer.usage.completion_tokens
    part = ask(client, response_format=schema_of(PERSON), max_tokens=10).choices[0]
    assert part.finish_reason == "length"
    assert whole.startswith(part.message.content)
    exact = ask(client, response_format=schema_of(PERSON), max_tokens=tokens).choices[0]
    assert (exact.finish_reason, exact.message.content) == ("stop", whole)


def test_any_json_object(client):
    answers = ask(client, n=3, response_format={"type": "json_object"}, max_tokens=3000)
    for choice in answers.choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.startswith("{")
    assert "stop" in {choice.finish_reason for choice in answers.choices}
    text = ask(client, response_format={"type": "text"}, max_tokens=5).choices
    assert text == ask(client, max_tokens=5).choices


def test_a_conversation_goes_on_after_an_answer_with_a_schema(client):
    first = ask(client, response_format=schema_of(PERSON))
    said = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(client, [USER, said, USER], max_tokens=3)
    told = second.usage.prompt_tokens_details.cached_tokens
    assert told == first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_a_schema_that_fails_on_the_way_harms_nobody(client):
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(700)}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, n=2, response_format=schema_of(wide))
    assert error.value.code == "invalid_json_schema"
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, response_format=schema_of({"type": "king"}))
    assert error.value.param == "response_format.json_schema.schema"
    good = ask(client, response_format=schema_of(PERSON)).choices[0]
    jsonschema.validate(json.loads(good.message.content), PERSON)


def test_a_model_without_template_and_end_answers_with_a_schema_too():
    with serving(random_client(template=None, rows=1)) as server:
        answer = ask(server.client(), response_format=schema_of(PERSON), seed=3).choices[0]
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content), PERSON)
