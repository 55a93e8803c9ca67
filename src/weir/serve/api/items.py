"""`/v1/sessions/ID/items`: outputs of tools in a session, which can be dropped from its cache or
pinned (`/v1/sessions/ID/pins`).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from weir.errors import quote
from weir.serve.api.dependencies import Client, Owner, run_in_thread
from weir.serve.api.errors import APIError
from weir.serve.api.requests import check_query
from weir.serve.api.schemas.chat import GenerationBody
from weir.serve.client import CannotDrop, DroppedOutput, EngineClient, NoOutput, PinnedOutput
from weir.serve.pins import CannotPin
from weir.serve.prompts import UnknownOutput
from weir.serve.tools.recalling import NAME as RECALL

router = APIRouter(dependencies=[Depends(check_query)])


@router.get("/v1/sessions/{name}/items")
async def items(name: str, client: Client, owner: Owner) -> dict[str, Any]:
    """List the tool outputs that a session has read, newest first, without dropped ones."""
    outputs, _ = await run_in_thread(client.list_outputs, owner, name)
    pinned = client.store.pinned_chains(owner)
    data = [
        {
            "id": one.call,
            "object": "session.item",
            "start": one.place.start,
            "tokens": one.place.stop - one.place.start,
            "pinned": one.place.chain in pinned,
        }
        for one in outputs
    ]
    return {"object": "list", "data": data}


@router.delete("/v1/sessions/{name}/items/{call:path}")
async def drop(name: str, call: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Drop the output of a tool call from a session's cache."""
    dropped = await run_in_thread(_drop, client, owner, name, call)
    return {
        "id": dropped.call,
        "object": "session.item",
        "deleted": True,
        "tokens": dropped.tokens,
        "again": dropped.again,
    }


# A call's id can have slashes, so a suffix "/pin" could not be distinguished from the id.
@router.put("/v1/sessions/{name}/pins/{call:path}")
async def pin(name: str, call: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Pin the output of a tool call, so that it always stays in a session's cache."""
    pinned = await run_in_thread(_pin, client, owner, name, call)
    return {
        "id": pinned.call,
        "object": "session.item",
        "pinned": True,
        "tokens": pinned.tokens,
        "again": pinned.again,
        "reread": pinned.reread,
    }


@router.delete("/v1/sessions/{name}/pins/{call:path}")
async def unpin(name: str, call: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Unpin the output of a tool call, so that it can be evicted from a session's cache again."""
    await run_in_thread(_unpin, client, owner, name, call)
    return {"id": call, "object": "session.item", "pinned": False}


def _pin(client: EngineClient, owner: str, name: str, call: str) -> PinnedOutput:
    try:
        return client.pin_output(owner, name, call)
    except NoOutput as error:
        raise APIError(404, str(error), code="item_not_found") from None
    except CannotPin as error:
        raise APIError(400, str(error), code="cannot_pin") from None


def _unpin(client: EngineClient, owner: str, name: str, call: str) -> None:
    try:
        client.unpin_output(owner, name, call)
    except NoOutput as error:
        raise APIError(404, str(error), code="item_not_found") from None


def _drop(client: EngineClient, owner: str, name: str, call: str) -> DroppedOutput:
    try:
        return client.drop_output(owner, name, call)
    except NoOutput as error:
        raise APIError(404, str(error), code="item_not_found") from None
    except CannotDrop as error:
        raise APIError(400, str(error), code="unsupported") from None


def check_drops(client: EngineClient, body: GenerationBody) -> list[str]:
    """Return the calls whose outputs a request drops. Raises APIError if this server cannot drop
    outputs.
    """
    if body.drops:
        try:
            client.check_drops()
        except CannotDrop as error:
            raise APIError(400, str(error), param="weir.drop", code="unsupported") from None
    return body.drops


def check_pins(client: EngineClient, body: GenerationBody) -> list[str]:
    """Return the calls whose outputs a request pins. Raises APIError if this server cannot pin
    outputs, or if the request also drops one of them.
    """
    if body.pins:
        try:
            client.check_pins()
        except CannotPin as error:
            raise cannot_pin(error) from None
        both = next((number for number, call in enumerate(body.pins) if call in body.drops), None)
        if both is not None:
            raise APIError(
                400,
                f"the output of the call {quote(body.pins[both])} is both pinned and dropped in "
                "this request. Name it in only one of the two.",
                param=f"weir.pin[{both}]",
            )
    return body.pins


def refuse_marks(body: GenerationBody, what: str, instead: str) -> None:
    """Refuse to drop or pin outputs in a request that changes no cache (APIError)."""
    for name, calls in (("drop", body.drops), ("pin", body.pins)):
        if calls:
            message = f"{what} changes no cache. Send weir.{name} with {instead}."
            raise APIError(400, message, param=f"weir.{name}", code="unsupported")


def check_recall(client: EngineClient, body: GenerationBody) -> int:
    """Return how many tokens of recalled text a request may get. Raises APIError if it asks for
    recalled text and the server has no archive.
    """
    if body.recall and RECALL not in client.own_tools:
        message = (
            "this server keeps no text that it could recall. Start it with --archive, or leave out "
            "weir.recall."
        )
        raise APIError(400, message, param="weir.recall", code="unsupported")
    return client.recall_of(body.recall)


def cannot_pin(error: CannotPin) -> APIError:
    """Return the error for a request that pins an output that cannot be pinned."""
    return APIError(400, str(error), param="weir.pin", code="cannot_pin")


def unknown_output(error: UnknownOutput) -> APIError:
    """Return the error for a request that drops or pins an output that its history does not
    have.
    """
    return APIError(400, str(error), param=f"weir.{error.field}[{error.number}]")
