"""`/health`, `/metrics` and `/openapi.json`, for the operators of the server."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

from weir.serve.api.openapi import describe_app
from weir.serve.client import EngineClient
from weir.serve.sessions import DISK_FULL

router = APIRouter()
public = APIRouter()


@public.get("/health")
async def health(request: Request) -> Response:
    """Check whether the server can answer. Needs no key."""
    client: EngineClient = request.app.state.client
    if client.failure is not None:
        return JSONResponse({"status": "failed"}, 503)
    if await asyncio.to_thread(client.store.is_full):
        return JSONResponse({"status": "storage_full", "message": DISK_FULL})
    return JSONResponse({"status": "ok"})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> dict[str, Any]:
    """The OpenAPI description of this server."""
    return describe_app(request.app)
