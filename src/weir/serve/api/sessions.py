"""`/v1/sessions`: what is kept of conversations, for their owner and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from weir.errors import WeirError
from weir.serve.api.errors import Refused, conflict, not_found, overloaded
from weir.serve.api.openapi import takes
from weir.serve.api.requests import SESSION, authorized, chunks, enter, known_query, read_body
from weir.serve.api.schemas.base import Strict
from weir.serve.api.schemas.items import Page
from weir.serve.api.sse import EventStream
from weir.serve.client import EngineClient
from weir.serve.engine import Busy
from weir.serve.sessions import (
    HeldByConversation,
    NameTaken,
    SessionSummary,
    TurnRecord,
    UnknownSession,
)

FILE = "application/octet-stream"
READ = 2**18
SLOWEST = 20
"""A file may take so many times as long as a body."""

BINARY = {FILE: {"schema": {"type": "string", "format": "binary"}}}

router = APIRouter(dependencies=[Depends(known_query)])
T = TypeVar("T")
Turn = Annotated[str, StringConstraints(pattern=r"^(resp_)?[0-9a-f]{32}$")]


class ForkBody(Strict):
    """`POST /v1/sessions/{name}/fork`."""

    turn: Turn | None = None
    id: Annotated[str, StringConstraints(pattern=f"^{SESSION.pattern}$")] | None = None


class RewindBody(Strict):
    """`POST /v1/sessions/{name}/rewind`."""

    turn: Turn


@dataclass(frozen=True)
class TurnPage(Page):
    """Which turns of a session are wanted: the oldest come first if nothing is said."""

    limit: Annotated[int, Query(ge=1, le=1000)] = 100
    order: Annotated[Literal["asc", "desc"], Query()] = "asc"

    what: ClassVar[str] = "turn"


@router.get("/v1/sessions")
async def sessions(request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """All sessions, the one first whose newest turn is."""
    desk: EngineClient = request.app.state.desk
    found = await asyncio.to_thread(desk.store.list_sessions, owner)
    # What was imported or forked is new here, and its turns are not.
    found = sorted(found, key=lambda session: session.used)
    return {"object": "list", "data": [told(session) for session in reversed(found)]}


@router.post(
    "/v1/sessions/import", openapi_extra={"requestBody": {"required": True, "content": BINARY}}
)
async def take_in(request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """Take in a session that was exported, as a new one."""
    desk = enter(request, owner)
    limits = desk.limits
    with desk.store.make_scratch_folder() as folder:
        path = Path(folder) / "session"
        with open(path, "wb") as file:
            async for chunk in chunks(request, FILE, limits.parcel, SLOWEST * limits.stall):
                await asyncio.to_thread(file.write, chunk)
        return told(await done(lambda: desk.sessions.import_file(owner, path)))


@router.get("/v1/sessions/{name}")
async def session(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """One session."""
    desk: EngineClient = request.app.state.desk
    found = await asyncio.to_thread(desk.store.get_session, owner, name)
    if found is None:
        raise not_found("session")
    return told(found)


@router.delete("/v1/sessions/{name}")
async def delete(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """Delete a session: no turn goes on from any that was in it alone."""
    desk: EngineClient = request.app.state.desk
    if not await done(lambda: desk.sessions.delete(owner, name)):
        raise not_found("session")
    return {"id": name, "object": "session", "deleted": True}


@router.get("/v1/sessions/{name}/turns")
async def turns(
    name: str,
    request: Request,
    page: Annotated[TurnPage, Depends()],
    owner: str = Depends(authorized),
) -> dict[str, Any]:
    """The turns of a session that are kept, in the order they came, so many at a time."""
    desk: EngineClient = request.app.state.desk
    records, path = await done(lambda: desk.sessions.list_turns(owner, name))
    return page.told(page.of([turn(each, each.node in path) for each in records]))


@router.post("/v1/sessions/{name}/fork", openapi_extra=takes(ForkBody))
async def fork(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """A new session that begins with what led to a turn of this one."""
    body = await read_body(request, ForkBody, owner)
    desk: EngineClient = request.app.state.desk
    node = None if body.turn is None else body.turn.removeprefix("resp_")
    return told(await done(lambda: desk.sessions.fork(owner, name, node, body.id)))


@router.post("/v1/sessions/{name}/rewind", openapi_extra=takes(RewindBody))
async def rewind(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """Let a session end with one of its turns."""
    body = await read_body(request, RewindBody, owner)
    desk: EngineClient = request.app.state.desk
    node = body.turn.removeprefix("resp_")
    return told(await done(lambda: desk.sessions.rewind(owner, name, node)))


@router.get("/v1/sessions/{name}/export", openapi_extra={"responses": {"200": {"content": BINARY}}})
async def export(
    name: str,
    request: Request,
    owner: str = Depends(authorized),
    turns: Annotated[int | None, Field(ge=1, lt=2**31)] = None,
) -> Response:
    """A session as a file, all of it or its newest turns."""
    desk = enter(request, owner)
    folder = desk.store.make_scratch_folder()
    path = Path(folder.name) / "session"
    try:
        await done(lambda: desk.sessions.export_file(owner, name, turns, path))
    except BaseException:
        folder.cleanup()
        raise
    headers = {
        "content-length": str(path.stat().st_size),
        "content-disposition": 'attachment; filename="session.safetensors"',
    }
    return EventStream(
        _read(path), asyncio.Event(), desk.limits.stall, folder.cleanup, headers, FILE
    )


async def _read(path: Path) -> AsyncIterator[bytes]:
    with open(path, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, READ):
            yield chunk


async def done(work: Callable[[], T]) -> T:
    """The result of what is done with sessions, in a thread.

    Raises:
        Refused: it cannot be done.
    """
    try:
        return await asyncio.to_thread(work)
    except UnknownSession as error:
        raise not_found(str(error).rpartition(" ")[2]) from None
    except Busy as error:
        raise overloaded(str(error)) from None
    except NameTaken as error:
        raise conflict(str(error), "already_exists", param="id") from None
    except HeldByConversation as error:
        raise conflict(str(error), "is_conversation") from None
    except WeirError as error:
        raise Refused(400, str(error), code="invalid_value") from None


def told(session: SessionSummary) -> dict[str, Any]:
    """A session as JSON."""
    return {
        "id": session.id,
        "object": "session",
        "topic": session.topic,
        "created": int(session.created),
        "used": int(session.used),
        "turns": session.turns,
        "head": f"resp_{session.head}",
        "seen": session.seen,
        "held": session.usage.get("held"),
        "bytes": session.usage.get("bytes"),
        "folds": session.usage.get("folds"),
        "pinned": session.usage.get("pinned"),
        "beginning": session.usage.get("beginning"),
    }


def turn(record: TurnRecord, leads: bool) -> dict[str, Any]:
    """A turn as JSON.

    Args:
        record: the turn.
        leads: whether the newest turn goes on from it, over however many, or is it.
    """
    return {
        "id": f"resp_{record.node}",
        "object": "session.turn",
        "parent": None if record.parent is None else f"resp_{record.parent}",
        "current": leads,
        "created": int(record.created),
        "messages": [message.for_template() for message in record.messages],
        "seen": record.seen,
        "usage": record.usage,
    }
