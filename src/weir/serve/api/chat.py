"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from weir.serve.api.errors import Refused
from weir.serve.api.generation import Answers, begin, wish_of
from weir.serve.api.history import history_of
from weir.serve.api.logprobs import Tokens
from weir.serve.api.models import check_model
from weir.serve.api.openapi import takes
from weir.serve.api.output_format import SCHEMA, shaped, tooling_of
from weir.serve.api.requests import HEADER, authorized, read_body, session_of
from weir.serve.api.schemas.chat import ChatBody
from weir.serve.api.sending import sent
from weir.serve.api.sse import DONE, TextFrame, frame
from weir.serve.client import EngineClient, Wish
from weir.serve.engine import FinishEvent, TokenEvent
from weir.serve.messages import Message, call_id
from weir.serve.tools import CallParser, CallStart, Part, Said, message_of

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatBody, streams=True))
async def chat(request: Request, owner: str = Depends(authorized)) -> Response:
    """Answer a conversation, of which only what is new is read."""
    desk: EngineClient = request.app.state.desk
    session = session_of(request)
    body = await read_body(request, ChatBody, owner)
    check_model(desk, body.model)
    messages = history_of([message.message() for message in body.messages])
    tooling = tooling_of(desk, body.offer)
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused(400, "top_logprobs is for logprobs: true", param="top_logprobs")
    limit: tuple[str, int | None] = ("max_tokens", body.max_tokens)
    if body.max_completion_tokens is not None:
        limit = ("max_completion_tokens", body.max_completion_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wish = wish_of(desk, body, limit, logprobs, desk.limits.answer_default)
    wish = await shaped(request, body.response_format, tooling, wish, SCHEMA)
    answers = await begin(
        request,
        lambda who: desk.planner.chat(who, messages, session, tooling.tools),
        wish,
        owner,
        "messages",
    )
    form = Form(body, desk, wish, Tokens(desk.tokenizer, wish.ends))
    headers = {HEADER: answers.asked.plan.session or ""}
    return await sent(request, form, answers, headers, stream=bool(body.stream))


class Form:
    """The forms that an answer has on the wire.

    Args:
        body: what was asked for.
        desk: who answers.
        wish: how the body is answered.
        tokens: tells of them.
    """

    def __init__(self, body: ChatBody, desk: EngineClient, wish: Wish, tokens: Tokens) -> None:
        self._body = body
        self._tokens = tokens
        self._readers = [
            CallParser(desk.wording.form, {tool.name for tool in wish.tools}, wish.alone)
            for _ in range(body.answers if wish.tools else 0)
        ]
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": desk.name,
        }
        mark = secrets.token_hex(16)
        told = [self._told(answer, {"content": mark}) for answer in range(body.answers)]
        self._says = [TextFrame(each, mark) for each in told]

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """All of it as one object."""
        said: list[list[Part]] = [[] for _ in range(self._body.answers)]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in said]
        async for events in answers.events():
            for event in events:
                said[event.answer] += self._read(event)
                logprobs[event.answer] += self._logprobs(event)
        choices = [
            {
                "index": answer,
                "message": _message(message_of(parts, _ids(answers, answer))),
                "logprobs": {"content": known, "refusal": None} if self._body.logprobs else None,
                "finish_reason": self._reason(answers.ends[answer]),
            }
            for answer, (parts, known) in enumerate(zip(said, logprobs, strict=True))
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": answers.usage(),
        }

    async def frames(self, answers: Answers) -> AsyncIterator[bytes]:
        """All of it as events."""
        for answer in range(self._body.answers):
            content = None if self._readers else ""
            yield self._chunk(answer, {"role": "assistant", "content": content})
        try:
            async for events in answers.events():
                if parts := b"".join(p for event in events for p in self._parts(answers, event)):
                    yield parts
        except Refused as refused:
            yield frame(refused.body)
            return
        if self._body.tells_usage:
            yield frame({**self._chunk_head, "choices": [], "usage": answers.usage()})
        yield DONE

    def _parts(self, answers: Answers, event: TokenEvent | FinishEvent) -> list[bytes]:
        if isinstance(event, TokenEvent) and not (self._readers or self._body.logprobs):
            return [self._says[event.answer].saying(event.text)] if event.text else []
        known = self._logprobs(event)
        ids = _ids(answers, event.answer)
        deltas = [delta for part in self._read(event) for delta in _deltas(part, ids)]
        if known and not deltas:
            deltas = [{} if self._readers else {"content": ""}]
        # What is known of tokens goes with the first of what they brought.
        parts = [
            self._chunk(event.answer, delta, None if number else known)
            for number, delta in enumerate(deltas)
        ]
        if isinstance(event, FinishEvent):
            parts.append(self._chunk(event.answer, {}, reason=self._reason(event)))
        return parts

    def _read(self, event: TokenEvent | FinishEvent) -> list[Part]:
        """What an event brings: text, and calls where there are tools."""
        if not self._readers:
            return [Said(event.text)] if event.text else []
        reader = self._readers[event.answer]
        parts = reader.add(event.text)
        return (
            parts + reader.end(cut=event.reason == "length")
            if isinstance(event, FinishEvent)
            else parts
        )

    def _reason(self, end: FinishEvent) -> str:
        """Why an answer ended."""
        called = bool(self._readers) and self._readers[end.answer].whole > 0
        return "tool_calls" if called and end.reason == "stop" else end.reason

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _chunk(
        self,
        answer: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        reason: str | None = None,
    ) -> bytes:
        return frame(self._told(answer, delta, logprobs, reason))

    def _told(
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
        usage = {"usage": None} if self._body.tells_usage else {}
        return {**self._chunk_head, "choices": [choice], **usage}

    def _logprobs(self, event: TokenEvent | FinishEvent) -> list[dict[str, Any]]:
        if not self._body.logprobs or isinstance(event, FinishEvent):
            return []
        told = self._tokens.chat(event.choice)
        return [] if told is None else [told]


def _ids(answers: Answers, answer: int) -> Callable[[int], str]:
    """The ids of an answer's calls, by which they are."""
    return partial(call_id, answers.asked.turns[answer].node)


def _message(message: Message) -> dict[str, Any]:
    """An answer as JSON."""
    told: dict[str, Any] = {
        "role": "assistant",
        "content": message.content,
        "refusal": None,
        "annotations": [],
    }
    if message.calls:
        told["content"] = message.content or None
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return told


def _deltas(part: Part, ids: Callable[[int], str]) -> list[dict[str, Any]]:
    """What a part of an answer adds to it."""
    if isinstance(part, Said) and part.call is None:
        return [{"content": part.text}]
    if isinstance(part, Said):
        return [{"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}]
    if isinstance(part, CallStart):
        begins = {
            "index": part.call,
            "id": ids(part.call),
            "type": "function",
            "function": {"name": part.name, "arguments": ""},
        }
        return [{"tool_calls": [begins]}]
    return []
