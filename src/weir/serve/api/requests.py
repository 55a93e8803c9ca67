"""Reading of a request: its owner, body and session, before anything is done; and its hang-up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from weir.serve.api.errors import APIError, invalid_body, rate_limited
from weir.serve.api.keys import Keys
from weir.serve.api.middleware import at_end
from weir.serve.client import EngineClient
from weir.serve.engine import Busy

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
SESSION_HEADER = "x-session-id"
JSON = "application/json"
MAX_DIGITS = 20
"""Digits of a Content-Length: `int` raises on a text with thousands of them."""


class ClientGone(Exception):
    """The client has hung up."""


def authorize(request: Request) -> str:
    """The owner of a request; a dependency of every route but `/health`.

    Raises:
        APIError: the key is missing or wrong.
    """
    keys: Keys = request.app.state.keys
    if not keys:
        return ""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    owner = keys.owner_of(key.strip()) if scheme.lower() == "bearer" else None
    if owner is None:
        raise APIError(
            401,
            "a key is needed that this server knows: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return owner


def begin_request(request: Request, owner: str) -> EngineClient:
    """Count a request as one of its owner's until it ends.

    Raises:
        APIError: there are too many already.
    """
    client: EngineClient = request.app.state.client
    try:
        client.begin_request(owner)
    except Busy as error:
        raise rate_limited(str(error)) from None
    at_end(request.scope, lambda: client.end_request(owner))
    return client


async def read_chunks(
    request: Request, media_type: str, limit: int, seconds: float
) -> AsyncIterator[bytes]:
    """Read the body of a request as it comes.

    Args:
        request: of the client.
        media_type: that it must have.
        limit: bytes that it may have.
        seconds: in which all of it must have come.

    Raises:
        APIError: it is too large, of another type, or comes too slowly.
        ClientGone: the client has hung up.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != media_type:
        # Pages in a browser may send anything else to any address without asking.
        what = "JSON" if media_type == JSON else "a file"
        raise APIError(415, f"the body must be {what}: Content-Type: {media_type}")
    too_large = APIError(
        413,
        f"the body may have {limit:,} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > MAX_DIGITS or int(length) > limit:
        raise too_large
    read, until = 0, asyncio.get_running_loop().time() + seconds
    parts = request.stream()
    try:
        while True:
            async with asyncio.timeout_at(until):
                chunk = await anext(parts, None)
            if chunk is None:
                return
            read += len(chunk)
            if read > limit:
                raise too_large
            yield chunk
    except TimeoutError:
        raise APIError(
            408, "the body did not come in time", headers={"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise ClientGone from None


async def read_body(request: Request, kind: type[Body], owner: str) -> Body:
    """Read and validate the body of a request, which counts as one of its owner's from now on.

    No body at all is an empty object, if no field is required.

    Raises:
        APIError: the owner has too many requests, or the body is too large, slow or wrong.
        ClientGone: the client has hung up.
    """
    limits = begin_request(request, owner).limits
    read = bytearray()
    optional = not any(field.is_required() for field in kind.model_fields.values())
    if not (optional and _has_no_body(request)):
        async for chunk in read_chunks(request, JSON, limits.body, limits.stall):
            read += chunk
    try:
        return kind.model_validate_json(bytes(read) or (b"{}" if optional else b""))
    except ValidationError as error:
        raise invalid_body(error) from None


def _has_no_body(request: Request) -> bool:
    """Whether a program sends no body; a page in a browser would name its origin."""
    headers = request.headers
    return headers.get("content-length", "0") == "0" and not any(
        name in headers for name in ("content-type", "transfer-encoding", "origin")
    )


def check_query(request: Request) -> None:
    """Refuse unknown query parameters; a dependency of routes.

    Raises:
        APIError: the route has no such parameter.
    """
    top = request.scope["route"].dependant
    known = {param.alias for part in (top, *top.dependencies) for param in part.query_params}
    for name in request.query_params:
        if name not in known:
            message = f"Unrecognized request argument supplied: {name[:80]}"
            raise APIError(400, message, param=name[:80], code="unknown_parameter")


def named_session(request: Request) -> str | None:
    """The session that the client names, if it does.

    Raises:
        APIError: that is no name of a session.
    """
    name = request.headers.get(SESSION_HEADER)
    if name is not None and not SESSION_NAME.fullmatch(name):
        raise APIError(
            400,
            f"{SESSION_HEADER} is 1 to 128 letters, digits or _ . : -, and begins with a letter "
            "or digit",
            param=SESSION_HEADER,
        )
    return name


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client hangs up.

    Raises:
        ClientGone: it did.
    """
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
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
