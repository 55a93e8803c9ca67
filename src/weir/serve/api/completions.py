"""`POST /v1/completions`: a text is continued, and nothing of it is kept."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from weir.serve.api.errors import Refused
from weir.serve.api.generation import Answers, begin, wish_of
from weir.serve.api.logprobs import Tokens, finite
from weir.serve.api.models import check_model
from weir.serve.api.openapi import takes
from weir.serve.api.requests import authorized, read_body
from weir.serve.api.schemas.chat import TextBody
from weir.serve.api.sending import sent
from weir.serve.api.sse import DONE, TextFrame, frame
from weir.serve.client import EngineClient
from weir.serve.engine import FinishEvent, TokenEvent

LIMIT = 16
"""Tokens of an answer where the client names no number, as OpenAI has it."""

router = APIRouter()


@router.post("/v1/completions", openapi_extra=takes(TextBody, streams=True))
async def complete(request: Request, owner: str = Depends(authorized)) -> Response:
    """Continue a text."""
    desk: EngineClient = request.app.state.desk
    body = await read_body(request, TextBody, owner)
    check_model(desk, body.model)
    wish = wish_of(desk, body, ("max_tokens", body.max_tokens), body.logprobs, LIMIT)
    prompt = body.only_prompt
    answers = await begin(
        request, lambda who: desk.planner.text(who, prompt), wish, owner, "prompt"
    )
    form = Form(body, desk, Tokens(desk.tokenizer, wish.ends), wish.ends)
    return await sent(request, form, answers, {}, stream=bool(body.stream))


class Form:
    """The forms that an answer has on the wire.

    Args:
        body: what was asked for.
        desk: who answers.
        tokens: tells of them.
        ends: those that are no part of an answer.
    """

    def __init__(
        self, body: TextBody, desk: EngineClient, tokens: Tokens, ends: frozenset[int]
    ) -> None:
        self._body = body
        self._tokens = tokens
        self._ends = ends
        self._offsets = [0] * body.answers
        self._head = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": desk.name,
        }
        mark = secrets.token_hex(16)
        told = [self._told(self._choice(answer, mark, [], None)) for answer in range(body.answers)]
        self._says = [TextFrame(each, mark) for each in told]

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """All of it as one object."""
        texts: list[list[str]] = [[] for _ in range(self._body.answers)]
        pieces: list[list[TokenEvent]] = [[] for _ in texts]
        async for events in answers.events():
            for event in events:
                texts[event.answer].append(event.text)
                if isinstance(event, TokenEvent):
                    pieces[event.answer].append(event)
        choices = [
            self._choice(answer, "".join(text), own, answers.ends[answer].reason)
            for answer, (text, own) in enumerate(zip(texts, pieces, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": answers.usage()}

    async def frames(self, answers: Answers) -> AsyncIterator[bytes]:
        """All of it as events."""
        try:
            async for events in answers.events():
                if parts := b"".join(map(self._part, events)):
                    yield parts
        except Refused as refused:
            yield frame(refused.body)
            return
        if self._body.tells_usage:
            yield frame({**self._head, "choices": [], "usage": answers.usage()})
        yield DONE

    def _part(self, event: TokenEvent | FinishEvent) -> bytes:
        if isinstance(event, TokenEvent) and self._body.logprobs is None:
            return self._says[event.answer].saying(event.text) if event.text else b""
        own = [event] if isinstance(event, TokenEvent) else []
        reason = event.reason if isinstance(event, FinishEvent) else None
        return frame(self._told(self._choice(event.answer, event.text, own, reason)))

    def _told(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._body.tells_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _choice(
        self, answer: int, text: str, pieces: list[TokenEvent], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": answer,
            "text": text,
            "logprobs": self._logprobs(answer, pieces),
            "finish_reason": reason,
        }

    def _logprobs(self, answer: int, pieces: list[TokenEvent]) -> dict[str, Any] | None:
        """As the older of OpenAI's forms has them: lists beside each other."""
        if self._body.logprobs is None:
            return None
        told: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for piece in pieces:
            choice = piece.choice
            if choice.logprob is None or choice.token in self._ends:
                continue
            text = self._tokens.text(choice.token)
            told["tokens"].append(text)
            told["token_logprobs"].append(finite(choice.logprob))
            told["top_logprobs"].append(
                {self._tokens.text(token): finite(logprob) for token, logprob in choice.top}
            )
            told["text_offset"].append(self._offsets[answer])
            self._offsets[answer] += len(text)
        return told
