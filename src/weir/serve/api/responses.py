"""`/v1/responses`: a turn that names the one it goes on from, and can be retrieved."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from weir.serve.api.errors import Refused, not_found
from weir.serve.api.generation import begin, wish_of
from weir.serve.api.logprobs import Tokens
from weir.serve.api.middleware import at_end
from weir.serve.api.models import check_model
from weir.serve.api.openapi import takes
from weir.serve.api.output_format import shaped, tooling_of
from weir.serve.api.requests import HEADER, authorized, read_body, session_of
from weir.serve.api.response_object import ResponseForm
from weir.serve.api.schemas.items import Page, result_param
from weir.serve.api.schemas.responses import ResponseBody
from weir.serve.api.sending import sent
from weir.serve.api.sessions import done
from weir.serve.client import EngineClient
from weir.serve.messages import NoCall
from weir.serve.prefix_match import Plan
from weir.serve.response_turn import NoPrevious, NotKept, ResponseTurn, node_of
from weir.serve.sessions import ConversationLocked, StoredResponse

router = APIRouter()


@router.post("/v1/responses", openapi_extra=takes(ResponseBody, streams=True))
async def respond(request: Request, owner: str = Depends(authorized)) -> Response:
    """Answer what is said after an earlier response, in a conversation, or by itself."""
    desk: EngineClient = request.app.state.desk
    session = session_of(request)
    body = await read_body(request, ResponseBody, owner)
    check_model(desk, body.model)
    _check(body, session)
    if body.named is not None:
        lock(request, owner, body.named)
    limit = ("max_output_tokens", body.max_output_tokens)
    wish = wish_of(desk, body, limit, body.logprobs, desk.limits.answer_default)
    tooling = tooling_of(desk, body.offer)
    wish = await shaped(request, body.form, tooling, wish, "text.format.schema")
    reply = ResponseTurn(
        desk,
        body.items,
        body.instructions,
        body.previous_response_id,
        body.named,
        session,
        body.kept,
        tooling.tools,
    )
    answers = await begin(request, lambda who: _plan(reply, who), wish, owner, "input")
    form = ResponseForm(body, reply, owner, wish, Tokens(desk.tokenizer, wish.ends))
    plan = answers.asked.plan
    headers = {} if plan.session is None else {HEADER: plan.session}
    return await sent(request, form, answers, headers, stream=bool(body.stream))


@router.get("/v1/responses/{name}")
async def retrieve(
    name: str, request: Request, owner: str = Depends(authorized), stream: bool = False
) -> dict[str, Any]:
    """A response that is kept, as its client was told of it."""
    found = await _found(request, owner, name)
    if stream:
        raise Refused(400, "only responses in the background are streamed again", param="stream")
    return found.body


@router.delete("/v1/responses/{name}")
async def delete(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """Delete a response, its text and its state; those that go on from it stay."""
    desk: EngineClient = request.app.state.desk
    await _found(request, owner, name)
    await done(lambda: desk.responses.delete_responses(owner, [name]))
    await done(lambda: desk.engine.forget(node_of(name)))
    return {"id": name, "object": "response", "deleted": True}


@router.post("/v1/responses/{name}/cancel")
async def cancel(name: str, request: Request, owner: str = Depends(authorized)) -> dict[str, Any]:
    """Refused: whoever waits for a response cancels it by hanging up."""
    await _found(request, owner, name)
    raise Refused(400, "Cannot cancel a synchronous response.", param="response_id")


@router.post("/v1/responses/compact")
async def compact(owner: str = Depends(authorized)) -> dict[str, Any]:
    """Refused: what is said is never too long, and nothing has to be summarized."""
    raise Refused(404, "nothing is compacted here: no conversation is too long", code="not_found")


@router.get("/v1/responses/{name}/input_items")
async def input_items(
    name: str, request: Request, page: Annotated[Page, Depends()], owner: str = Depends(authorized)
) -> dict[str, Any]:
    """The items that a response answers, without what came before them."""
    return page.told(page.of((await _found(request, owner, name)).input))


async def _found(request: Request, owner: str, name: str) -> StoredResponse:
    desk: EngineClient = request.app.state.desk
    found = await asyncio.to_thread(desk.responses.get_response, owner, name)
    if found is None:
        raise not_found("response")
    return found


def _check(body: ResponseBody, session: str | None) -> None:
    """Refuse what does not go together."""
    if body.named is not None and body.previous_response_id is not None:
        raise Refused(
            400,
            "previous_response_id and conversation exclude each other",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if body.named is not None and session not in (None, body.named):
        raise Refused(
            400,
            f"the turns of a conversation are in the session of its id: leave {HEADER} out",
            param=HEADER,
            code="mutually_exclusive_parameters",
        )
    if body.named is not None and not body.kept:
        raise Refused(
            400, "a conversation keeps what is said in it: leave store out", param="store"
        )


def _plan(reply: ResponseTurn, owner: str) -> Plan:
    try:
        return reply.plan(owner)
    except NoPrevious as error:
        param = "previous_response_id" if reply.conversation is None else "conversation"
        code = param.replace("_id", "") + "_not_found"
        raise Refused(404, str(error), param=param, code=code) from None
    except NoCall as error:
        param = _result(reply, error)
        raise Refused(400, str(error), param=param, code="invalid_value") from None
    except NotKept as error:
        raise Refused(400, str(error), param="input", code="history_not_kept") from None


def _result(reply: ResponseTurn, error: NoCall) -> str:
    """Where a result stands that is of no call, for errors."""
    param = result_param("input", reply.items, error)
    if param is not None:
        return param
    return "previous_response_id" if reply.conversation is None else "conversation"


def lock(request: Request, owner: str, conversation: str) -> None:
    """A conversation is this request's alone until it is over.

    Raises:
        Refused: it is another's.
    """
    desk: EngineClient = request.app.state.desk
    try:
        desk.locks.acquire(owner, conversation)
    except ConversationLocked as error:
        raise Refused(
            409,
            str(error),
            param="conversation",
            code="conversation_locked",
            headers={"Retry-After": "1"},
        ) from None
    at_end(request.scope, lambda: desk.locks.release(owner, conversation))
