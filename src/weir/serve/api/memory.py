"""`GET /v1/sessions/ID/memory`: what a session's cache still remembers, told by token."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from weir.errors import WeirError
from weir.serve.api.errors import not_found
from weir.serve.api.requests import authorized
from weir.serve.client import EngineClient
from weir.serve.engine import RowInspection, Sequence
from weir.serve.recall import Memory, Recaller, Row, row_at, row_of_turn

router = APIRouter()
PATIENCE = 5.0
"""Seconds that the engine may take to show a row; a step of it takes less, or it has failed."""


@router.get("/v1/sessions/{name}/memory")
async def memory(
    name: str,
    request: Request,
    most: Annotated[int, Query(ge=0, le=8192)] = 2048,
    latest: Annotated[int, Query(ge=0, le=8192)] = 512,
    owner: str = Depends(authorized),
) -> dict[str, Any]:
    """What a session holds: of the turn under way, or at the end of its newest.

    Args:
        name: of the session.
        request: whose.
        most: tokens that are held, at most so many.
        latest: tokens of the end of the stream, whether they are held or not.
        owner: whose session it is.
    """
    desk: EngineClient = request.app.state.desk
    turn = desk.under_way(owner, name)
    glance = None if turn is None else await glance_at(desk, turn)
    recaller: Recaller = request.app.state.recaller

    def look() -> Memory:
        return recaller.recall(row_of(desk, owner, name, turn, glance), most, latest)

    try:
        found = await asyncio.to_thread(look)
    except WeirError:  # what it ended with went at this moment
        raise not_found("session") from None
    return {"id": name, "object": "session.memory", **told(found, desk)}


async def glance_at(desk: EngineClient, turn: Sequence) -> RowInspection | None:
    """What the engine sees of a turn; None where it has ended."""
    look = asyncio.wrap_future(desk.engine.look(turn))
    # Others may wait for the same look, so that it is never cancelled.
    await asyncio.wait({look}, timeout=PATIENCE)
    if not look.done() or look.cancelled() or look.exception() is not None:
        return None
    return look.result()


def row_of(
    desk: EngineClient,
    owner: str,
    session: str,
    turn: Sequence | None,
    glance: RowInspection | None,
) -> Row:
    """The row of the turn that was looked at, or that of the session's newest saved turn.

    Raises:
        WeirError: the turn is not kept any more.
        Refused: there is no such session.
    """
    if turn is not None and glance is not None:
        return row_of_turn(desk.store, owner, turn, glance)
    found = desk.store.get_session(owner, session)
    if found is None:
        raise not_found("session")
    return row_at(desk.store, owner, found.head, desk.engine.cache.plans)


def told(memory: Memory, desk: EngineClient) -> dict[str, Any]:
    """What a row remembers, as JSON."""
    return {
        "doing": memory.doing,
        "policy": str(desk.engine.cache.policy),
        "chunk": desk.engine.cache.chunk,
        "seen": memory.seen,
        "read": memory.read,
        "folds": memory.folds,
        "bytes": memory.bytes,
        "bytes_of_all": memory.whole,
        "pairs": memory.pairs,
        "held": memory.held,
        "pools": [vars(pool) for pool in memory.pools],
        "tokens": [
            {"at": it.at, "text": it.text, "pools": it.pools, **special(it.special)}
            for it in memory.tokens
        ],
    }


def special(is_special: bool) -> dict[str, bool]:
    """Said of the few tokens that are special, and not of all others."""
    return {"special": True} if is_special else {}
