"""The OpenAPI description of the server, corrected where FastAPI cannot know it.

Routes read their bodies themselves, within bounds, so that FastAPI does not know them; and errors
have OpenAI's format instead of FastAPI's. Knows no route.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from weir.serve.api.errors import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "The request failed; the body says why."}
}
"""The errors of every route, for a router."""

_REFERENCE = "#/components/schemas/{model}"


def describe_body(kind: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """Describe the body of a route."""
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    content = {"application/json": {"schema": schema}}
    required = any(field.is_required() for field in kind.model_fields.values())
    description: dict[str, Any] = {"requestBody": {"required": required, "content": content}}
    if streams:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        description["responses"] = {"200": {"content": events}}
    return description


def describe_app(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of an application."""
    described: dict[str, Any] = app.openapi()
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for path in described["paths"].values():
        for operation in path.values():
            # FastAPI validates no body, so it sends no such error.
            operation["responses"].pop("422", None)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(content.get("schema", {}).pop("$defs", {}))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return described
