"""Bodies that agents send, sent to every route.

Each field is honored, skipped with a warning, or refused by name (docs/requests.md). No route
fails.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from servers import make_client, serving
from test_leniency import STRICT, as_codex_sends_it

from weir.serve import Limits
from weir.serve.api.schemas.base import is_nothing

JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "Hello there"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Yes."}
ROUTES = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/completions",
    "/api/chat",
    "/api/generate",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
)
CHATS = tuple(one for one in ROUTES if one not in ("/v1/completions", "/api/generate"))
NAMED = ("reasoning_content", "thinking", "namespace", "reasoning", "web_search_call")
"""Parts of a history that have no effect."""

FIELDS: list[dict[str, Any]] = [
    *(
        {"tools": [{"type": kind, "name": "x", **given}]}
        for kind, given in (
            ("namespace", {"tools": []}),
            ("web_search", {"external_web_access": False}),
            ("web_search_20250305", {}),
            ("custom", {"format": {"type": "grammar"}}),
            ("local_shell", {}),
            ("mcp", {"server_label": "x"}),
        )
    ),
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
    {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    {"tool_choice": "auto"},
    {"tool_choice": {"type": "web_search"}},
    {"client_metadata": {"x-codex-installation-id": "1"}},
    {"store": False},
    {"store": True},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "high"},
    {"reasoning": {"effort": "none", "summary": "auto"}},
    {"enable_thinking": True},
    {"think": True},
    {"think": "max"},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    *({name: n} for name in ("max_tokens", "max_output_tokens", "max_completion_tokens")
      for n in (-1, 0, 10**6, 2**40, 1.0, 1.5, "5")),
    {"n_predict": 3},
    {"num_predict": 3},
    {"options": {"num_predict": 2, "num_ctx": 4096, "mirostat": 2}},
    {"options": 5},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True},
    {"stream_options": {"include_usage": True}},
    {"cache_prompt": True, "id_slot": 0, "samplers": ["top_k"], "mirostat": 1, "dry_base": 1.5},
    {"keep_alive": 0},
    {"keep_alive": "5m"},
    {"cache_control": {"type": "ephemeral"}},
    {"context_management": {"edits": []}},
    {"metadata": {"user_id": "x"}},
    {"include": ["reasoning.encrypted_content"]},
    {"text": {"verbosity": "low"}},
    {"prompt_cache_key": "x"},
    {"service_tier": "auto"},
    {"grammar": "root ::= x"},
    {"guided_json": {"type": "object"}},
    {"functions": [{"name": "f"}]},
    {"background": True},
    {"previous_response_id": "resp_none"},
    {"conversation": "conv_none"},
    {"response_format": {"type": "json_object"}},
    {"format": "json"},
    {"logprobs": True},
    {"top_logprobs": 3},
    {"suffix": "x"},
    {"images": ["aGVsbG8="]},
    {"template": "{{ .Prompt }}"},
    {"context": [1, 2, 3]},
    {"raw": True},
    {"continue_final_message": True},
    {"add_generation_prompt": False},
    {"litellm_session_id": "x"},
    {"unheard_of": 1},
    {"unheard_of": None},
    {"model": "gpt-5"},
    {"seed": 2**70},
    {"temperature": "warm"},
    {"temperature": 1e400},
]  # fmt: skip
"""Fields that are added to a valid body."""


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {**ASSISTANT, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "done"}
HISTORIES: list[list[Any]] = [
    [SYSTEM, {"role": "developer", "content": "More"}, USER],
    [USER, SYSTEM],
    [USER, ASSISTANT, SYSTEM, USER],
    [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]}, USER],
    [{"role": "user", "content": [{"type": "text", "text": a} for a in ("Hel", "lo")]}],
    [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    [USER, {"role": "assistant", "content": "Yes, and"}],
    [USER, {"role": "assistant", "content": "Yes", "name": "one"}, USER],
    [USER, {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}, USER],
    [USER, {"role": "assistant", "content": "Yes", "thinking": "Hm."}, USER],
    [USER, {"role": "assistant", "content": None, "audio": {"id": "a1"}}, USER],
    [USER, call('{"a": 1.0}'), RESULT],
    [USER, call('{"a": 9007199254740993}'), RESULT],
    [USER, call("not JSON"), RESULT],
    [USER, RESULT],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}],
    [{"role": "critic", "content": "x"}],
    [{"type": "item_reference", "id": "msg_none"}],
    [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER],
    [{"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"}, USER],
    [{"type": "web_search_call", "status": "completed"}, USER],
    [{"type": "compaction", "encrypted_content": "gAAA"}, USER],
    [{"type": "never_heard_of"}, USER],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "x"},
     {"type": "function_call_output", "call_id": "c", "output": "y"}],
    [],
    [7],
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with serving(make_client(limits=Limits(answer=8), template=STRICT)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=600) as client:
        yield client


def body_for(route: str, history: list[Any] | None = None) -> dict[str, Any]:
    """Return a body that the route answers."""
    body: dict[str, Any] = {"model": "small"}
    if route == "/v1/completions":
        return {**body, "prompt": "Hello", "max_tokens": 2}
    if route == "/api/generate":
        return {**body, "prompt": "Hello", "stream": False, "options": {"num_predict": 2}}
    name = "input" if route.startswith("/v1/responses") else "messages"
    body[name] = [USER] if history is None else history
    if route.startswith("/api/"):
        return {**body, "stream": False, "options": {"num_predict": 2}}
    if route == "/v1/responses":
        return {**body, "max_output_tokens": 2}
    return {**body, "max_tokens": 2} if route in ("/v1/chat/completions", "/v1/messages") else body


def message_of(answer: Any) -> str:
    """Return the message of an error, in the format of any API."""
    error = answer.json()["error"]
    return error if isinstance(error, str) else f"{error.get('param')} {error['message']}"


HONORED = {
    "/v1/chat/completions": {
        *("tools", "tool_choice", "max_tokens", "max_completion_tokens", "n_predict"),
        *("num_predict", "options", "stream_options", "response_format", "logprobs"),
        *("chat_template_kwargs", "enable_thinking", "reasoning_effort"),
    },
    "/v1/responses": {
        *("tools", "tool_choice", "store", "max_output_tokens", "n_predict", "num_predict"),
        *("options", "stream", "include", "metadata", "prompt_cache_key", "conversation"),
        *("previous_response_id", "top_logprobs", "reasoning", "text", "background"),
    },
    "/v1/messages": {
        *("tools", "tool_choice", "max_tokens", "n_predict", "num_predict", "options", "thinking"),
        "cache_control",
    },
    "/v1/completions": {
        *("max_tokens", "n_predict", "num_predict", "options", "stream_options", "logprobs"),
    },
    "/api/chat": {
        *(
            "tools",
            "max_tokens",
            "n_predict",
            "num_predict",
            "options",
            "format",
            "think",
            "stream",
        ),
    },
    "/api/generate": {
        *("max_tokens", "n_predict", "num_predict", "options", "format", "think", "raw", "stream"),
    },
}
HONORED["/v1/messages/count_tokens"] = HONORED["/v1/messages"]
HONORED["/v1/responses/input_tokens"] = HONORED["/v1/responses"]
HONORED["/v1/responses/compact"] = HONORED["/v1/responses"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_field_is_honored_named_or_refused_by_every_route(client, route: str) -> None:
    for fields in FIELDS:
        body = json.dumps({**body_for(route), **fields})
        answer = client.post(route, content=body, headers=JSON)
        assert answer.status_code in (200, 400, 404), (route, fields, answer.text)
        warned = answer.headers.get("x-weir-warning", "")
        for name, given in fields.items():
            if answer.status_code == 200:
                zero = given == 0 and name != "keep_alive"
                honored = name in HONORED[route] or name == "stream" or given == "none"
                known = honored or name in warned or is_nothing(given) or zero
                assert known, (route, fields, warned)
        if answer.status_code != 200:
            said = message_of(answer)
            about = [*fields, "JSON" if "Infinity" in body else "", *map(str, fields.values())]
            assert any(one and one in said for one in about), (route, fields, said)


@pytest.mark.parametrize("route", CHATS)
def test_a_history_is_honored_named_or_refused_by_every_route(client, route: str) -> None:
    for history in HISTORIES:
        answer = client.post(route, json=body_for(route, history))
        assert answer.status_code in (200, 400, 404), (history, answer.text)
        if answer.status_code != 200:
            said = message_of(answer)
            named = ("messages", "input", "msg_none")
            assert any(one in said for one in named), (route, history, said)
            continue
        warned, text = answer.headers.get("x-weir-warning", ""), json.dumps(history)
        for field in NAMED:
            if f'"{field}"' in text:
                assert field in warned, (route, history, warned)


def test_the_body_of_codex_through_every_route(client) -> None:
    """Only the routes of responses accept it. The others name what they refuse."""
    for route in ROUTES:
        body = {**as_codex_sends_it(), "max_output_tokens": 2}
        answer = client.post(route, json=body)
        if route.startswith("/v1/responses"):
            assert answer.status_code == 200, (route, answer.text)
            assert "tools[1] (namespace)" in answer.headers["x-weir-warning"], route
        else:
            assert answer.status_code == 400, (route, answer.text)
            named = [*body, "messages", "prompt"]
            assert any(name in message_of(answer) for name in named), message_of(answer)
