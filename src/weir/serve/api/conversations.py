"""`/v1/conversations`: items in a row, and whoever is at one is alone there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from weir.errors import quote
from weir.serve.api.errors import Refused, not_found
from weir.serve.api.openapi import takes
from weir.serve.api.requests import authorized, read_body
from weir.serve.api.responses import lock
from weir.serve.api.schemas.items import (
    ConversationBody,
    ItemsBody,
    MetadataBody,
    Page,
    listed,
    result_param,
)
from weir.serve.api.sessions import done
from weir.serve.client import EngineClient
from weir.serve.messages import strays
from weir.serve.sessions import Item, StoredConversation, messages_of

router = APIRouter()
PATH = "/v1/conversations/{name}"


@router.post("/v1/conversations", openapi_extra=takes(ConversationBody))
async def create(request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """A new conversation."""
    body = await read_body(request, ConversationBody, owner)
    desk: EngineClient = request.app.state.desk
    items = [item.item() for item in body.items or ()]
    _placed(items)
    return told(
        await done(lambda: desk.responses.create_conversation(owner, body.metadata or {}, items))
    )


@router.get(PATH)
async def retrieve(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """One conversation."""
    return told(await _found(request, owner, name))


@router.post(PATH, openapi_extra=takes(MetadataBody))
async def describe(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """Change what a client says of a conversation."""
    body = await read_body(request, MetadataBody, owner)
    await _found(request, owner, name)
    desk: EngineClient = request.app.state.desk
    await done(lambda: desk.responses.set_metadata(owner, name, body.metadata or {}))
    return told(await _found(request, owner, name))


@router.delete(PATH)
async def delete(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """Delete a conversation with its items, its responses and their states."""
    await _taken(request, owner, name)
    desk: EngineClient = request.app.state.desk
    await done(lambda: desk.sessions.delete_conversation(owner, name))
    return {"id": name, "object": "conversation.deleted", "deleted": True}


@router.get(PATH + "/items")
async def items(
    name: str, request: Request, page: Annotated[Page, Depends()], owner: str = Depends(authorized)
) -> dict[str, Any]:
    """Items of a conversation."""
    await _found(request, owner, name)
    desk: EngineClient = request.app.state.desk
    newest = page.order == "desc"
    found = await asyncio.to_thread(
        desk.responses.page_items, owner, name, page.after, page.limit + 1, newest=newest
    )
    if found is None:
        raise not_found("item")
    return page.told(found)


@router.post(PATH + "/items", openapi_extra=takes(ItemsBody))
async def add(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """Put items into a conversation; the next response reads them."""
    body = await read_body(request, ItemsBody, owner)
    await _taken(request, owner, name)
    desk: EngineClient = request.app.state.desk
    made = [item.item() for item in body.items]
    if any(each["type"] == "function_call_output" for each in made):
        _placed(made, await asyncio.to_thread(desk.responses.list_items, owner, name))
    await done(lambda: desk.responses.add_items(owner, name, made))
    return listed(made)


@router.get(PATH + "/items/{item}")
async def item(
    name: str, item: str, request: Request, owner: str = Depends(authorized)
) -> dict[str, Any]:
    """One item of a conversation."""
    return await _item(request, owner, name, item)


@router.delete(PATH + "/items/{item}")
async def remove(
    name: str, item: str, request: Request, owner: str = Depends(authorized)
) -> dict[str, Any]:
    """Take an item out of a conversation: the next response has never read it."""
    found = await _taken(request, owner, name)
    gone = await _item(request, owner, name, item)
    desk: EngineClient = request.app.state.desk
    if gone["type"] == "function_call":
        _no_stray(gone, await asyncio.to_thread(desk.responses.list_items, owner, name))
    await done(lambda: desk.responses.remove_item(owner, name, item))
    return told(found)


async def _found(request: Request, owner: str, name: str) -> StoredConversation:
    desk: EngineClient = request.app.state.desk
    found = await asyncio.to_thread(desk.responses.get_conversation, owner, name)
    if found is None:
        raise not_found("conversation")
    return found


async def _taken(request: Request, owner: str, name: str) -> StoredConversation:
    """A conversation that is this request's alone from now on."""
    found = await _found(request, owner, name)
    lock(request, owner, name)
    return found


async def _item(request: Request, owner: str, name: str, item: str) -> Item:
    desk: EngineClient = request.app.state.desk
    found = await asyncio.to_thread(desk.responses.get_item, owner, name, item)
    if found is None:
        raise not_found("item")
    return found


def _placed(items: list[Item], before: Sequence[Item] = ()) -> None:
    """Refuse results that no response could ever read.

    Args:
        items: that are to be put into a conversation.
        before: those that are in it. The calls of some may not be kept any more.
    """
    known = len(strays(messages_of(before)))
    for error in strays(messages_of([*before, *items]))[known:]:
        param = result_param("items", items, error)
        raise Refused(400, str(error), param=param, code="invalid_value")


def _no_stray(call: Item, items: Sequence[Item]) -> None:
    """Refuse to take a call away from its result, which no response could read any more."""
    left = [item for item in items if item["id"] != call["id"]]
    if len(strays(messages_of(left))) > len(strays(messages_of(items))):
        raise Refused(
            400,
            f"the call {quote(call['call_id'])} has its result in this conversation: delete that "
            "item, of type function_call_output, first",
            code="has_result",
        )


def told(conversation: StoredConversation) -> dict[str, Any]:
    """A conversation as JSON."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": conversation.metadata,
    }
