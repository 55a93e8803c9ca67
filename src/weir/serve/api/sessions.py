"""`/v1/sessions`: the saved sessions of an owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from weir.serve import patterns
from weir.serve.api.dependencies import Client, Owner, PageQuery, look_up, run_in_thread
from weir.serve.api.errors import APIError, not_found, server_error, storage_full
from weir.serve.api.middleware import LOG
from weir.serve.api.openapi import describe_body
from weir.serve.api.requests import begin_request, check_query, read_body, read_chunks
from weir.serve.api.schemas.base import Strict
from weir.serve.api.sse import EventStream
from weir.serve.sessions.records import SessionSummary, TurnRecord, is_hidden
from weir.serve.sessions.snapshot_folder import is_full

FILE = "application/octet-stream"
CHUNK = 2**18
"""Bytes of a file that are read at a time."""
FILE_PATIENCE = 20
"""The time limit for reading a file, as a multiple of the time limit for a JSON body."""

STREAM_FACTS = ("held", "bytes", "folds", "pinned", "beginning", "forgotten")
"""Fields of the newest turn's usage that are shown for a session."""
BINARY = {FILE: {"schema": {"type": "string", "format": "binary"}}}

router = APIRouter(dependencies=[Depends(check_query)])
Turn = Annotated[str, StringConstraints(pattern=patterns.TURN)]


class ForkBody(Strict):
    """Request body of `POST /v1/sessions/{name}/fork`."""

    turn: Turn | None = None
    id: Annotated[str, StringConstraints(pattern=patterns.SESSION)] | None = None


class RewindBody(Strict):
    """Request body of `POST /v1/sessions/{name}/rewind`."""

    turn: Turn


@dataclass(frozen=True)
class TurnPage(PageQuery):
    """The page of turns that a client asks for, oldest first by default."""

    limit: Annotated[int, Query(ge=1, le=1000)] = 100
    order: Annotated[Literal["asc", "desc"], Query()] = "asc"

    what: ClassVar[str] = "turn"


@router.get("/v1/sessions")
async def sessions(client: Client, owner: Owner) -> dict[str, Any]:
    """List all sessions, most recently used first."""
    found = await run_in_thread(client.store.list_sessions, owner)
    # The store sorts sessions by when their turns were last used, and importing or forking counts
    # as a use. Clients see only `used`, when the newest turn ended, so the list is sorted by it.
    shown = (session for session in found if not is_hidden(session.id))
    found = sorted(shown, key=lambda session: session.used)
    return {"object": "list", "data": [session_object(session) for session in reversed(found)]}


@router.post(
    "/v1/sessions/import", openapi_extra={"requestBody": {"required": True, "content": BINARY}}
)
async def import_session(request: Request, owner: Owner) -> dict[str, Any]:
    """Import a session from a file, as a new session."""
    client = begin_request(request, owner)
    limits = client.limits
    try:
        with client.store.make_scratch_folder() as folder:
            path = Path(folder) / "session"
            with open(path, "wb") as file:
                async for chunk in read_chunks(
                    request, FILE, limits.parcel, FILE_PATIENCE * limits.stall
                ):
                    await asyncio.to_thread(file.write, chunk)
            found = await run_in_thread(client.sessions.import_file, owner, path)
    except OSError as error:
        raise _cannot_write(error) from None
    return session_object(found)


@router.get("/v1/sessions/{name}")
async def session(name: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Retrieve a session."""
    return session_object(await look_up("session", client.store.get_session, owner, name))


@router.delete("/v1/sessions/{name}")
async def delete(name: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Delete a session, and the turns that are in no other session."""
    if not await run_in_thread(client.sessions.delete, owner, name):
        raise not_found("session")
    return {"id": name, "object": "session", "deleted": True}


@router.get("/v1/sessions/{name}/turns")
async def turns(
    name: str, page: Annotated[TurnPage, Depends()], client: Client, owner: Owner
) -> dict[str, Any]:
    """List the saved turns of a session, in pages."""
    records, path = await run_in_thread(client.sessions.list_turns, owner, name)
    shown = page.cut([turn_object(record, record.node in path) for record in records])
    by_id = {f"resp_{record.node}": record for record in records}

    def with_recalled(turn: dict[str, Any]) -> dict[str, Any]:
        text = client.recalled_in(by_id[turn["id"]])
        return turn if text is None else {**turn, "recalled": text}

    # In a thread, because the text is decoded from the tokens of the turn.
    return page.to_json(await asyncio.to_thread(lambda: [with_recalled(turn) for turn in shown]))


@router.post("/v1/sessions/{name}/fork", openapi_extra=describe_body(ForkBody))
async def fork(name: str, request: Request, client: Client, owner: Owner) -> dict[str, Any]:
    """Fork a session at one of its turns."""
    body = await read_body(request, ForkBody, owner)
    node = None if body.turn is None else body.turn.removeprefix("resp_")
    return session_object(await run_in_thread(client.sessions.fork, owner, name, node, body.id))


@router.post("/v1/sessions/{name}/rewind", openapi_extra=describe_body(RewindBody))
async def rewind(name: str, request: Request, client: Client, owner: Owner) -> dict[str, Any]:
    """Rewind a session to one of its turns."""
    body = await read_body(request, RewindBody, owner)
    node = body.turn.removeprefix("resp_")
    return session_object(await run_in_thread(client.sessions.rewind, owner, name, node))


@router.get("/v1/sessions/{name}/export", openapi_extra={"responses": {"200": {"content": BINARY}}})
async def export(
    name: str,
    request: Request,
    owner: Owner,
    turns: Annotated[int | None, Field(ge=1, lt=2**31)] = None,
) -> Response:
    """Export a session, or its newest turns, as a file."""
    client = begin_request(request, owner)
    try:
        folder = client.store.make_scratch_folder()
    except OSError as error:
        raise _cannot_write(error) from None
    path = Path(folder.name) / "session"
    try:
        await run_in_thread(client.sessions.export_file, owner, name, turns, path)
    except BaseException:
        folder.cleanup()
        raise
    headers = {
        "content-length": str(path.stat().st_size),
        "content-disposition": 'attachment; filename="session.safetensors"',
    }
    return EventStream(
        _read(path), asyncio.Event(), client.limits.stall, folder.cleanup, headers, FILE
    )


def _cannot_write(error: OSError) -> APIError:
    """Return the error for an imported or exported file that cannot be written to disk."""
    if is_full(error):
        return storage_full("the disk has no room for the file of this session. Free some space.")
    LOG.error("a file cannot be written", exc_info=error)
    return server_error()


async def _read(path: Path) -> AsyncIterator[bytes]:
    with open(path, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK):
            yield chunk


def session_object(session: SessionSummary) -> dict[str, Any]:
    """A session as a JSON object."""
    return {
        "id": session.id,
        "object": "session",
        "topic": session.topic,
        "created": int(session.created),
        "used": int(session.used),
        "turns": session.turns,
        "head": f"resp_{session.head}",
        "seen": session.seen,
        **{name: session.usage.get(name) for name in STREAM_FACTS},
    }


def turn_object(record: TurnRecord, current: bool) -> dict[str, Any]:
    """Return a turn as JSON. The newest turn and its ancestors are current."""
    return {
        "id": f"resp_{record.node}",
        "object": "session.turn",
        "parent": None if record.parent is None else f"resp_{record.parent}",
        "current": current,
        "created": int(record.created),
        "messages": [message.for_template() for message in record.messages],
        "seen": record.seen,
        "usage": record.usage,
    }
