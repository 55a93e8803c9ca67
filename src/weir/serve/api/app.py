"""The ASGI application with routes and error handlers, and the server that runs it on a socket."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from weir import __version__
from weir.errors import WeirError
from weir.serve.api import (
    anthropic,
    completions,
    conversations,
    items,
    memory,
    models,
    ollama,
    operations,
    page,
    responses,
    sessions,
)
from weir.serve.api.access import Access
from weir.serve.api.dependencies import Keys, authorize
from weir.serve.api.errors import APIError, invalid_query, server_error
from weir.serve.api.generation import warn_query
from weir.serve.api.middleware import RequestMiddleware, watch_stalls
from weir.serve.api.openapi import ANTHROPIC_ERRORS, ERRORS, OLLAMA_ERRORS
from weir.serve.api.operations import Metrics
from weir.serve.api.protocol import MAX_CONNECTIONS, BoundedConnection
from weir.serve.api.requests import BodyLimiter, ClientGone
from weir.serve.client import EngineClient
from weir.serve.limits import Limits
from weir.serve.session_memory import MemoryReporter
from weir.serve.structured import GrammarCompiler
from weir.serve.worker import COLLECTED

SWITCH_INTERVAL = 0.0001
"""Seconds that a thread may hold the interpreter while others wait for it.

Python's default is fifty times as long.
"""
GRACE = 5
"""Seconds for telling clients that their answers were given up."""


def make_app(
    client: EngineClient,
    keys: Keys | None = None,
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> ASGIApp:
    """Make an application that starts and stops the engine.

    Without keys, it answers only requests to localhost and to the host names in `hosts`. Web pages
    from `origins` may use it.
    """
    access = Access(hosts, origins, has_keys=bool(keys))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Tokenizing a long text holds a thread. There are as many threads as requests may be open,
        # so that no request has to wait for one.
        threads = ThreadPoolExecutor(client.limits.open, "weir-request")
        asyncio.get_running_loop().set_default_executor(threads)
        watching = asyncio.create_task(watch_stalls())
        client.open()
        with _short_pauses():
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
    app.state.inspections = memory.Inspections()
    app.state.memory_reporter = MemoryReporter(client.engine.cache, client.tokenizer)
    for kind in (APIError, RequestValidationError, ClientGone, HTTPException, Exception):
        app.add_exception_handler(kind, _respond_to_error)
    for part in (operations, page):
        app.include_router(part.public, responses=ERRORS)
    all_routes = [Depends(authorize), Depends(warn_query)]
    of_others = ((anthropic, ANTHROPIC_ERRORS), (ollama, OLLAMA_ERRORS))
    for other, errors in of_others:
        app.include_router(other.router, dependencies=all_routes, responses=errors)
    others = completions, responses, conversations, models, sessions, items, memory, operations
    for part in others:
        app.include_router(part.router, dependencies=all_routes, responses=ERRORS)
    parts = [operations.public, page.public, anthropic.router, ollama.router]
    parts += [part.router for part in others]
    app.state.ways = [route for part in parts for route in part.routes]
    return RequestMiddleware(app, metrics, access)


@contextmanager
def _short_pauses() -> Iterator[None]:
    """Let the engine's thread and the event loop wait less for the interpreter.

    A thread that works keeps the interpreter for `SWITCH_INTERVAL`, and a step of the engine waits
    for it hundreds of times. Garbage collection skips all objects that already exist, and so looks
    only at objects that requests make.
    """
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


NOT_OFFERED = {
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/moderations": "moderation",
    "/v1/images/generations": "images",
    "/v1/audio/speech": "audio",
    "/v1/audio/transcriptions": "audio",
    "/v1/files": "files",
    "/v1/batches": "batches",
    "/v1/messages/batches": "batches",
}
"""Paths that clients try and that this server does not have, and what each is for."""


async def _respond_to_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # for the log only: the client is gone
    if isinstance(error, RequestValidationError):
        error = invalid_query(error)
    elif isinstance(error, HTTPException):  # Starlette's own: unknown paths and methods
        path = request.url.path[:200]
        message = f"unknown path: {request.method} {path}"
        if (what := NOT_OFFERED.get(path)) is not None:
            message = f"{path}: this server does not offer {what}"
        elif _methods_at(request.app, {**request.scope, "path": request.scope["path"].rstrip("/")}):
            message += ". Leave out the slash at the end."
        headers = dict(error.headers) if error.headers else None
        if error.status_code == 405:
            methods = _methods_at(request.app, request.scope)
            headers = {"Allow": ", ".join(methods)}
            message = f"{path} does not accept {request.method}. Use {' or '.join(methods)}."
        error = APIError(error.status_code, message, headers=headers)
    # Any other error goes to the middleware, which logs it.
    return (error if isinstance(error, APIError) else server_error()).response(request.url.path)


def _methods_at(app: FastAPI, scope: Scope) -> list[str]:
    """Return the methods of all routes of a path. Starlette knows only those of the first route."""
    found: set[str] = set()
    for route in app.state.ways:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found | {"HEAD"} if "GET" in found else found)


def bind(host: str, port: int, keys: Keys) -> socket.socket:
    """Bind a socket to an address, for `run_app`. Without keys, only a loopback address is
    allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeirError(
            f"cannot serve at {host}: {reason}. Use the address of a network interface of this "
            "machine with --host."
        ) from None
    if not keys and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise WeirError(
            f"{host} can be reached from other machines, and without keys anyone could use the "
            "server. Add keys with --keys FILE, or use --host 127.0.0.1."
        )
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        remedy = "The --host must be an address of this machine"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = "Use another --port, or --port 0 for any free port"
        raise WeirError(f"cannot serve at {host}:{port}: {error.strerror}. {remedy}.") from None
    return made


class _Server(uvicorn.Server):
    """A uvicorn server that drains the engine when it is told to stop."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._draining = threading.Thread(target=drain, name="weir drain", daemon=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accept no more connections, and start draining."""
        super().handle_exit(sig, frame)
        if self._draining.ident is None:
            self._draining.start()


def run_app(
    app: ASGIApp,
    bound: socket.socket,
    limits: Limits,
    drain: Callable[[], None],
    connection: type[BoundedConnection] = BoundedConnection,
) -> None:
    """Serve until SIGTERM or SIGINT, then close the bound socket.

    After the signal, no more requests are accepted, and running answers get `limits.drain` seconds
    to finish. Answers that take longer are given up, and their clients are told. A second SIGINT
    stops the server at once.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http=connection,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=round(limits.drain) + GRACE,
        ),
        drain,
    )
    # uvicorn raises these signals again after it has stopped. They must not kill the process.
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        server.run(sockets=[bound])
    finally:
        bound.close()
        for number, handler in before.items():
            signal.signal(number, handler)
