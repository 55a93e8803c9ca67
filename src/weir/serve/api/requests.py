"""Reading a request: whose it is, its body, its session; all of it before anything is done."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from weir.serve.api.errors import Refused, invalid, overloaded
from weir.serve.api.keys import Keys
from weir.serve.api.middleware import at_end
from weir.serve.client import EngineClient
from weir.serve.engine import Busy

T = TypeVar("T", bound=BaseModel)
SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
HEADER = "x-session-id"
JSON = "application/json"
LONGEST = 20
"""Digits of a length; Python reads no number of thousands."""


class Gone(Exception):
    """The client has hung up."""


def authorized(request: Request) -> str:
    """Whose request it is; a dependency of every route but `/health`.

    Raises:
        Refused: the key is missing or wrong.
    """
    keys: Keys = request.app.state.keys
    if not keys:
        return ""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    owner = keys.owner(key.strip()) if kind.lower() == "bearer" else None
    if owner is None:
        raise Refused(
            401,
            "a key is needed that this server knows: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return owner


def enter(request: Request, owner: str) -> EngineClient:
    """A request counts as one of its owner's from now on.

    Raises:
        Refused: there are too many already.
    """
    desk: EngineClient = request.app.state.desk
    try:
        desk.enter(owner)
    except Busy as error:
        raise overloaded(str(error)) from None
    at_end(request.scope, lambda: desk.leave(owner))
    return desk


async def chunks(request: Request, kind: str, limit: int, seconds: float) -> AsyncIterator[bytes]:
    """The body of a request, as it comes.

    Args:
        request: whose.
        kind: its media type.
        limit: bytes that it may have.
        seconds: in which all of it must be there.

    Raises:
        Refused: it is too large, of another type, or comes too slowly.
        Gone: it does not come whole.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != kind:
        # Pages in a browser may send anything else to any address without asking.
        what = "JSON" if kind == JSON else "a file"
        raise Refused(415, f"the body must be {what}: Content-Type: {kind}")
    too_large = Refused(
        413,
        f"the body may have {limit:,} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )
    told = request.headers.get("content-length", "0")
    if not told.isdecimal() or len(told) > LONGEST or int(told) > limit:
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
        raise Refused(
            408, "the body did not come in time", headers={"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise Gone from None


async def read_body(request: Request, kind: type[T], owner: str) -> T:
    """The body of a request, which counts as one of its owner's from now on.

    None at all is an empty object where all fields may be left out.

    Raises:
        Refused: there are too many already, or it is too large, comes too slowly, or is not what it
            should be.
        Gone: it does not come whole.
    """
    limits = enter(request, owner).limits
    read = bytearray()
    free = not any(field.is_required() for field in kind.model_fields.values())
    if not (free and _bodiless(request)):
        async for chunk in chunks(request, JSON, limits.body, limits.stall):
            read += chunk
    try:
        return kind.model_validate_json(bytes(read) or (b"{}" if free else b""))
    except ValidationError as error:
        raise invalid(error) from None


def _bodiless(request: Request) -> bool:
    """Whether a program sends no body at all; pages in a browser say where they are from."""
    told = request.headers
    return told.get("content-length", "0") == "0" and not any(
        name in told for name in ("content-type", "transfer-encoding", "origin")
    )


def known_query(request: Request) -> None:
    """Look at what stands behind `?` in an address; a dependency of routes.

    Raises:
        Refused: the route has no such parameter.
    """
    top = request.scope["route"].dependant
    known = {each.alias for part in (top, *top.dependencies) for each in part.query_params}
    for name in request.query_params:
        if name not in known:
            message = f"Unrecognized request argument supplied: {name[:80]}"
            raise Refused(400, message, param=name[:80], code="unknown_parameter")


def session_of(request: Request) -> str | None:
    """The session that a client names.

    Raises:
        Refused: that is no name.
    """
    name = request.headers.get(HEADER)
    if name is not None and not SESSION.fullmatch(name):
        raise Refused(
            400,
            f"{HEADER} is 1 to 128 letters, digits or _ . : -, and begins with a letter or digit",
            param=HEADER,
        )
    return name
