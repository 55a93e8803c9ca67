"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from weir.serve.app.answering import Answers, begin, wish_of
from weir.serve.app.bodies import ChatBody
from weir.serve.app.described import takes
from weir.serve.app.errors import Refused
from weir.serve.app.eventstream import DONE, frame
from weir.serve.app.models import check_model
from weir.serve.app.reading import HEADER, authorised, read_body, session_of
from weir.serve.app.sending import sent
from weir.serve.app.shaping import shape_of
from weir.serve.app.told import Tokens
from weir.serve.desk import Desk
from weir.serve.mailbox import End, Piece

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatBody, streams=True))
async def chat(request: Request, owner: str = Depends(authorised)) -> Response:
    """Answer a conversation, of which only what is new is read."""
    desk: Desk = request.app.state.desk
    session = session_of(request)
    body = await read_body(request, ChatBody, owner)
    check_model(desk, body.model)
    messages = [message.message() for message in body.messages]
    if messages[-1].role == "assistant":
        raise Refused(
            400, "the last message must be one to answer, not an assistant's", param="messages"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused(400, "top_logprobs is for logprobs: true", param="top_logprobs")
    limit: tuple[str, int | None] = ("max_tokens", body.max_tokens)
    if body.max_completion_tokens is not None:
        limit = ("max_completion_tokens", body.max_completion_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wish = wish_of(desk, body, limit, logprobs, desk.limits.answer_default)
    shape = await shape_of(request, body)
    if shape is not None:
        wish = replace(wish, constraint=shape.mask)
    elif desk.paragraphs:
        wish = wish.ending_with("\n")
    answers = await begin(
        request,
        lambda who: desk.plan_chat(who, messages, session),
        wish,
        owner,
        "messages",
    )
    form = Form(body, desk, Tokens(desk.tokenizer, wish.ends))
    headers = {HEADER: answers.asked.plan.session or ""}
    return await sent(request, form, answers, headers, stream=bool(body.stream))


class Form:
    """The forms that an answer has on the wire.

    Args:
        body: what was asked for.
        desk: who answers.
        tokens: tells of them.
    """

    def __init__(self, body: ChatBody, desk: Desk, tokens: Tokens) -> None:
        self._body = body
        self._tokens = tokens
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": desk.name,
        }

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """All of it as one object."""
        texts: list[list[str]] = [[] for _ in range(self._body.answers)]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in texts]
        async for events in answers.events():
            for event in events:
                texts[event.answer].append(event.text)
                logprobs[event.answer] += self._logprobs(event)
        choices = [
            {
                "index": answer,
                "message": {"role": "assistant", "content": "".join(text), "refusal": None},
                "logprobs": {"content": known, "refusal": None} if self._body.logprobs else None,
                "finish_reason": answers.ends[answer].reason,
            }
            for answer, (text, known) in enumerate(zip(texts, logprobs, strict=True))
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
            yield self._chunk(answer, {"role": "assistant", "content": ""})
        try:
            async for events in answers.events():
                yield b"".join(part for event in events for part in self._parts(event))
        except Refused as refused:
            yield frame(refused.body)
            return
        if self._body.tells_usage:
            yield frame({**self._chunk_head, "choices": [], "usage": answers.usage()})
        yield DONE

    def _parts(self, event: Piece | End) -> list[bytes]:
        known = self._logprobs(event)
        parts = []
        if event.text or known:
            parts.append(self._chunk(event.answer, {"content": event.text}, known))
        if isinstance(event, End):
            parts.append(self._chunk(event.answer, {}, reason=event.reason))
        return parts

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
        choice = {
            "index": answer,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": reason,
        }
        usage = {"usage": None} if self._body.tells_usage else {}
        return frame({**self._chunk_head, "choices": [choice], **usage})

    def _logprobs(self, event: Piece | End) -> list[dict[str, Any]]:
        if not self._body.logprobs or isinstance(event, End):
            return []
        told = self._tokens.chat(event.choice)
        return [] if told is None else [told]
