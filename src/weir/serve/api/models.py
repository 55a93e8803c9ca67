"""`GET /v1/models`: the one model, and a window without end in the spellings that clients read."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from weir.serve.api.errors import Refused
from weir.serve.client import EngineClient

WINDOW = 1_000_000_000
"""Tokens that a conversation is said to have room for.

There is no limit; but clients that know none take 128,000, and summarize what is held anyway.
"""

router = APIRouter()
STARTED = int(time.time())


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """All models."""
    return {"object": "list", "data": [card(request.app.state.desk)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model."""
    desk: EngineClient = request.app.state.desk
    check_model(desk, name)
    return card(desk)


def card(desk: EngineClient) -> dict[str, Any]:
    """What is said of a model."""
    limits = desk.limits
    return {
        "id": desk.name,
        "object": "model",
        "created": STARTED,
        "owned_by": "weir",
        "context_length": WINDOW,
        "context_window": WINDOW,
        "max_context_length": WINDOW,
        "max_input_tokens": WINDOW,
        "max_model_len": WINDOW,
        "max_completion_tokens": limits.answer,
        "max_output_tokens": limits.answer,
        "meta": {"n_ctx": WINDOW, "n_ctx_train": WINDOW},
        "top_provider": {"context_length": WINDOW, "max_completion_tokens": limits.answer},
        "weir": {
            "policy": str(desk.engine.cache.policy),
            "chunk": desk.engine.cache.chunk,
            "continues": desk.wording.lines,
            "prompt_tokens_of_a_request": limits.prompt,
        },
    }


def check_model(desk: EngineClient, name: str) -> None:
    """Refuse a model that is not here.

    Raises:
        Refused: with OpenAI's code for it.
    """
    if name != desk.name:
        raise Refused(
            404,
            f"there is no such model here; this server has {desk.name!r}",
            param="model",
            code="model_not_found",
        )
