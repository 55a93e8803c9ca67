"""Each field that openai, anthropic and ollama publish follows the rule of docs/requests.md.

Each field, at any depth, is tested in a separate body. It is honored, named in the warning, or
refused by name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from published import Variant, bodies
from pydantic import BaseModel
from servers import make_client, serving

from weir.serve import Limits
from weir.serve.api.errors import APIError
from weir.serve.api.requests import parse_body
from weir.serve.api.schemas.anthropic import AnthropicBody, CountBody
from weir.serve.api.schemas.base import ECHOED, Only, is_nothing
from weir.serve.api.schemas.chat import HONORED_OPTIONS, OPTIONS, ChatBody, GenerationBody, TextBody
from weir.serve.api.schemas.ollama import OllamaChatBody, OllamaGenerateBody
from weir.serve.api.schemas.responses import ResponseBody

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
ollama = pytest.importorskip("ollama")

from anthropic.types import (  # noqa: E402
    message_count_tokens_params,
    message_create_params,
)
from ollama import _types as ollama_types  # noqa: E402
from openai.types import completion_create_params  # noqa: E402
from openai.types.chat import completion_create_params as chat_params  # noqa: E402
from openai.types.responses import response_create_params  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "requests.md").read_text("utf-8")
USER = [{"role": "user", "content": "Hello"}]
COUNT = message_count_tokens_params.MessageCountTokensParams
KINDS: dict[str, tuple[Any, type[GenerationBody], dict[str, Any]]] = {
    "/v1/chat/completions": (
        chat_params.CompletionCreateParamsBase,
        ChatBody,
        {"messages": USER, "max_tokens": 1},
    ),
    "/v1/responses": (
        response_create_params.ResponseCreateParamsBase,
        ResponseBody,
        {"input": "Hello", "max_output_tokens": 1},
    ),
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsBase,
        TextBody,
        {"prompt": "Hello", "max_tokens": 1},
    ),
    "/v1/messages": (
        message_create_params.MessageCreateParamsBase,
        AnthropicBody,
        {"messages": USER, "max_tokens": 1},
    ),
    "/v1/messages/count_tokens": (COUNT, CountBody, {"messages": USER}),
    "/api/chat": (
        ollama_types.ChatRequest,
        OllamaChatBody,
        {"messages": USER, "stream": False, "options": {"num_predict": 1}},
    ),
    "/api/generate": (
        ollama_types.GenerateRequest,
        OllamaGenerateBody,
        {"prompt": "Hello", "stream": False, "options": {"num_predict": 1}},
    ),
}
OPTION = re.compile(r"options\.(\w+)")


@cache
def made(route: str) -> list[Variant]:
    """Return the bodies for a route, without those for the fields `model` and `stream`."""
    kind, _, base = KINDS[route]
    found = bodies(kind, {"model": "small", **base})
    return [one for one in found if one.path not in (("model",), ("stream",))]


def is_named(variant: Variant, skipped: list[str]) -> bool:
    """Whether a warning names the field, or an object that it is in."""
    for one in skipped:
        name = one.partition(" (")[0]
        if variant.name == name or variant.name.startswith((f"{name}.", f"{name}[")):
            return True
        if name.startswith((f"{variant.name}.", f"{variant.name}[")):
            return True
    return False


def is_honored(body: Any, variant: Variant) -> bool:
    """Whether the server's own type has a field, so that code can use it."""
    option = OPTION.fullmatch(variant.name)
    if option is not None:
        return OPTIONS.get(option[1], option[1]) in HONORED_OPTIONS
    found = body
    for step in variant.path:
        if isinstance(found, BaseModel):
            fields = type(found).model_fields
            names = [n for n, field in fields.items() if step in (n, field.alias)]
            if not names or fields[names[0]].annotation is Any:
                return step in ECHOED or asks_for_nothing(found, str(step), variant)
            found = getattr(found, names[0])
        elif isinstance(found, list):
            found = found[step]
        else:
            # The client chooses the fields of such objects, for example of a schema or of metadata.
            return True
    return True


def asks_for_nothing(body: BaseModel, name: str, variant: Variant) -> bool:
    """Whether weir accepts only some values of a field, and this is one of them."""
    field = type(body).model_fields.get(name)
    only = [] if field is None else [one for one in field.metadata if isinstance(one, Only)]
    return any(variant.value in one.allowed for one in only)


@pytest.mark.parametrize("route", KINDS)
def test_every_published_field_is_honored_or_named(route: str) -> None:
    kind = KINDS[route][1]
    outcomes: Counter[str] = Counter()
    for variant in made(route):
        try:
            body = parse_body(json.dumps(variant.body).encode(), kind)
        except APIError as error:
            told = error.body["error"]
            named = f"{told['param']} {told['message']}"
            assert str(variant.path[0]) in named, (str(variant), told)
            outcomes["refused"] += 1
            continue
        if is_named(variant, body.skipped):
            outcomes["skipped"] += 1
        elif is_nothing(variant.value):
            outcomes["nothing"] += 1
        else:
            assert is_honored(body, variant), (str(variant), body.skipped)
            outcomes["honored"] += 1
    assert outcomes["honored"] > 3
    assert sum(outcomes.values()) == len(made(route)) > 20


@pytest.mark.parametrize("route", KINDS)
def test_the_page_names_what_has_no_effect(route: str) -> None:
    kind = KINDS[route][1]
    for variant in made(route):
        if len(variant.path) > 1 or is_nothing(variant.value):
            continue
        name = str(variant.path[0])
        try:
            skipped = parse_body(json.dumps(variant.body).encode(), kind).skipped
        except APIError:
            continue
        if name in skipped:
            assert f"`{name}" in PAGE, f"docs/requests.md does not say that {name} has no effect"


@pytest.mark.slow
@pytest.mark.parametrize("route", KINDS)
def test_the_server_answers_as_the_types_say(route: str) -> None:
    """Over HTTP: nothing fails, and the header names what was skipped."""
    kind = KINDS[route][1]
    with serving(make_client(limits=Limits(answer=8))) as server:
        for variant in made(route)[::3]:
            try:
                skipped = parse_body(json.dumps(variant.body).encode(), kind).skipped
            except APIError:
                skipped = None
            answer = server.post(route, variant.body)
            assert answer.status_code in (200, 400, 404), (str(variant), answer.text)
            if skipped is None:
                assert answer.status_code == 400, str(variant)
            elif answer.status_code == 200:
                warned = answer.headers.get("x-weir-warning", "")
                assert all(one in warned for one in skipped[:16]), (str(variant), warned)
            else:  # refused for its value, such as an unknown item or an invalid schema
                assert len(answer.text) > 20, (str(variant), answer.text)
