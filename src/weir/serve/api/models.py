"""`GET /v1/models`: the one model, with a huge context window in all fields that clients read."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query

from weir.errors import shorten
from weir.models import window_of
from weir.serve.api.dependencies import Client
from weir.serve.api.errors import APIError, not_found
from weir.serve.client import EngineClient

WINDOW = 1_000_000_000
"""The context window that clients are told.

There is no limit, but clients that are told none assume 128,000 and summarize their messages.
"""

ANY_NAME = "*"
"""The alias that accepts every name."""

router = APIRouter()
STARTED = int(time.time())


@router.get("/v1/models")
async def models(
    client: Client,
    after_id: str | None = None,
    before_id: str | None = None,
    limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
) -> dict[str, Any]:
    """List the models: only one, which may have several names.

    The parameters are those of Anthropic's API. They choose a page of the names: those after
    `after_id` and before `before_id`, at most `limit`. With only `before_id`, the page ends right
    before this name. Otherwise it begins right after `after_id`, or with the first name.
    """
    names = _names_between(names_of(client), after_id, before_id)
    if limit is None:
        page = names
    elif before_id is not None and after_id is None:
        page = names[-limit:]
    else:
        page = names[:limit]
    return {
        "object": "list",
        "data": [card(client, name) for name in page],
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": len(page) < len(names),
    }


def _names_between(names: list[str], after: str | None, before: str | None) -> list[str]:
    """Return the names after one name and before another (APIError if one is unknown)."""
    for name in (after, before):
        if name is not None and name not in names:
            raise not_found("model")
    start = 0 if after is None else names.index(after) + 1
    stop = len(names) if before is None else names.index(before)
    return names[start:stop]


@router.get("/v1/models/{name:path}")
async def model(name: str, client: Client) -> dict[str, Any]:
    """Retrieve the model."""
    if not name:
        raise HTTPException(404)  # as for every other path with a slash too many
    check_model(client, name)
    return card(client, name)


def names_of(client: EngineClient) -> list[str]:
    """Return the names of the model, its main name first."""
    return [client.name, *sorted(client.aliases - {client.name, ANY_NAME})]


def card(client: EngineClient, name: str) -> dict[str, Any]:
    """Describe the model under one of its names."""
    limits, trained = client.limits, window_of(client.engine.model.config)
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "weir",
        "type": "model",  # this field and the next two are for Anthropic's clients
        "display_name": name,
        "created_at": datetime.fromtimestamp(STARTED, UTC).isoformat(),
        "context_length": WINDOW,
        "context_window": WINDOW,
        "max_context_length": WINDOW,
        "max_input_tokens": WINDOW,
        "max_model_len": WINDOW,
        "max_completion_tokens": limits.answer,
        "max_output_tokens": limits.answer,
        "meta": {"n_ctx": WINDOW, **({} if trained is None else {"n_ctx_train": trained})},
        "top_provider": {"context_length": WINDOW, "max_completion_tokens": limits.answer},
        "weir": {
            "policy": client.engine.cache.policy.brief,
            "pools": client.engine.cache.policy.stands_for,
            "chunk": client.engine.cache.chunk,
            "continues": client.renderer.is_line_based,
            "prompt_tokens_of_a_request": limits.prompt,
        },
    }


def check_model(client: EngineClient, name: str) -> None:
    """Refuse a name that the model does not have (APIError)."""
    if name == client.name or name in client.aliases or ANY_NAME in client.aliases:
        return
    alias = f", or start weir serve with --alias {shlex.quote(shorten(name))}" if name else ""
    raise APIError(
        404,
        f"there is no model {shorten(name)!r} on this server. Use {client.name!r}{alias}.",
        param="model",
        code="model_not_found",
    )
