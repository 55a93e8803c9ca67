"""Reading a request: whose it is, its body, its session; all of it before anything is done."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from weir.serve.app.errors import Refused, invalid, overloaded
from weir.serve.app.guard import at_end
from weir.serve.app.keys import Keys
from weir.serve.desk import Desk
from weir.serve.engine import Busy

T = TypeVar("T", bound=BaseModel)
SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
HEADER = "x-session-id"


class Gone(Exception):
    """The client has hung up."""


def authorised(request: Request) -> str:
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


async def read_body(request: Request, kind: type[T], owner: str) -> T:
    """The body of a request, which counts as one of its owner's from now on.

    Raises:
        Refused: there are too many already, or it is too large, comes too slowly, or is not what it
            should be.
        Gone: it does not come whole.
    """
    desk: Desk = request.app.state.desk
    limits = desk.limits
    try:
        desk.enter(owner)
    except Busy as error:
        raise overloaded(str(error)) from None
    at_end(request.scope, lambda: desk.leave(owner))
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        # Pages in a browser may send anything else to any address without asking.
        raise Refused(415, "the body must be JSON: Content-Type: application/json")
    too_large = Refused(
        413,
        f"the body may have {limits.body:,} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )
    told = request.headers.get("content-length", "0")
    if not told.isdecimal() or int(told) > limits.body:
        raise too_large
    read = bytearray()
    try:
        async with asyncio.timeout(limits.stall):
            async for chunk in request.stream():
                read += chunk
                if len(read) > limits.body:
                    raise too_large
    except TimeoutError:
        raise Refused(
            408, "the body did not come in time", headers={"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise Gone from None
    try:
        return kind.model_validate_json(bytes(read))
    except ValidationError as error:
        raise invalid(error) from None


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
