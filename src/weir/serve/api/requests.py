"""Read a request: its body and session, before any work, and notice when the client disconnects."""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from typing import Any, TypeVar

from jiter import from_json
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from weir.serve import patterns
from weir.serve.api.dependencies import run_in_thread
from weir.serve.api.errors import APIError, invalid_body, invalid_json, not_found, rate_limited
from weir.serve.api.middleware import at_end
from weir.serve.client import EngineClient
from weir.serve.engine.engine import Engine
from weir.serve.engine.scheduler import Busy
from weir.serve.json_nodes import NodeCounter, TooManyNodes
from weir.serve.limits import NODE, Limits, share_of
from weir.serve.sessions.records import is_hidden
from weir.serve.worker import Worker, holder_of_call

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
SESSION_HEADER = "x-session-id"
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
"""The Content-Type that `curl -d` sends."""
BYTES = "application/octet-stream"
"""The Content-Type that aiohttp sends. Browsers ask a server before a page may send it."""
BROWSER_HEADERS = ("origin", "sec-fetch-mode", "sec-fetch-site")
"""Headers of which a web page's request has at least one."""
MAX_DIGITS = 20
"""The most digits of a Content-Length. `int` raises an error for thousands of digits."""
DRAINED = 64_000_000
"""The most bytes beyond the limit that are read of an oversized body, and thrown away."""
PACE = 32_000_000
"""Bytes of large bodies that are read from a client per second while answers are generated.

Without this limit, a client that sends very fast would occupy the interpreter with reading, and the
engine's thread would have to wait for it.
"""
SLOW_SECONDS = 0.5
SLOW_RATE = 10_000
"""A body is slow if it has taken longer than `SLOW_SECONDS` and comes at fewer than `SLOW_RATE`
bytes per second.
"""
LARGE = 65_536
"""Bytes from which a body is parsed in another process, so that no other client waits."""


class ClientGone(Exception):
    """The client has disconnected."""


class BodyLimiter:
    """Limits the size of the bodies of all requests together, while they are read and answered.

    Args:
        limits: the limits of the server.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes: Counter[str] = Counter()
        self._reading: defaultdict[str, list[IncomingBody]] = defaultdict(list)
        # By client, the time from which on more of its large bodies may be read (`PACE`).
        self._paced: dict[str, float] = {}

    def delay(self, holder: str, size: int, now: float) -> float:
        """Return the seconds to wait after reading this many bytes of a large body of a client."""
        until = max(self._paced.get(holder, now), now) + size / PACE
        self._paced[holder] = until
        return until - now

    def add(self, request: Request, size: int) -> None:
        """Count bytes of a body until its request ends.

        Raises APIError if all bodies together are too large, or all bodies of its client.
        """
        holder = request.state.holder
        if self._bytes[holder] + size > share_of(self._limits.bodies):
            raise rate_limited(
                "the requests of this key or address are too large together. Wait for one to "
                "finish, or send less."
            )
        if self._bytes.total() + size > self._limits.bodies:
            raise rate_limited("all requests in progress are too large together. Try again later.")
        self._bytes[holder] += size
        counted: Counter[str] | None = getattr(request.state, "counted", None)
        if counted is None:
            # One entry counts all pieces of a body, which may be thousands.
            request.state.counted = counted = Counter()
            at_end(request.scope, lambda: self._remove(holder, request.state.counted[holder]))
        counted[holder] += size

    def _remove(self, holder: str, size: int) -> None:
        self._bytes[holder] -= size
        if not self._bytes[holder]:
            del self._bytes[holder]

    def end_slow(self, holder: str) -> None:
        """If a client already sends as many bodies as it may, end a slow one to make room for
        another.
        """
        bodies = self._reading.get(holder, [])
        slow = next((body for body in bodies if body.is_slow), None)
        if len(bodies) >= self._limits.reading and slow is not None:
            bodies.remove(slow)
            slow.end()

    @contextmanager
    def reading(self, holder: str, seconds: float) -> Iterator[IncomingBody]:
        """Count a client's body while it is read, for at most this many seconds."""
        body, bodies = IncomingBody(seconds), self._reading[holder]
        bodies.append(body)
        try:
            yield body
        finally:
            if body in bodies:
                bodies.remove(body)
            if not bodies:
                self._reading.pop(holder, None)
                self._paced.pop(holder, None)


class IncomingBody:
    """A body that is being read.

    Args:
        seconds: time limit for the whole body.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, seconds: float) -> None:
        self.size = 0
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._until = self._began + seconds
        self._timeout = asyncio.timeout_at(None)

    @property
    def is_slow(self) -> bool:
        """Whether it arrives so slowly that another body may take its place."""
        seconds = self._loop.time() - self._began
        return seconds > SLOW_SECONDS and self.size < SLOW_RATE * seconds

    def timeout(self) -> asyncio.Timeout:
        """Return a context for waiting for the next part."""
        self._timeout = asyncio.timeout_at(self._until)
        return self._timeout

    def end(self) -> None:
        """Stop waiting for the body."""
        self._until = self._loop.time()
        with suppress(RuntimeError):  # nothing is waited for at the moment
            self._timeout.reschedule(self._until)


def begin_request(request: Request, owner: str) -> EngineClient:
    """Count a request for its client until the request ends.

    The client is the owner or, without keys, the address: `request.state.holder`. Raises APIError
    if the client already has too many.
    """
    client: EngineClient = request.app.state.client
    request.state.holder = holder = owner or (request.client.host if request.client else "")
    limiter: BodyLimiter = request.app.state.bodies
    holder_of_call.set(holder)
    limiter.end_slow(holder)
    try:
        client.begin_request(holder)
    except Busy as error:
        raise rate_limited(str(error)) from None
    at_end(request.scope, lambda: client.end_request(holder))
    return client


async def read_chunks(
    request: Request, media_type: str, limit: int, seconds: float
) -> AsyncIterator[bytes]:
    """Read the body of a request in parts, all within a time limit.

    A body that is too large is still read for a while, because most clients send everything before
    they read the response, and would only see a reset.

    Raises:
        APIError: the body is too large, of another type, or too slow.
        ClientGone: the client has disconnected.
    """
    _check_headers(request, media_type)
    too_large = _too_large(
        f"the body is larger than {limit:,} bytes, the limit of this server. Send less"
    )
    length = request.headers.get("content-length", "0")
    most = limit if "expect" in request.headers else limit + DRAINED
    if not length.isdecimal() or len(length) > MAX_DIGITS or int(length) > most:
        raise too_large
    is_too_large = int(length) > limit
    limiter: BodyLimiter = request.app.state.bodies
    engine: Engine = request.app.state.client.engine
    loop = asyncio.get_running_loop()
    parts = request.stream()
    try:
        with limiter.reading(request.state.holder, seconds) as body:
            while True:
                async with body.timeout():
                    chunk = await anext(parts, None)
                if chunk is None:
                    break
                body.size += len(chunk)
                is_too_large |= body.size > limit
                if body.size > most:
                    raise too_large
                if not is_too_large:
                    yield chunk
                if body.size > LARGE and engine.is_busy:
                    holder = request.state.holder
                    await asyncio.sleep(limiter.delay(holder, len(chunk), loop.time()))
    except TimeoutError:
        raise APIError(
            408,
            "the body did not arrive in time. Send it faster, or send less.",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    if is_too_large:
        raise too_large


def _too_large(message: str) -> APIError:
    headers = {"Connection": "close"}
    return APIError(413, message, code="request_too_large", headers=headers)


def _check_headers(request: Request, media_type: str) -> None:
    """Refuse bodies with another media type, character set or encoding."""
    named = Message()
    named["content-type"] = request.headers.get("content-type", "")
    # Pages in a browser may send some other types, such as text/plain, to any address without
    # permission.
    if named.get_content_type() != media_type and not _may_leave_out_type(request, media_type):
        what = "JSON" if media_type == JSON else "a file"
        raise APIError(415, f"the body must be {what}. Send Content-Type: {media_type}.")
    charset = named.get_content_charset("utf-8")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise APIError(415, "the body must be UTF-8. Leave charset out of Content-Type.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise APIError(
            415,
            "the body must not be compressed. Leave out Content-Encoding.",
            headers={"Accept-Encoding": "identity"},
        )


def _may_leave_out_type(request: Request, media_type: str) -> bool:
    """Return whether a body is taken as JSON although its header does not say so.

    LiteLLM's client of Ollama's API sends no type or `BYTES`, and `curl -d` in Ollama's
    documentation sends the type of a form. Requests of web pages are never taken this way: browsers
    add one of the `BROWSER_HEADERS` to them.
    """
    headers = request.headers
    if media_type != JSON or any(name in headers for name in BROWSER_HEADERS):
        return False
    named = headers.get("content-type", "").strip().lower()
    return named in ("", BYTES) or (named == FORM and request.url.path.startswith("/api/"))


async def read_body(request: Request, kind: type[Body], owner: str) -> Body:
    """Read and validate the body of a request, which counts for its owner from then on.

    A missing body counts as an empty object if no field is required.

    Raises:
        APIError: the owner has too many requests, or the body is too large, slow or wrong.
        ClientGone: the client has disconnected.
    """
    data, counter = await _read(request, kind, owner, 0)
    if len(data) < LARGE:
        return parse_body(data, kind, counter)
    worker: Worker = request.app.state.client.worker
    body: Body = await run_in_thread(worker.call, _parse, data, kind, counter)
    return body


async def read_content(
    request: Request, kind: type[Body], owner: str, field: str, what: str, numbers: int = 0
) -> tuple[Body, Any]:
    """Read and validate a body like `read_body`. Returns the body and its content.

    For a large body, the worker holds the content, and a handle is returned instead.

    Args:
        field: the field with the content. If the body is large, it is returned with None there.
        what: the property of the body that is its content.
        numbers: how many more entries of lists are allowed than in other bodies, for prompts of
            token ids.
    """
    data, counter = await _read(request, kind, owner, numbers)
    if len(data) < LARGE:
        body = parse_body(data, kind, counter)
        return body, getattr(body, what)
    worker: Worker = request.app.state.client.worker
    return await run_in_thread(worker.split, _take_content, data, kind, counter, field, what)


async def _read(
    request: Request, kind: type[Body], owner: str, numbers: int
) -> tuple[bytearray, NodeCounter]:
    limits = begin_request(request, owner).limits
    limiter: BodyLimiter = request.app.state.bodies
    read, counter = bytearray(), NodeCounter(numbers)
    refused: APIError | None = None
    optional = not any(field.is_required() for field in kind.model_fields.values())
    if not (optional and _has_no_body(request)):
        async for chunk in read_chunks(request, JSON, limits.body, limits.stall):
            if refused is not None:
                continue  # many clients read no response before they have sent everything
            nodes = counter.nodes
            try:
                counter.feed(chunk)
                limiter.add(request, len(chunk) + NODE * (counter.nodes - nodes))
                read += chunk
            except (APIError, TooManyNodes) as error:
                refused = _too_large(str(error)) if isinstance(error, TooManyNodes) else error
                read.clear()
    if refused is not None:
        raise refused
    if not read and optional:
        read += b"{}"
    return read, counter


def _parse(_: Any, data: bytearray, kind: type[Body], counter: NodeCounter) -> Body:
    return parse_body(data, kind, counter)


def _take_content(
    _: Any, data: bytearray, kind: type[Body], counter: NodeCounter, field: str, what: str
) -> tuple[Body, Any]:
    body = parse_body(data, kind, counter)
    content = getattr(body, what)
    return body.model_copy(update={field: None}), content


def parse_body(
    data: bytes | bytearray, kind: type[Body], counter: NodeCounter | None = None
) -> Body:
    """Parse and validate the body of a request.

    `counter` also counts the values of JSON that is written inside strings of the body, such as the
    arguments of tool calls.

    A bytearray is emptied, so that a large body is not in memory twice. Raises APIError if the body
    is wrong.
    """
    text = bytes(data)  # `from_json` reads only bytes
    if isinstance(data, bytearray):
        data.clear()
    try:
        value = from_json(text.removeprefix(BOM_UTF8), cache_mode="keys", catch_duplicate_keys=True)
    except ValueError as error:
        raise invalid_json(str(error)) from None
    del text
    try:
        return kind.model_validate(value, context=counter and counter.feed_text)
    except ValidationError as error:
        raise invalid_body(error) from None
    except TooManyNodes as error:
        raise _too_large(str(error)) from None


def _has_no_body(request: Request) -> bool:
    """Return whether a request has no body, so that nothing has to be checked or read.

    False for a request with an `Origin` header, as web pages send it: its type is always checked.
    """
    headers = request.headers
    return headers.get("content-length", "0") == "0" and not any(
        name in headers for name in ("content-type", "transfer-encoding", "origin")
    )


async def check_query(request: Request) -> None:
    """Refuse unknown query parameters, and sessions that clients cannot name (`is_hidden`)."""
    if is_hidden(str(request.path_params.get("name", ""))):
        raise not_found("session")
    for name in unknown_query(request):
        message = f"Unrecognized request argument supplied: {name[:80]}"
        raise APIError(400, message, param=name[:80], code="unknown_parameter")


def unknown_query(request: Request) -> list[str]:
    """Return the query parameters that a route does not have."""
    top = request.scope["route"].dependant
    known = {param.alias for part in (top, *top.dependencies) for param in part.query_params}
    return [name for name in request.query_params if name not in known]


def named_session(request: Request) -> str | None:
    """Return the session that the client names, if any. Raises APIError for an invalid name."""
    name = request.headers.get(SESSION_HEADER)
    if name is not None and not re.fullmatch(patterns.SESSION, name):
        raise APIError(
            400,
            f"{SESSION_HEADER} {patterns.SENTENCES[patterns.SESSION]}",
            param=SESSION_HEADER,
        )
    return name


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If the client disconnects, cancel it and raise ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def wait_disconnect(receive: Callable[[], Any]) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
