"""What the server can be asked, as OpenAPI describes it. Knows no route.

Routes read their bodies themselves, within bounds, so FastAPI does not know what they take; and
errors have OpenAI's form and not FastAPI's.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from weir.serve.api.errors import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "It was not answered, and this says why."}
}
"""For a router: all its errors."""

_REFERENCE = "#/components/schemas/{model}"


def takes(kind: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """For a route: it takes a body.

    Args:
        kind: of the body.
        streams: whether it answers with events where the body asks for them.
    """
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    content = {"application/json": {"schema": schema}}
    required = any(field.is_required() for field in kind.model_fields.values())
    told: dict[str, Any] = {"requestBody": {"required": required, "content": content}}
    if streams:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        told["responses"] = {"200": {"content": events}}
    return told


def describe(app: FastAPI) -> dict[str, Any]:
    """All that an application can be asked."""
    described: dict[str, Any] = app.openapi()
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for path in described["paths"].values():
        for operation in path.values():
            # Nothing is checked by FastAPI, so nothing is refused in its form.
            operation["responses"].pop("422", None)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schemas.update(content.get("schema", {}).pop("$defs", {}))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return described
