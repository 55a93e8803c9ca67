"""`POST /v1/completions`: continues a text, of which nothing is saved."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from weir.serve.api.errors import APIError
from weir.serve.api.generation import Events, make_request, send, start, usage_of
from weir.serve.api.logprobs import LogprobFormatter, clip
from weir.serve.api.models import check_model
from weir.serve.api.openapi import describe_body
from weir.serve.api.requests import authorize, read_body
from weir.serve.api.schemas.chat import TextBody
from weir.serve.api.sse import DONE, EventTemplate, encode_event
from weir.serve.client import EngineClient, Generation
from weir.serve.engine import FinishEvent, TokenEvent

DEFAULT_LIMIT = 16
"""Tokens of an answer if the client does not say, as with OpenAI."""

router = APIRouter()


@router.post("/v1/completions", openapi_extra=describe_body(TextBody, streams=True))
async def complete(request: Request, owner: str = Depends(authorize)) -> Response:
    """Complete a text or token ids. Nothing is saved."""
    client: EngineClient = request.app.state.client
    body = await read_body(request, TextBody, owner)
    check_model(client, body.model)
    match = partial(client.matcher.complete, owner, body.only_prompt)
    limit = ("max_tokens", body.max_tokens)
    job = make_request(client, body, match, limit, body.logprobs, DEFAULT_LIMIT)
    generation = await start(request, job, "prompt")
    renderer = CompletionRenderer(body, client, generation)
    return await send(request, renderer, generation, {}, stream=bool(body.stream))


class CompletionRenderer:
    """Writes text completions."""

    def __init__(self, body: TextBody, client: EngineClient, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._stop_ids = generation.request.stop_ids
        self._logprobs = LogprobFormatter(client.tokenizer, self._stop_ids)
        self._offsets = [0] * body.num_answers
        self._head = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": client.name,
        }
        mark = secrets.token_hex(16)
        self._templates = [
            EventTemplate(self._chunk(self._choice(answer, mark, [], None)), mark)
            for answer in range(body.num_answers)
        ]

    async def whole(self, events: Events) -> dict[str, Any]:
        """Write all answers as one object."""
        texts: list[list[str]] = [[] for _ in range(self._body.num_answers)]
        tokens: list[list[TokenEvent]] = [[] for _ in texts]
        async for several in events:
            for event in several:
                texts[event.answer].append(event.text)
                if isinstance(event, TokenEvent):
                    tokens[event.answer].append(event)
        finished = self._generation.finished
        choices = [
            self._choice(answer, "".join(text), own, finished[answer].reason)
            for answer, (text, own) in enumerate(zip(texts, tokens, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": usage_of(self._generation)}

    async def stream(self, events: Events) -> AsyncIterator[bytes]:
        """Write answers as events."""
        async for several in events:
            if encoded := b"".join(map(self._encode, several)):
                yield encoded
        if self._body.include_usage:
            yield encode_event({**self._head, "choices": [], "usage": usage_of(self._generation)})
        yield DONE

    def failure(self, error: APIError) -> bytes:
        """Write that an answer has failed."""
        return encode_event(error.body)

    def _encode(self, event: TokenEvent | FinishEvent) -> bytes:
        if isinstance(event, TokenEvent) and self._body.logprobs is None:
            return self._templates[event.answer].encode(event.text) if event.text else b""
        tokens = [event] if isinstance(event, TokenEvent) else []
        reason = event.reason if isinstance(event, FinishEvent) else None
        return encode_event(self._chunk(self._choice(event.answer, event.text, tokens, reason)))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _choice(
        self, answer: int, text: str, tokens: list[TokenEvent], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": answer,
            "text": text,
            "logprobs": self._logprobs_of(answer, tokens),
            "finish_reason": reason,
        }

    def _logprobs_of(self, answer: int, events: list[TokenEvent]) -> dict[str, Any] | None:
        """Log-probabilities in the older of OpenAI's formats: parallel lists."""
        if self._body.logprobs is None:
            return None
        lists: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for event in events:
            token = event.token
            if token.logprob is None or token.id in self._stop_ids:
                continue
            text = self._logprobs.text(token.id)
            top = {self._logprobs.text(other): clip(logprob) for other, logprob in token.top}
            lists["tokens"].append(text)
            lists["token_logprobs"].append(clip(token.logprob))
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(self._offsets[answer])
            self._offsets[answer] += len(text)
        return lists
