"""The ASGI application: routes and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from weir import __version__
from weir.serve.api import (
    chat,
    completions,
    conversations,
    memory,
    models,
    operations,
    page,
    responses,
    sessions,
)
from weir.serve.api.errors import APIError, invalid_query, server_error
from weir.serve.api.keys import Keys
from weir.serve.api.metrics import Metrics
from weir.serve.api.middleware import RequestMiddleware, watch_stalls
from weir.serve.api.openapi import ERRORS
from weir.serve.api.requests import BodyLimiter, ClientGone, authorize
from weir.serve.client import EngineClient
from weir.serve.recall import Recaller
from weir.serve.structured import GrammarCompiler


def make_app(client: EngineClient, keys: Keys | None = None) -> ASGIApp:
    """Make an application, which runs the engine from its start to its end.

    Args:
        keys: of HTTP clients. Without any, only requests to this machine's own names are answered.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # A long text that is tokenized holds one of these threads, and never the last.
        threads = ThreadPoolExecutor(client.limits.open, "weir-request")
        asyncio.get_running_loop().set_default_executor(threads)
        watching = asyncio.create_task(watch_stalls())
        client.open()
        yield
        watching.cancel()
        client.close(client.limits.drain)

    app = FastAPI(
        title="weir",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.client, app.state.keys = client, keys or Keys()
    app.state.bodies = BodyLimiter(client.limits)
    app.state.grammars = GrammarCompiler(client.tokenizer, client.stop_ids, client.vocabulary)
    app.state.metrics = metrics = Metrics(client)
    app.state.recaller = Recaller(client.engine.cache, client.tokenizer)
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid_query)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(Exception, _server_error)
    for part in (operations, page):
        app.include_router(part.public, responses=ERRORS)
    # Responses and conversations are stored by one server, and replicas do not share them.
    stored = () if client.is_replica else (responses, conversations)
    for part in (chat, completions, *stored, models, sessions, memory, operations):
        app.include_router(part.router, dependencies=[Depends(authorize)], responses=ERRORS)
    return RequestMiddleware(app, metrics, local=not app.state.keys)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _invalid_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid_query(error).response()


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the log: nobody reads it


async def _server_error(request: Request, error: Exception) -> Response:
    return server_error().response()  # the error itself goes on to the middleware, which logs it


async def _not_found(request: Request, error: Exception) -> Response:
    """Starlette's errors: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path[:200]} here"
    headers = dict(error.headers) if error.headers else None
    return APIError(error.status_code, message, code="not_found", headers=headers).response()
