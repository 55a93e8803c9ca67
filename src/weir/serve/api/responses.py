"""`/v1/responses`: turns that name the one they continue, and can be retrieved."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from weir.serve.api.dependencies import Client, Owner
from weir.serve.api.errors import APIError
from weir.serve.api.generation import make_request, send, start
from weir.serve.api.middleware import at_end
from weir.serve.api.models import check_model
from weir.serve.api.openapi import describe_body
from weir.serve.api.output_format import add_constraint, check_tools
from weir.serve.api.requests import SESSION_HEADER, named_session, read_body
from weir.serve.api.response_object import ResponseRenderer
from weir.serve.api.schemas.items import PageQuery, result_param
from weir.serve.api.schemas.responses import ResponseBody
from weir.serve.api.sessions import look_up, run_in_thread
from weir.serve.client import EngineClient
from weir.serve.messages import StrayResult
from weir.serve.prompts import Prompt
from weir.serve.response_turn import HistoryNotKept, PreviousNotFound, ResponseTurn, node_of
from weir.serve.sessions import ConversationLocked, StoredResponse

router = APIRouter()


@router.post("/v1/responses", openapi_extra=describe_body(ResponseBody, streams=True))
async def respond(request: Request, client: Client, owner: Owner) -> Response:
    """Create a response: alone, after a previous one, or in a conversation."""
    session = named_session(request)
    body = await read_body(request, ResponseBody, owner)
    check_model(client, body.model)
    _check(body, session)
    if body.named is not None:
        lock(request, client, owner, body.named)
    turn = ResponseTurn(
        client,
        owner,
        await asyncio.to_thread(getattr, body, "items"),  # there may be many
        body.instructions,
        body.previous_response_id,
        body.named,
        session,
        body.is_stored,
        body.offer.tools,
    )
    limit = ("max_output_tokens", body.max_output_tokens)
    default = client.limits.answer_default
    job = make_request(client, body, partial(_match, turn), limit, body.logprobs, default)
    tools = check_tools(client, body.offer)
    param = "text.format.schema"
    job = await add_constraint(request, body.response_format, tools, job, param)
    generation = await start(request, job, "input")
    renderer = ResponseRenderer(body, turn, generation)
    saved_in = generation.prompt.session
    headers = {} if saved_in is None else {SESSION_HEADER: saved_in}
    return await send(request, renderer, generation, headers, stream=bool(body.stream))


@router.get("/v1/responses/{name}")
async def retrieve(name: str, client: Client, owner: Owner, stream: bool = False) -> dict[str, Any]:
    """Retrieve a stored response."""
    found = await _found(client, owner, name)
    if stream:
        raise APIError(400, "only responses in the background are streamed again", param="stream")
    return found.body


@router.delete("/v1/responses/{name}")
async def delete(name: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Delete a response and its state. Responses that continue it stay."""
    await _found(client, owner, name)
    await run_in_thread(client.responses.delete_responses, owner, [name])
    await run_in_thread(client.engine.forget, node_of(name))
    return {"id": name, "object": "response", "deleted": True}


@router.post("/v1/responses/{name}/cancel")
async def cancel(name: str, client: Client, owner: Owner) -> dict[str, Any]:
    """Not supported: close the connection to cancel a response."""
    await _found(client, owner, name)
    raise APIError(400, "Cannot cancel a synchronous response.", param="response_id")


@router.post("/v1/responses/compact")
async def compact(owner: Owner) -> dict[str, Any]:
    """Not supported: no conversation is too long, so nothing is compacted."""
    raise APIError(404, "nothing is compacted here: no conversation is too long", code="not_found")


@router.get("/v1/responses/{name}/input_items")
async def input_items(
    name: str, page: Annotated[PageQuery, Depends()], client: Client, owner: Owner
) -> dict[str, Any]:
    """List the input items of a response, without those of previous responses."""
    return page.to_json(page.cut((await _found(client, owner, name)).input))


async def _found(client: EngineClient, owner: str, name: str) -> StoredResponse:
    return await look_up("response", client.responses.get_response, owner, name)


def _check(body: ResponseBody, session: str | None) -> None:
    """Refuse fields that exclude each other."""
    if body.named is not None and body.previous_response_id is not None:
        raise APIError(
            400,
            "previous_response_id and conversation exclude each other",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if body.named is not None and session not in (None, body.named):
        raise APIError(
            400,
            f"the turns of a conversation are in the session of its id: leave {SESSION_HEADER} out",
            param=SESSION_HEADER,
            code="mutually_exclusive_parameters",
        )
    if body.named is not None and not body.is_stored:
        raise APIError(
            400, "a conversation keeps what is said in it: leave store out", param="store"
        )


def _match(turn: ResponseTurn) -> Prompt:
    """Find the prompt of a turn."""
    named = "previous_response_id" if turn.conversation is None else "conversation"
    try:
        return turn.match()
    except PreviousNotFound as error:
        code = named.replace("_id", "") + "_not_found"
        raise APIError(404, str(error), param=named, code=code) from None
    except StrayResult as error:
        param = result_param("input", turn.items, error) or named
        raise APIError(400, str(error), param=param) from None
    except HistoryNotKept as error:
        raise APIError(400, str(error), param="input", code="history_not_kept") from None


def lock(request: Request, client: EngineClient, owner: str, conversation: str) -> None:
    """Lock a conversation until the request is over.

    Raises:
        APIError: another request has it.
    """
    try:
        client.locks.acquire(owner, conversation)
    except ConversationLocked as error:
        raise APIError(
            409,
            str(error),
            param="conversation",
            code="conversation_locked",
            headers={"Retry-After": "1"},
        ) from None
    at_end(request.scope, lambda: client.locks.release(owner, conversation))
