"""The OpenAPI description of the server, with corrections to what FastAPI generates.

Routes read their bodies themselves, within limits, so FastAPI does not know the bodies. Errors have
OpenAI's format instead of FastAPI's.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from weir.serve.api.errors import AnthropicErrorBody, ErrorBody, OllamaErrorBody

Errors = dict[int | str, dict[str, Any]]
"""Descriptions of errors by status, as FastAPI takes them for all routes of a router."""


def describe_errors(kind: type[BaseModel]) -> Errors:
    """Describe the errors of an API."""
    return {
        "default": {"model": kind, "description": "The request failed. The reason is in the body."}
    }


ERRORS = describe_errors(ErrorBody)
ANTHROPIC_ERRORS = describe_errors(AnthropicErrorBody)
OLLAMA_ERRORS = describe_errors(OllamaErrorBody)

_REFERENCE = "#/components/schemas/{model}"


def describe_body(
    kind: type[BaseModel], *, streams: bool = False, media_type: str = "text/event-stream"
) -> dict[str, Any]:
    """Describe the request body of a route and, if it `streams`, the media type of its stream."""
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    content = {"application/json": {"schema": schema}}
    required = any(field.is_required() for field in kind.model_fields.values())
    description: dict[str, Any] = {"requestBody": {"required": required, "content": content}}
    if streams:
        events = {media_type: {"schema": {"type": "string"}}}
        description["responses"] = {"200": {"content": events}}
    return description


def describe_app(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of an application."""
    described: dict[str, Any] = app.openapi()
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for path in described["paths"].values():
        for operation in path.values():
            # FastAPI validates no body, so it never sends this error.
            operation["responses"].pop("422", None)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(content.get("schema", {}).pop("$defs", {}))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return described
