"""`GET /v1/sessions/ID/memory`: what a session's cache still holds, token by token."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from weir.errors import WeirError
from weir.serve.api.dependencies import Client, Owner
from weir.serve.api.errors import not_found
from weir.serve.client import EngineClient
from weir.serve.engine import RowInspection, Sequence
from weir.serve.recall import Recaller, RecallSource, RowMemory, running_row, saved_row

router = APIRouter()
PATIENCE = 5.0
"""Seconds to wait for an inspection; a step of a working engine takes less."""


@router.get("/v1/sessions/{name}/memory")
async def memory(
    name: str,
    request: Request,
    client: Client,
    owner: Owner,
    most: Annotated[int, Query(ge=0, le=8192)] = 2048,
    latest: Annotated[int, Query(ge=0, le=8192)] = 512,
) -> dict[str, Any]:
    """List the tokens that a session's cache holds: now, or at the end of its newest turn.

    `most` bounds the held tokens that are listed; `latest` is the number of tokens at the end of
    the stream that are listed, held or not.
    """
    sequence = client.running_sequence(owner, name)
    inspection = None if sequence is None else await inspect(client, sequence)
    recaller: Recaller = request.app.state.recaller

    def recall() -> RowMemory:
        source = _source(client, owner, name, sequence, inspection)
        return recaller.recall(source, most, latest)

    try:
        found = await asyncio.to_thread(recall)
    except WeirError:  # its newest turn has been dropped meanwhile
        raise not_found("session") from None
    return {
        "id": name,
        "object": "session.memory",
        "doing": found.doing,
        "policy": str(client.engine.cache.policy),
        "chunk": client.engine.cache.chunk,
        "seen": found.seen,
        "read": found.read,
        "folds": found.folds,
        "bytes": found.bytes,
        "bytes_of_all": found.bytes_uncompressed,
        "pairs": found.pairs,
        "held": found.held,
        "pools": [vars(pool) for pool in found.pools],
        "tokens": [
            {"at": token.at, "text": token.text, "pools": token.pools}
            | ({"special": True} if token.special else {})
            for token in found.tokens
        ],
    }


async def inspect(client: EngineClient, sequence: Sequence) -> RowInspection | None:
    """Inspect the row of a running sequence; None if it has ended."""
    inspecting = asyncio.wrap_future(client.engine.inspect(sequence))
    # It is never cancelled, since others may wait for the same inspection.
    await asyncio.wait({inspecting}, timeout=PATIENCE)
    if not inspecting.done() or inspecting.cancelled() or inspecting.exception() is not None:
        return None
    return inspecting.result()


def _source(
    client: EngineClient,
    owner: str,
    session: str,
    sequence: Sequence | None,
    inspection: RowInspection | None,
) -> RecallSource:
    """The row that was inspected, or the saved row of the session's newest turn.

    Raises:
        WeirError: the turn is not kept any more.
        APIError: there is no such session.
    """
    if sequence is not None and inspection is not None:
        return running_row(client.store, owner, sequence, inspection)
    found = client.store.get_session(owner, session)
    if found is None:
        raise not_found("session")
    return saved_row(client.store, owner, found.head, client.engine.cache.plans)
