"""Error messages for invalid bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter, ValidationError

from weir.serve.api.errors import APIError, invalid_query
from weir.serve.api.requests import parse_body
from weir.serve.api.schemas.anthropic import AnthropicBody, CountBody
from weir.serve.api.schemas.base import unknown_fields
from weir.serve.api.schemas.chat import ChatBody, TextBody
from weir.serve.api.schemas.ollama import OllamaChatBody
from weir.serve.api.schemas.responses import CompactBody, ConversationBody, ResponseBody
from weir.serve.api.sessions import ForkBody


def said(body: Any, kind: type[BaseModel] = ResponseBody) -> str:
    """Return the error message for a body, which is JSON text or is converted to it."""
    with pytest.raises(APIError) as found:
        parse_body((body if isinstance(body, str) else json.dumps(body)).encode(), kind)
    error = found.value.body["error"]
    assert len(json.dumps(error)) < 1000
    return str(error["message"])


def response(**fields: Any) -> dict[str, Any]:
    return {"model": "small", **fields}


@pytest.mark.parametrize("text", [r"\ud800", r"\udc00x", r"\ud800\u0041"])
def test_half_a_surrogate_pair_is_said_to_be_no_character(text):
    message = said(f'{{"model": "small", "input": "{text}"}}')
    assert "a lone surrogate" in message and "is not a character, at line 1 column " in message


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"model": "small", "input": "a", "input": "b"}', "input"),
        ('{"input": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        ('{"metadata": {"größe": "1", "größe": "2"}}', "größe"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_by_name(body, key):
    """Parsers take one of the two values, and not all take the same one."""
    for kind in (ResponseBody, ChatBody):
        assert f'has the key "{key}" twice, at line 1 column ' in said(body, kind)


def test_names_of_fields_are_repeated_only_as_far_as_they_are_short():
    assert "argument supplied: aaa" in said(response(**{"a" * 300_000: 1}))
    assert "argument supplied: nonsense" in said(response(nonsense=1))
    assert "argument supplied: max-tokens" in said(response(**{"max-tokens": 1}))
    assert said(response(metadata={"b" * 300_000: 5})).startswith("Invalid 'metadata.bbb")


def test_of_objects_that_are_too_large_their_size_is_told():
    many = {str(n): "x" for n in range(17)}
    assert "has 17 entries, and at most 16 are allowed" in said(response(metadata=many))
    bias = {str(n): 1.0 for n in range(4096)}
    assert "has 4096 entries, and at most 1024 are allowed" in said(response(logit_bias=bias))


@pytest.mark.parametrize("body", ["[]", "null", "5"])
def test_a_body_that_is_no_object_is_called_the_body(body):
    for kind in (ResponseBody, ChatBody):
        assert said(body, kind) == "the body must be a JSON object"


def test_all_that_may_stand_in_a_place_is_named():
    refused = said(response(input=[{"type": "input_image"}]))
    assert "one of 'message', 'function_call', 'function_call_output'" in refused
    assert "These are accepted and have no effect: 'reasoning'" in refused
    assert "'role'" in said(response(input=[{"content": "x"}])).replace("input[0].", "")
    choices = "'none', 'auto', 'required' or an object"
    assert choices in said(response(tool_choice=5))
    chat = response(messages=[{"role": "user", "content": "x"}], tool_choice=5)
    assert choices in said(chat, ChatBody)
    assert "'auto'" in said(response(tool_choice="any"))
    kinds = "'function' or 'allowed_tools'"
    assert kinds in said(response(tool_choice={"type": "x"}))
    assert kinds in said({**chat, "tool_choice": {"type": "x"}}, ChatBody)


@pytest.mark.parametrize("body", [{"turn": "x"}, {"id": "not a name"}])
def test_a_text_of_the_wrong_form_is_refused_without_a_pattern(body):
    refused = said(body, ForkBody)
    assert "must be the id of a turn" in refused or "must have 1 to 128 letters" in refused
    assert "^" not in refused


def test_of_a_schema_what_is_missing_is_named():
    def of(**form: Any) -> str:
        return said(response(text={"format": form}))

    assert "Missing: name and schema" in of(type="json_schema")
    assert "Missing: schema" in of(type="json_schema", name="x")
    assert "Missing: name" in of(type="json_schema", schema={})
    assert "allowed only with type: json_schema" in of(type="text", name="x")


def test_a_number_in_an_address_that_is_none_is_said_to_be_none():
    with pytest.raises(ValidationError) as found:
        TypeAdapter(int).validate_python("x")
    errors = [{**each, "loc": ("query", "limit")} for each in found.value.errors()]
    error = invalid_query(RequestValidationError(errors)).body["error"]
    assert error["message"] == "Invalid 'limit': must be a whole number."


def test_calls_of_one_message_have_ids_of_their_own():
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "function": {"name": "f", "arguments": "{}"}}

    def chat(*calls: str) -> dict[str, Any]:
        asked = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "tool_calls": [call(name) for name in calls]}
        return response(messages=[asked, answer])

    assert "two calls of one message have the id 'a'" in said(chat("a", "b", "a"), ChatBody)
    assert parse_body(json.dumps(chat("a", "b")).encode(), ChatBody)

    made = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    answer = {"role": "assistant", "content": "x"}
    result = {"type": "function_call_output", "call_id": "a", "output": "y"}
    assert "have the id 'a'" in said(response(input=[made, answer, made]))
    assert "have the id 'a'" in said({"items": [made, made]}, ConversationBody)
    assert parse_body(json.dumps(response(input=[made, result, made])).encode(), ResponseBody)


ASKED = {"role": "user", "content": "x"}
MADE = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
SAME = {"function": {"name": "f", "arguments": {}}}
"""A call in Ollama's format."""
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks")


@pytest.mark.parametrize("given", [{}, {"content": None}], ids=["missing", "null"])
@pytest.mark.parametrize("kind", [ChatBody, OllamaChatBody])
def test_a_message_without_content_is_refused(kind, given):
    for role in ("system", "user", "assistant", "tool", "developer"):
        if (kind, role) == (OllamaChatBody, "developer"):
            continue
        named = {"tool_call_id": "a"} if role == "tool" else {}
        message = {"role": role, **named, **given}
        whole = response(messages=[ASKED, message, ASKED])
        assert said(whole, kind) == "Missing required parameter: 'messages[1].content'."
        message["content"] = ""
        assert parse_body(json.dumps(whole).encode(), kind)


@pytest.mark.parametrize("given", [{}, {"content": None}], ids=["missing", "null"])
def test_an_answer_of_calls_refusals_or_thoughts_needs_no_content(given):
    for kind, others in (
        (ChatBody, [{"tool_calls": [MADE]}, {"refusal": "No."}, {"refusal": ""}]),
        (OllamaChatBody, [{"tool_calls": [SAME]}]),
    ):
        for other in (*others, *({name: "Hm."} for name in THOUGHTS)):
            message = {"role": "assistant", **given, **other}
            whole = response(messages=[ASKED, message, ASKED])
            assert parse_body(json.dumps(whole).encode(), kind).history[1].content in ("", "No.")
        for other in ({"tool_calls": []}, {"thinking": ""}, {"refusal": None}, {"id": "x"}):
            whole = response(messages=[ASKED, {"role": "assistant", **given, **other}, ASKED])
            assert "'messages[1].content'" in said(whole, kind)


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_the_other_apis_need_content_too(role):
    for kind, field in (
        (ResponseBody, "input"),
        (CompactBody, "input"),
        (ConversationBody, "items"),
        (AnthropicBody, "messages"),
        (CountBody, "messages"),
    ):
        named = {} if kind is ConversationBody else {"model": "small"}
        for given in ({}, {"content": None}):
            whole = {**named, field: [{"role": role, **given}]}
            assert said(whole, kind) == f"Missing required parameter: '{field}[0].content'."
        most = {"max_tokens": 1} if kind is AnthropicBody else {}
        for content in ("", []):
            whole = {**named, **most, field: [{"role": role, "content": content}]}
            assert parse_body(json.dumps(whole).encode(), kind)


@pytest.mark.parametrize("is_null", [False, True], ids=["missing", "null"])
@pytest.mark.parametrize(
    ("kind", "path", "name", "around"),
    [
        (ChatBody, "messages[0].content[0]", "text", {"type": "text"}),
        (ChatBody, "messages[0].content[0]", "refusal", {"type": "refusal"}),
        (ResponseBody, "input[0].content[0]", "text", {"type": "input_text"}),
        (AnthropicBody, "messages[0].content[0]", "text", {"type": "text"}),
        (ResponseBody, "input[0]", "output", {"type": "function_call_output", "call_id": "a"}),
        (ChatBody, "", "messages", {"model": "small"}),
        (AnthropicBody, "", "messages", {"model": "small"}),
        (CountBody, "", "messages", {"model": "small"}),
        (TextBody, "", "prompt", {"model": "small"}),
    ],
)
def test_null_is_as_good_as_nothing_where_a_text_is_required(kind, path, name, around, is_null):
    body = {**around, name: None} if is_null else around
    field, _, inside = path.partition("[0]")
    if path:
        body = response(**{field: [{"role": "user", "content": [body]} if inside else body]})
    dotted = f"{path}.{name}" if path else name
    assert said(body, kind) == f"Missing required parameter: '{dotted}'."


def test_in_ollamas_api_null_is_no_messages():
    body = parse_body(json.dumps(response(messages=None)).encode(), OllamaChatBody)
    assert body.history == []


def test_a_byte_order_mark_in_front_of_a_body_is_passed_over():
    body = json.dumps(response(input="x")).encode("utf-8-sig")
    for given in (body, bytearray(body)):
        assert parse_body(given, ResponseBody).input == "x"
    with pytest.raises(APIError):
        parse_body(body[:3] + body, ResponseBody)


def test_a_name_in_a_warning_is_escaped_as_in_json():
    """A header is ASCII, and clients must recognize their field in it."""
    messages = [{"role": "user", "content": "Hi", "größe": 1, 'a"\n\x7f': 1, "x" * 99: 1}]
    body = parse_body(json.dumps(response(messages=messages)).encode(), ChatBody)
    found = list(unknown_fields(body.messages, "messages"))
    assert found[0] == r"messages[0].gr\u00f6\u00dfe"
    assert found[1] == r"messages[0].a\"\n\u007f"
    assert found[2] == f"messages[0].{'x' * 64}..."
