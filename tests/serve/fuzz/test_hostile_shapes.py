"""Request bodies from the server's OpenAPI description, with a costly value in a random place.

`WEIR_FUZZ=5000` sends 5,000 of them.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import Server, make_client, serving

from weir.serve import Limits

ROUNDS = int(os.environ.get("WEIR_FUZZ", "400"))
LIMITS = Limits(body=1_000_000, prompt=400, answer=10, stall=5)
MANY = 20_000
SHAPES: dict[str, Any] = {
    "zeros": [0] * MANY,
    "fractions": [1.5] * MANY,
    "objects": [{}] * MANY,
    "lists": [[]] * MANY,
    "texts": ["x"] * MANY,
    "pairs": {str(n): n for n in range(MANY)},
    "parts": [{"type": "text", "text": ""}] * MANY,
    "messages": [{"role": "user", "content": "x"}] * MANY,
    "results": [{"type": "function_call_output", "call_id": "x", "output": ""}] * MANY,
    "a word": "a" * 500_000,
    "controls": "<|im_end|>" * 50_000,
    "characters": "\ufdd0\u0000😀" * 50_000,
    "a digit": 10**400,
    "infinity": float("inf"),
    "nothing": None,
    "schema": {"type": "object", "properties": {"x": {"enum": ["x"] * MANY}}},
    "pattern": {"type": "string", "pattern": "(a{1,99}){1,99}" * 50},
}
HEADERS = [
    {"Content-Type": "application/json"},
    {"Content-Type": "APPLICATION/json;charset=utf-8"},
    {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    {"Content-Type": 'application/json; charset="utf-16'},
    {"Content-Type": "multipart/form-data; boundary=x"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(make_client(rows=2, limits=LIMITS)) as server:
        yield server


def example(schema: dict[str, Any], known: dict[str, Any], draw: random.Random, depth: int) -> Any:
    """A value that fits a schema, more or less."""
    if "$ref" in schema:
        return example(known[schema["$ref"].rpartition("/")[2]], known, draw, depth)
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return example(draw.choice(choices), known, draw, depth)
    if "enum" in schema or "const" in schema:
        return draw.choice(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "object":
        fields = schema.get("properties", {})
        named = [n for n in fields if n in schema.get("required", ()) or draw.random() < 0.2]
        return {n: example(fields[n], known, draw, depth - 1) for n in named} if depth else {}
    if kind == "array":
        return [example(schema.get("items", {}), known, draw, depth - 1)] if depth else []
    return {"string": "small", "integer": 1, "number": 0.5, "boolean": True}.get(str(kind))


def spoil(value: Any, draw: random.Random) -> Any:
    """Replace a random part of a value by something that is costly to handle."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        return {**value, name: spoil(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        return [spoil(value[0], draw), *value[1:]]
    return copy.copy(SHAPES[draw.choice(list(SHAPES))])


@pytest.mark.slow
def test_nothing_hostile_is_an_error_of_the_server(server: Server) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()
    known = described["components"]["schemas"]
    routes = [
        (path, content["application/json"]["schema"])
        for path, operations in described["paths"].items()
        if (content := operations.get("post", {}).get("requestBody", {}).get("content", {}))
        and "application/json" in content
    ]
    assert len(routes) >= 7
    draw, heard = random.Random(0), Counter[int]()
    for _ in range(ROUNDS):
        path, schema = draw.choice(routes)
        body = json.dumps(spoil(example(schema, known, draw, 5), draw))
        if draw.random() < 0.1:  # JSON that is broken only at its end
            body = body[: draw.randrange(len(body) + 1)]
        headers = draw.choice(HEADERS) if draw.random() < 0.2 else HEADERS[0]
        answer = httpx.post(
            server.url + path.replace("{name}", "x"),
            content=body.encode(),
            headers=headers,
            timeout=120,
        )
        heard[answer.status_code] += 1
        assert answer.status_code < 500, (path, body[:300], answer.text)
        if answer.status_code != 200:
            assert len(answer.content) < 2000
            error = answer.json()["error"]
            if path.startswith("/api/"):  # Ollama's error is a text, and Anthropic's has a type
                assert isinstance(error, str) and error, (path, body[:300], answer.text)
            else:
                key = "type" if path.startswith("/v1/messages") else "code"
                assert error[key], (path, body[:300], answer.text)
    assert heard[400] > ROUNDS // 4, heard
    server.settled()
    assert httpx.get(f"{server.url}/health").status_code == 200
