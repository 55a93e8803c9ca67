"""`/v1/sessions`: what is kept of conversations, for their owner and nobody else."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from weir.serve.app.errors import not_found
from weir.serve.app.reading import authorised
from weir.serve.desk import Desk
from weir.serve.records import Session

router = APIRouter()


@router.get("/v1/sessions")
async def sessions(request: Request, owner: str = Depends(authorised)) -> dict[str, Any]:
    """All sessions, the one used last first."""
    desk: Desk = request.app.state.desk
    found = desk.store.sessions(owner)
    return {"object": "list", "data": [told(session) for session in reversed(found)]}


@router.get("/v1/sessions/{name}")
async def session(name: str, request: Request, owner: str = Depends(authorised)) -> dict[str, Any]:
    """One session."""
    desk: Desk = request.app.state.desk
    found = desk.store.session(owner, name)
    if found is None:
        raise not_found("session")
    return told(found)


@router.delete("/v1/sessions/{name}")
async def delete(name: str, request: Request, owner: str = Depends(authorised)) -> dict[str, Any]:
    """Delete a session: no turn goes on from any of its own any more."""
    desk: Desk = request.app.state.desk
    if not desk.forget(owner, name):
        raise not_found("session")
    return {"id": name, "object": "session", "deleted": True}


def told(session: Session) -> dict[str, Any]:
    """A session as JSON."""
    head = session.head
    return {
        "id": session.id,
        "object": "session",
        "created": int(session.created),
        "used": int(head.created),
        "turns": len(session.nodes),
        "seen": head.seen,
        "held": head.usage.get("held"),
        "bytes": head.usage.get("bytes"),
        "folds": head.usage.get("folds"),
    }
