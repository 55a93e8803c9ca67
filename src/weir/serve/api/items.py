"""`/v1/sessions/ID/items`: tool outputs in a session, which can be dropped from its cache."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from weir.serve.api.dependencies import Client, Owner, run_in_thread
from weir.serve.api.errors import APIError
from weir.serve.api.requests import check_query
from weir.serve.api.schemas.chat import GenerationBody
from weir.serve.client import CannotDrop, DroppedOutput, EngineClient, NoOutput
from weir.serve.prompts import UnknownOutput

router = APIRouter(dependencies=[Depends(check_query)])


@router.get("/v1/sessions/{name}/items")
async def items(name: str, client: Client, owner: Owner) -> dict[str, Any]:
    """List the tool outputs that a session has read and not dropped, the newest first."""
    outputs, _ = await run_in_thread(client.list_outputs, owner, name)
    data = [
        {
            "id": one.call,
            "object": "session.item",
            "start": one.place.start,
            "tokens": one.place.stop - one.place.start,
        }
        for one in outputs
    ]
    return {"object": "list", "data": data}


@router.delete("/v1/sessions/{name}/items/{call:path}")
async def drop(name: str, call: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Drop a tool output from a session's cache, by the id of its call."""
    dropped = await run_in_thread(_drop, client, owner, name, call)
    return {
        "id": dropped.call,
        "object": "session.item",
        "deleted": True,
        "tokens": dropped.tokens,
        "again": dropped.again,
    }


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


def unknown_output(error: UnknownOutput) -> APIError:
    """The error for a request that drops an output that is not in its history."""
    return APIError(400, str(error), param=f"weir.drop[{error.number}]")
