"""The application: its routes, and what becomes of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
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
from weir.serve.api.errors import Refused, failed, invalid_query
from weir.serve.api.keys import Keys
from weir.serve.api.metrics import Metrics
from weir.serve.api.middleware import RequestMiddleware
from weir.serve.api.openapi import ERRORS
from weir.serve.api.requests import Gone, authorized
from weir.serve.client import EngineClient
from weir.serve.recall import Recaller
from weir.serve.structured import Grammars


def make_app(desk: EngineClient, keys: Keys | None = None) -> ASGIApp:
    """An application that serves a desk; its engine runs from start to end of the application.

    Args:
        desk: who answers.
        keys: of clients. Without any, only requests to this machine's own names are answered.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        desk.open()
        yield
        desk.close(desk.limits.drain)

    app = FastAPI(
        title="weir",
        version=__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.desk, app.state.keys = desk, keys or Keys()
    app.state.grammars = Grammars(desk.tokenizer, desk.ends, desk.vocabulary)
    app.state.metrics = metrics = Metrics(desk)
    app.state.recaller = Recaller(desk.engine.cache, desk.tokenizer)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _queried)
    app.add_exception_handler(Gone, _gone)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(Exception, _failed)
    for part in (operations, page):
        app.include_router(part.public, responses=ERRORS)
    # Responses and conversations are in one server's book, which replicas do not share.
    turns = (chat, completions) if desk.shares else (chat, completions, responses, conversations)
    for part in (*turns, models, sessions, memory, operations):
        app.include_router(part.router, dependencies=[Depends(authorized)], responses=ERRORS)
    return RequestMiddleware(app, metrics, local=not app.state.keys)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()


async def _queried(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid_query(error).response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads


async def _failed(request: Request, error: Exception) -> Response:
    return failed().response()  # the error itself goes on to the guard, which logs it


async def _plain(request: Request, error: Exception) -> Response:
    """What Starlette says of paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path[:200]} here"
    headers = dict(error.headers) if error.headers else None
    return Refused(error.status_code, message, code="not_found", headers=headers).response()
