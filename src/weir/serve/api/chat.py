"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from weir.serve.api.errors import APIError
from weir.serve.api.generation import Events, make_request, send, start, usage_of
from weir.serve.api.logprobs import LogprobFormatter
from weir.serve.api.models import check_model
from weir.serve.api.openapi import describe_body
from weir.serve.api.output_format import ToolUse, add_constraint, check_tools
from weir.serve.api.requests import SESSION_HEADER, authorize, named_session, read_body
from weir.serve.api.schemas.chat import ChatBody
from weir.serve.api.sse import DONE, EventTemplate, encode_event
from weir.serve.client import EngineClient, Generation
from weir.serve.engine import FinishEvent, TokenEvent
from weir.serve.messages import Message, StrayResult, link_results
from weir.serve.prompts import Prompt
from weir.serve.tools import AnswerPart, CallParser, CallStart, TextDelta, join_parts

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=describe_body(ChatBody, streams=True))
async def chat(request: Request, owner: str = Depends(authorize)) -> Response:
    """Complete a chat. Only the messages that are new since a saved turn are processed."""
    client: EngineClient = request.app.state.client
    session = named_session(request)
    body = await read_body(request, ChatBody, owner)
    check_model(client, body.model)
    tools = check_tools(client, body.offer)
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs is for logprobs: true", param="top_logprobs")
    limit: tuple[str, int | None] = ("max_tokens", body.max_tokens)
    if body.max_completion_tokens is not None:
        limit = ("max_completion_tokens", body.max_completion_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    match = partial(_match, client, body, owner, session, tools)
    job = make_request(client, body, match, limit, logprobs, client.limits.answer_default)
    param = "response_format.json_schema.schema"
    job = await add_constraint(request, body.response_format, tools, job, param)
    generation = await start(request, job, "messages")
    renderer = ChatRenderer(body, client, generation)
    headers = {SESSION_HEADER: generation.prompt.session or ""}
    return await send(request, renderer, generation, headers, stream=bool(body.stream))


def _match(
    client: EngineClient, body: ChatBody, owner: str, session: str | None, tools: ToolUse
) -> Prompt:
    """Find the prompt of a chat.

    Raises:
        APIError: a result has no call before it, or the last message is an assistant's.
    """
    try:
        linked = link_results([message.message() for message in body.messages])
    except StrayResult as error:
        param = f"messages[{error.number}].tool_call_id"
        raise APIError(400, str(error), param=param) from None
    if linked[-1].role == "assistant":
        raise APIError(
            400, "the last message must be one to answer, not an assistant's", param="messages"
        )
    return client.matcher.match(owner, linked, session, tools.tools)


class ChatRenderer:
    """Writes chat completions."""

    def __init__(self, body: ChatBody, client: EngineClient, generation: Generation) -> None:
        request = generation.request
        self._body = body
        self._generation = generation
        self._logprobs = LogprobFormatter(client.tokenizer, request.stop_ids)
        names = {tool.name for tool in request.tools}
        self._parsers = [
            CallParser(client.renderer.call_format, names, request.calls_only)
            for _ in range(body.num_answers if request.tools else 0)
        ]
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": client.name,
        }
        mark = secrets.token_hex(16)
        self._templates = [
            EventTemplate(self._chunk(answer, {"content": mark}), mark)
            for answer in range(body.num_answers)
        ]

    async def whole(self, events: Events) -> dict[str, Any]:
        """Write all answers as one object."""
        parts: list[list[AnswerPart]] = [[] for _ in range(self._body.num_answers)]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in parts]
        async for several in events:
            for event in several:
                parts[event.answer] += self._parse(event)
                logprobs[event.answer] += self._logprobs_of(event)
        choices = [
            {
                "index": answer,
                "message": _message(join_parts(own, self._generation.call_id(answer))),
                "logprobs": {"content": known, "refusal": None} if self._body.logprobs else None,
                "finish_reason": self._finish_reason(self._generation.finished[answer]),
            }
            for answer, (own, known) in enumerate(zip(parts, logprobs, strict=True))
        ]
        usage = usage_of(self._generation)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    async def stream(self, events: Events) -> AsyncIterator[bytes]:
        """Write answers as events."""
        for answer in range(self._body.num_answers):
            content = None if self._parsers else ""
            yield encode_event(self._chunk(answer, {"role": "assistant", "content": content}))
        async for several in events:
            if encoded := b"".join(chunk for event in several for chunk in self._encode(event)):
                yield encoded
        if self._body.include_usage:
            usage = usage_of(self._generation)
            head = {**self._head, "object": "chat.completion.chunk"}
            yield encode_event({**head, "choices": [], "usage": usage})
        yield DONE

    def failure(self, error: APIError) -> bytes:
        """Write that an answer has failed."""
        return encode_event(error.body)

    def _encode(self, event: TokenEvent | FinishEvent) -> list[bytes]:
        """The chunks of an event."""
        if isinstance(event, TokenEvent) and not (self._parsers or self._body.logprobs):
            return [self._templates[event.answer].encode(event.text)] if event.text else []
        logprobs = self._logprobs_of(event)
        make_id = self._generation.call_id(event.answer)
        deltas = [delta for part in self._parse(event) for delta in _deltas(part, make_id)]
        if logprobs and not deltas:
            deltas = [{} if self._parsers else {"content": ""}]
        # The log-probabilities of a token go with the first of what it brought.
        chunks = [
            self._chunk(event.answer, delta, None if number else logprobs)
            for number, delta in enumerate(deltas)
        ]
        if isinstance(event, FinishEvent):
            chunks.append(self._chunk(event.answer, {}, reason=self._finish_reason(event)))
        return [encode_event(chunk) for chunk in chunks]

    def _parse(self, event: TokenEvent | FinishEvent) -> list[AnswerPart]:
        """The parts of an answer in an event: text, and calls where there are tools."""
        if not self._parsers:
            return [TextDelta(event.text)] if event.text else []
        parser = self._parsers[event.answer]
        parts = parser.feed(event.text)
        if isinstance(event, FinishEvent):
            parts += parser.finish(cut=event.reason == "length")
        return parts

    def _finish_reason(self, end: FinishEvent) -> str:
        called = bool(self._parsers) and self._parsers[end.answer].num_complete > 0
        return "tool_calls" if called and end.reason == "stop" else end.reason

    def _chunk(
        self,
        answer: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": answer,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": reason,
        }
        usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage}

    def _logprobs_of(self, event: TokenEvent | FinishEvent) -> list[dict[str, Any]]:
        if not self._body.logprobs or isinstance(event, FinishEvent):
            return []
        return self._logprobs.entries(event.token)


def _message(message: Message) -> dict[str, Any]:
    """An answer as JSON."""
    data: dict[str, Any] = {
        "role": "assistant",
        "content": message.content,
        "refusal": None,
        "annotations": [],
    }
    if message.calls:
        data["content"] = message.content or None
        data["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return data


def _deltas(part: AnswerPart, make_id: Callable[[int], str]) -> list[dict[str, Any]]:
    """The deltas of a part of an answer."""
    if isinstance(part, TextDelta) and part.call is None:
        return [{"content": part.text}]
    if isinstance(part, TextDelta):
        return [{"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}]
    if isinstance(part, CallStart):
        call = {
            "index": part.call,
            "id": make_id(part.call),
            "type": "function",
            "function": {"name": part.name, "arguments": ""},
        }
        return [{"tool_calls": [call]}]
    return []
