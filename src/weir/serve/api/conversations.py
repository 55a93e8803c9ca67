"""`/v1/conversations`: lists of items. A request that changes the items locks the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from weir.errors import quote
from weir.serve.api.dependencies import (
    Client,
    Owner,
    PageQuery,
    list_object,
    look_up,
    run_in_thread,
)
from weir.serve.api.errors import APIError
from weir.serve.api.generation import warn
from weir.serve.api.openapi import describe_body
from weir.serve.api.requests import read_body
from weir.serve.api.responses import lock
from weir.serve.api.schemas.base import unknown_fields
from weir.serve.api.schemas.responses import (
    ConversationBody,
    ItemsBody,
    MetadataBody,
    PlacedItem,
    items_of,
    result_param,
)
from weir.serve.client import EngineClient
from weir.serve.messages import find_stray_results
from weir.serve.sessions.items import Item, messages_of
from weir.serve.sessions.responses import StoredConversation

router = APIRouter()
PATH = "/v1/conversations/{name}"


@router.post("/v1/conversations", openapi_extra=describe_body(ConversationBody))
async def create(
    request: Request, response: Response, client: Client, owner: Owner
) -> dict[str, Any]:
    """Create a conversation."""
    body = await read_body(request, ConversationBody, owner)
    response.headers.update(warn(request, [*unknown_fields(body.items, "items")]))
    made = items_of(body.items or ())
    _check_results(made)
    items = [one.item for one in made]
    create = client.responses.create_conversation
    return conversation_object(await run_in_thread(create, owner, body.metadata or {}, items))


@router.get(PATH)
async def retrieve(name: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Retrieve a conversation."""
    return conversation_object(await _found(client, owner, name))


@router.post(PATH, openapi_extra=describe_body(MetadataBody))
async def describe(name: str, request: Request, client: Client, owner: Owner) -> dict[str, Any]:
    """Replace the metadata of a conversation."""
    body = await read_body(request, MetadataBody, owner)
    await _found(client, owner, name)
    await run_in_thread(client.responses.set_metadata, owner, name, body.metadata or {})
    return conversation_object(await _found(client, owner, name))


@router.delete(PATH)
async def delete(name: str, request: Request, client: Client, owner: Owner) -> dict[str, Any]:
    """Delete a conversation with its items, its responses and their saved states."""
    await _lock(request, client, owner, name)
    await run_in_thread(client.sessions.delete_conversation, owner, name)
    return {"id": name, "object": "conversation.deleted", "deleted": True}


@router.get(PATH + "/items")
async def items(
    name: str, page: Annotated[PageQuery, Depends()], client: Client, owner: Owner
) -> dict[str, Any]:
    """List the items of a conversation."""
    await _found(client, owner, name)
    newest = page.order == "desc"
    list_page = partial(client.responses.page_items, most=page.limit + 1, newest=newest)
    return page.to_json(await look_up("item", list_page, owner, name, page.after))


@router.post(PATH + "/items", openapi_extra=describe_body(ItemsBody))
async def add(
    name: str, request: Request, response: Response, client: Client, owner: Owner
) -> dict[str, Any]:
    """Add items to a conversation, for the next response to process."""
    body = await read_body(request, ItemsBody, owner)
    response.headers.update(warn(request, [*unknown_fields(body.items, "items")]))
    await _lock(request, client, owner, name)
    made = items_of(body.items)
    items = [one.item for one in made]
    if any(one["type"] == "function_call_output" for one in items):
        _check_results(made, await asyncio.to_thread(client.responses.list_items, owner, name))
    await run_in_thread(client.responses.add_items, owner, name, items)
    return list_object(items)


@router.get(PATH + "/items/{item}")
async def item(name: str, item: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Retrieve an item of a conversation."""
    return await look_up("item", client.responses.get_item, owner, name, item)


@router.delete(PATH + "/items/{item}")
async def remove(
    name: str, item: str, request: Request, client: Client, owner: Owner
) -> dict[str, Any]:
    """Delete an item of a conversation. The next response is generated without it."""
    found = await _lock(request, client, owner, name)
    gone = await look_up("item", client.responses.get_item, owner, name, item)
    if gone["type"] == "function_call":
        _check_no_stray(gone, await asyncio.to_thread(client.responses.list_items, owner, name))
    await run_in_thread(client.responses.remove_item, owner, name, item)
    return conversation_object(found)


async def _found(client: EngineClient, owner: str, name: str) -> StoredConversation:
    return await look_up("conversation", client.responses.get_conversation, owner, name)


async def _lock(
    request: Request, client: EngineClient, owner: str, name: str
) -> StoredConversation:
    """Find a conversation, and lock it until the request ends."""
    found = await _found(client, owner, name)
    lock(request, client, owner, name)
    return found


def _check_results(made: Sequence[PlacedItem], before: Sequence[Item] = ()) -> None:
    """Check that tool results have calls. The calls of results in `before` may be gone."""
    items, places = [one.item for one in made], [one.place for one in made]
    known = len(find_stray_results(messages_of(before)))
    for error in find_stray_results(messages_of([*before, *items]))[known:]:
        param = result_param("items", items, places, error)
        raise APIError(400, str(error), param=param)


def _check_no_stray(call: Item, items: Sequence[Item]) -> None:
    """Check that deleting a call leaves no tool result without its call."""
    left = [item for item in items if item["id"] != call["id"]]
    if len(find_stray_results(messages_of(left))) > len(find_stray_results(messages_of(items))):
        raise APIError(
            400,
            f"the call {quote(call['call_id'])} has a result in this conversation. Delete that "
            "item, of type function_call_output, first.",
            code="has_result",
        )


def conversation_object(conversation: StoredConversation) -> dict[str, Any]:
    """A conversation as a JSON object."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": conversation.metadata,
    }
