"""`GET /v1/sessions/ID/memory`: the tokens that a session's cache still holds."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Depends, Query, Request

from weir.cache import holding_in
from weir.errors import WeirError
from weir.serve.api.dependencies import Client, Owner
from weir.serve.api.errors import not_found
from weir.serve.api.requests import check_query
from weir.serve.client import EngineClient
from weir.serve.engine.engine import RowInspection
from weir.serve.engine.sequence import Stage, TokenSequence
from weir.serve.forgotten import describe_messages
from weir.serve.session_memory import MemoryReporter, running_turns, without_tokens

router = APIRouter(dependencies=[Depends(check_query)])
Inspections = WeakKeyDictionary[TokenSequence, RowInspection]
"""The last inspection of each running sequence."""
PATIENCE = 5.0
"""Seconds to wait for the first inspection of a sequence. A step of the engine usually takes less.
"""
SOON = 0.2
"""Seconds to wait for a later inspection. After that, the last one is reported again."""


@router.get("/v1/sessions/{name}/memory")
async def memory(
    name: str,
    request: Request,
    client: Client,
    owner: Owner,
    most: Annotated[int, Query(ge=0, le=8192)] = 2048,
    latest: Annotated[int, Query(ge=0, le=8192)] = 512,
) -> dict[str, Any]:
    """List the tokens that a session's cache holds.

    While a turn is running, the list shows the cache at that moment. Otherwise it shows the cache
    at the end of the newest turn. `most` limits the number of held tokens in the list. `latest` is
    the number of tokens at the end of the stream that are listed even if the cache does not hold
    them.
    """
    reporter: MemoryReporter = request.app.state.memory_reporter
    sequence = client.running_sequence(owner, name)
    inspection = (
        None if sequence is None else await inspect(client, sequence, request.app.state.inspections)
    )

    def names(node: str) -> list[Any] | None:
        record = client.store.find_turn(owner, node)
        dropped = client.store.dropped_chains(owner)
        return None if record is None else describe_messages(record.messages, dropped)

    def report() -> dict[str, Any]:
        store = client.store
        if sequence is not None and inspection is not None:
            doing = "reading" if sequence.stage is Stage.PREFILL else "answering"
            turns = running_turns(store, owner, sequence, inspection)
            parent = sequence.parent
            found = reporter.report(inspection.holding, turns, most, latest, doing, names)
            return {**found, **_archive_of(client, owner, parent, name)}
        session = store.get_session(owner, name)
        if session is None:
            raise not_found("session")
        holding = holding_in(client.engine.cache.plans, store.load(session.head).state)
        holding = without_tokens(holding, store.dropped_places(owner, session.head))
        turns = store.ancestry(owner, session.head)
        found = reporter.report(holding, turns, most, latest, None, names)
        recalled = session.usage.get("recalled", 0)
        return {**found, **_archive_of(client, owner, session.head, name, recalled)}

    try:
        reported = await asyncio.to_thread(report)
    except WeirError:  # its newest turn has been dropped meanwhile
        raise not_found("session") from None
    return {"id": name, "object": "session.memory", **reported}


def _archive_of(
    client: EngineClient, owner: str, node: str | None, session: str, recalled: int | None = None
) -> dict[str, Any]:
    """Report how much of a session is archived, and how many tokens its newest turn recalled.

    Empty without an archive.
    """
    archive = client.store.archive
    if archive is None:
        return {}
    if recalled is None:
        running = client.running_prompt(owner, session)
        text = None if running is None else running.recalled
        recalled = 0 if text is None else text.tokens
    turns = 0 if node is None else client.store.count_archived(owner, node)
    working = archive.problem is None
    return {"archive": {"working": working, "turns": turns, "recalled_tokens": recalled}}


async def inspect(
    client: EngineClient, sequence: TokenSequence, known: Inspections
) -> RowInspection | None:
    """Inspect the row of a running sequence between two steps; None if it has ended.

    `known` has the last inspection of each sequence. If the engine's current step takes long, as
    with a long prompt, the last inspection is returned, or None if there is none.
    """
    last = known.get(sequence)
    inspecting = asyncio.wrap_future(client.engine.inspect(sequence))
    # The inspection is never cancelled, since other requests may wait for the same one.
    await asyncio.wait({inspecting}, timeout=PATIENCE if last is None else SOON)
    if not inspecting.done():
        return last
    if inspecting.cancelled() or inspecting.exception() is not None:
        return None
    if (found := inspecting.result()) is not None:
        known[sequence] = found
    return found
