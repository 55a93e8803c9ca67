"""`/v1/responses`: turns that name the turn they continue, and can be retrieved.

A response is sent as one object, or as typed events with sequence numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from weir.errors import WeirError
from weir.serve.api.chat_request import make_thoughts
from weir.serve.api.dependencies import Client, Owner, PageQuery, look_up, run_in_thread
from weir.serve.api.errors import APIError, server_error
from weir.serve.api.generation import (
    Events,
    Renderer,
    make_request,
    progress_of,
    send_answers,
    usage_of,
    warn,
)
from weir.serve.api.items import (
    cannot_pin,
    check_drops,
    check_pins,
    check_recall,
    refuse_marks,
    unknown_output,
)
from weir.serve.api.logprobs import LogprobFormatter
from weir.serve.api.middleware import LOG, at_end
from weir.serve.api.models import check_model
from weir.serve.api.openapi import describe_body
from weir.serve.api.output_format import add_constraint, add_own_tools, check_tools
from weir.serve.api.output_items import ItemEvent, OutputItems
from weir.serve.api.requests import SESSION_HEADER, named_session, read_content
from weir.serve.api.schemas.formats import ToolOffer
from weir.serve.api.schemas.responses import (
    COMPACTED,
    SKIPPED_KINDS,
    CompactBody,
    PlacedItem,
    ResponseBody,
    result_param,
    split_at_compaction,
)
from weir.serve.api.sse import DONE, encode_event
from weir.serve.api.thinking import find_variables
from weir.serve.client import EngineClient, Generation
from weir.serve.engine.output import AnswerEvent, RoundEvent
from weir.serve.messages import StrayResult
from weir.serve.pins import CannotPin
from weir.serve.prompts import Prompt, UnknownOutput
from weir.serve.response_turn import HistoryNotKept, PreviousNotFound, ResponseTurn, node_of
from weir.serve.sessions.items import Item, new_id
from weir.serve.sessions.records import TurnRecord
from weir.serve.sessions.responses import StoredResponse
from weir.serve.worker import Handle

router = APIRouter()


@router.post("/v1/responses", openapi_extra=describe_body(ResponseBody, streams=True))
async def respond(request: Request, client: Client, owner: Owner) -> Response:
    """Create a response. It can start a history, continue a previous response, or belong to a
    conversation.
    """
    session = named_session(request)
    body, items = await read_content(request, ResponseBody, owner, "input", "items")
    check_model(client, body.model)
    _check(body, session)
    if body.named is not None:
        lock(request, client, owner, body.named)
    offer = add_own_tools(client, body, body.offer)
    turn = await _make_turn(client, owner, body, offer, items, session)
    limit = ("max_output_tokens", body.max_output_tokens)
    default = client.limits.answer_default
    job = make_request(client, body, partial(_match, turn), limit, body.logprobs, default)
    check_tools(client, offer)
    held_to = None if body.text is None or body.text.format is None else body.text.format.held_to
    job = await add_constraint(request, held_to, offer, job, "text.format.schema", turn.variables)
    make = partial(ResponseRenderer, body, turn)
    return await send_answers(request, job, "input", make, body)


@router.post("/v1/responses/input_tokens", openapi_extra=describe_body(ResponseBody))
async def count(request: Request, client: Client, owner: Owner) -> JSONResponse:
    """Count the tokens of a response's input, including everything that it continues."""
    body, items = await read_content(request, ResponseBody, owner, "input", "items")
    check_model(client, body.model)
    _check(body, None)
    refuse_marks(body, "a count", "the request for the response")
    offer = add_own_tools(client, body, body.offer)
    turn = await _make_turn(client, owner, body, offer, items, None)
    check_tools(client, offer)
    turn.is_stored = False
    prompt = await run_in_thread(_match, turn, param="input")
    counted = {"object": "response.input_tokens", "input_tokens": prompt.length}
    return JSONResponse(counted, headers=warn(request, body.skipped))


@router.post("/v1/responses/compact", openapi_extra=describe_body(CompactBody))
async def compact(request: Request, client: Client, owner: Owner) -> JSONResponse:
    """Replace the saved part of a history with one short item.

    Nothing is summarized. The item names the newest saved turn of the history. The state of that
    turn is small, however long the history is. Items after the turn are returned unchanged. If no
    turn of this history is saved, all items are returned unchanged.
    """
    body, items = await read_content(request, CompactBody, owner, "input", "items")
    check_model(client, body.model)
    _check(body, None)
    refuse_marks(body, "a compaction", "the request for the next response")
    offer = add_own_tools(client, body, body.offer)
    turn = await _make_turn(client, owner, body, offer, items, None)
    found, rest = await run_in_thread(_find_saved, turn, param="input")
    first: list[Item] = []
    if found is not None:
        content = f"{COMPACTED}{found.node}"
        first = [{"id": new_id("cmp"), "type": "compaction", "encrypted_content": content}]
    seen = 0 if found is None else found.seen
    usage = {
        "input_tokens": seen,
        "input_tokens_details": {"cached_tokens": seen, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": seen,
    }
    compacted = {
        "id": new_id("resp"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*first, *rest],
        "usage": usage,
    }
    return JSONResponse(compacted, headers=warn(request, body.skipped))


@router.get("/v1/responses/{name}")
async def retrieve(name: str, client: Client, owner: Owner, stream: bool = False) -> dict[str, Any]:
    """Retrieve a stored response."""
    found = await _found(client, owner, name)
    if stream:
        raise APIError(
            400,
            "only background responses can be streamed again. Leave out stream.",
            param="stream",
        )
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
    """Refuse to cancel a response, because none runs in the background.

    To cancel a response, close the connection that it is sent on.
    """
    await _found(client, owner, name)
    raise APIError(400, "Cannot cancel a synchronous response.", param="response_id")


@router.get("/v1/responses/{name}/input_items")
async def input_items(
    name: str, page: Annotated[PageQuery, Depends()], client: Client, owner: Owner
) -> dict[str, Any]:
    """List the input items of a response, without those of previous responses."""
    return page.to_json(page.cut((await _found(client, owner, name)).input))


async def _make_turn(
    client: EngineClient,
    owner: str,
    body: ResponseBody,
    offer: ToolOffer,
    items: list[PlacedItem] | Handle,
    session: str | None,
) -> ResponseTurn:
    """Return the turn of a new response. References in its input are replaced with the items
    that they name.
    """
    given: list[PlacedItem] = items.get() if isinstance(items, Handle) else items
    references = {item["id"] for item, _ in given if item["type"] == "item_reference"}
    if references:
        found = await run_in_thread(client.responses.find_items, owner, references)
        for item, place in given:
            if item["type"] == "item_reference" and item["id"] not in found:
                message = f"Item with id '{item['id']}' not found."
                raise APIError(404, message, param=f"input[{place}].id", code="item_not_found")
        given = [PlacedItem(found.get(item.get("id", ""), item), place) for item, place in given]
        given = [one for one in given if one.item["type"] not in SKIPPED_KINDS]
    compaction, given = split_at_compaction(given)
    compacted = None if compaction is None else f"resp_{compaction.item['turn']}"
    if compacted is not None and (body.previous_response_id or body.named):
        raise APIError(
            400,
            "a compaction already contains the earlier conversation. Send either the compaction, "
            "or previous_response_id or conversation.",
            param="input",
            code="mutually_exclusive_parameters",
        )
    return ResponseTurn(
        client,
        owner,
        [one.item for one in given],
        [one.place for one in given],
        body.instructions,
        body.previous_response_id or compacted,
        body.named,
        session,
        body.is_stored,
        offer.tools,
        find_variables(client, body),
        0 if compaction is None else compaction.place + 1,
        check_drops(client, body),
        body.tells_forgotten,
        recall=check_recall(client, body),
        pins=check_pins(client, body),
    )


async def _found(client: EngineClient, owner: str, name: str) -> StoredResponse:
    return await look_up("response", client.responses.get_response, owner, name)


def _check(body: ResponseBody, session: str | None) -> None:
    """Refuse fields that exclude each other."""
    if body.named is None:
        return
    if body.previous_response_id is not None:
        raise APIError(
            400,
            "previous_response_id and conversation cannot be combined. Send only one of them.",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if session not in (None, body.named):
        raise APIError(
            400,
            "the turns of a conversation are saved in a session with the conversation's id. Leave "
            f"out {SESSION_HEADER}.",
            param=SESSION_HEADER,
            code="mutually_exclusive_parameters",
        )
    if not body.is_stored:
        raise APIError(
            400, "a conversation always stores its responses. Leave out store.", param="store"
        )


def _match(turn: ResponseTurn) -> Prompt:
    """Find the prompt of a turn."""
    with _errors_of(turn):
        return turn.match()


def _find_saved(turn: ResponseTurn) -> tuple[TurnRecord | None, list[Item]]:
    """Find the newest saved turn of the history, and the items after it."""
    with _errors_of(turn):
        return turn.find_saved()


@contextlib.contextmanager
def _errors_of(turn: ResponseTurn) -> Iterator[None]:
    """Convert errors about a response's turn to API errors that name the field at fault."""
    named = "previous_response_id" if turn.conversation is None else "conversation"
    try:
        yield
    except PreviousNotFound as error:
        code = named.replace("_id", "") + "_not_found"
        raise _previous_not_found(turn, error, named, code) from None
    except UnknownOutput as error:
        raise unknown_output(error) from None
    except CannotPin as error:
        raise cannot_pin(error) from None
    except StrayResult as error:
        named = "input" if turn.compacted else named
        param = result_param("input", turn.items, turn.places, error) or named
        raise APIError(400, str(error), param=param) from None
    except HistoryNotKept as error:
        raise APIError(400, str(error), param="input", code="history_not_kept") from None


def _previous_not_found(
    turn: ResponseTurn, error: PreviousNotFound, param: str, code: str
) -> APIError:
    """Return the error for a field or a compaction that names a response that does not exist."""
    if not turn.compacted:
        return APIError(404, str(error), param=param, code=code)
    return APIError(
        404,
        "the response that this compaction stands for is no longer kept. Send the history instead.",
        param=f"input[{turn.compacted - 1}].encrypted_content",
        code=code,
    )


def lock(request: Request, client: EngineClient, owner: str, conversation: str) -> None:
    """Lock a conversation until the request ends."""
    held = owner, conversation
    if held in client.locked:
        raise APIError(
            409,
            "another request is using this conversation. Try again when it has finished.",
            param="conversation",
            code="conversation_locked",
            headers={"Retry-After": "1"},
        )
    client.locked.add(held)
    at_end(request.scope, lambda: client.locked.discard(held))


class ResponseRenderer(Renderer):
    """Writes responses."""

    def __init__(self, body: ResponseBody, turn: ResponseTurn, generation: Generation) -> None:
        request, client = generation.request, turn.client
        self._body = body
        self._turn = turn
        self._generation = generation
        self._model = client.name
        self._logprobs = LogprobFormatter(client.tokenizer, request.stop_ids)
        parser, make_id = client.make_parser(request), generation.call_id(0)
        self._items = OutputItems(parser, make_id, make_thoughts(client, generation))
        self._created = int(time.time())
        self._number = 0

    async def whole(self, events: Events) -> dict[str, Any]:
        """Write the response as one object."""
        async for several in events:
            for event in several:
                self._add(event)
        status = self._final_status()
        self._items.finish(status)
        return await self._finish(status)

    async def stream(self, events: Events) -> AsyncIterator[bytes]:
        """Write the response as events."""
        empty = self._response("in_progress", [])
        yield self._encode(
            [(f"response.{kind}", {"response": empty}) for kind in ("created", "in_progress")]
        )
        async for several in events:
            yield self._encode([event for one in several for event in self._add(one)])
        status = self._final_status()
        last = self._items.finish(status)
        whole = await self._finish(status)
        yield self._encode([*last, (f"response.{status}", {"response": whole})]) + DONE

    def keep_alive(self, generation: Generation) -> bytes:
        """Write a comment, and an event too while the prompt is being read.

        Some clients, such as Codex, treat a stream without events as broken.
        """
        comment = super().keep_alive(generation)
        if generation.sequences[0].output_ids:
            return comment
        fields: dict[str, Any] = {"response": self._response("in_progress", [])}
        if self._body.wants_progress:
            fields["prompt_progress"] = progress_of(generation)
        return comment + self._encode([("response.in_progress", fields)])

    def failure(self, error: APIError) -> bytes:
        """Write that the response has failed."""
        facts = error.body["error"]
        failed = {"code": facts["code"] or "server_error", "message": facts["message"]}
        response = {**self._response("failed", []), "error": failed}
        return self._encode([("response.failed", {"response": response})])

    def _add(self, event: AnswerEvent) -> list[ItemEvent]:
        """Add the content of an engine's event to the output items.

        Returns the events that tell the client about these items.
        """
        added = self._items.add(event.text, self._logprobs.entries_of(event))
        if isinstance(event, RoundEvent):
            added += self._items.next_round(opens_thoughts=event.opens_thoughts)
        return added

    def _final_status(self) -> str:
        return "completed" if self._generation.finished[0].reason == "stop" else "incomplete"

    async def _finish(self, status: str) -> dict[str, Any]:
        """Return the finished response. If it must be stored, this happens before the client
        receives it.
        """
        whole = self._response(status, self._items.done)
        try:
            await asyncio.to_thread(self._turn.store, self._generation.prompt.session, whole)
        except WeirError as error:
            LOG.error("response not kept", exc_info=error)
            raise server_error() from None
        return whole

    def _encode(self, events: Sequence[ItemEvent]) -> bytes:
        """Encode events as they are sent, numbered."""
        numbered = [
            encode_event({"type": kind, "sequence_number": number, **fields})
            for number, (kind, fields) in enumerate(events, self._number)
        ]
        self._number += len(numbered)
        return b"".join(numbered)

    def _response(self, status: str, output: list[Item]) -> dict[str, Any]:
        body, conversation = self._body, self._turn.conversation
        sampling = self._generation.request.sampling[0].sampling
        ended = status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._generation.sequences[0].id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "conversation": None if conversation is None else {"id": conversation},
            "reasoning": {"effort": body.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "service_tier": "default",
            "store": body.is_stored,
            "temperature": sampling.temperature,
            "text": {"format": _format_of(body)},
            "tool_choice": _choice_of(body),
            "tools": [tool.model_dump() for tool in body.functions],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "truncation": body.truncation or "disabled",
            **({"weir": {"tools": body.own_tools}} if body.own_tools else {}),
            "usage": self._usage() if ended else None,
            "user": None,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        """Token usage, in the fields of the Responses API."""
        usage = usage_of(self._generation)
        read, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        written = 0 if self._generation.prompt.session is None else read - cached
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "weir": usage["weir"],
        }


def _choice_of(body: ResponseBody) -> str | dict[str, Any]:
    """Return the tool choice as the client wrote it, or "auto" if there is none."""
    choice = body.tool_choice
    return choice or "auto" if isinstance(choice, str | None) else choice.model_dump()


def _format_of(body: ResponseBody) -> dict[str, Any]:
    """Return the format of the answer as the client wrote it, or text if there is none."""
    found = body.text and body.text.format
    return found.model_dump(by_alias=True, exclude_none=True) if found else {"type": "text"}
