"""`POST /v1/messages` and its token count: Anthropic's Messages API."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from weir.serve.api.chat_request import AnswerReader, ChatRequest, answer_chat, count_chat
from weir.serve.api.dependencies import Client, Owner
from weir.serve.api.errors import APIError, anthropic_error
from weir.serve.api.generation import Events, Renderer, usage_of, warn
from weir.serve.api.openapi import describe_body
from weir.serve.api.requests import read_content
from weir.serve.api.schemas.anthropic import AnthropicBody, CountBody
from weir.serve.api.sse import encode_event
from weir.serve.client import EngineClient, Generation
from weir.serve.engine.output import AnswerEvent
from weir.serve.messages import Call
from weir.serve.thoughts import ThoughtDelta
from weir.serve.tools.parser import AnswerPart, CallEnd, CallStart

PING = encode_event({"type": "ping"})

router = APIRouter()


@router.post("/v1/messages", openapi_extra=describe_body(AnthropicBody, streams=True))
async def create(request: Request, client: Client, owner: Owner) -> Response:
    """Answer a conversation, for clients of Anthropic's API."""
    body, messages = await read_content(request, AnthropicBody, owner, "messages", "history")
    limit = ("max_tokens", body.max_tokens)
    asked = ChatRequest(body, messages, body.offer, limit, None, body.held_to, "output_format")
    make = partial(AnthropicRenderer, body, client)
    return await answer_chat(request, client, owner, asked, make)


@router.post("/v1/messages/count_tokens", openapi_extra=describe_body(CountBody))
async def count(request: Request, client: Client, owner: Owner) -> Response:
    """Count the tokens of a conversation."""
    body, messages = await read_content(request, CountBody, owner, "messages", "history")
    asked = ChatRequest(body, messages, body.offer, ("max_tokens", None))
    tokens = await count_chat(request, client, owner, asked)
    return JSONResponse({"input_tokens": tokens}, headers=warn(request, body.skipped))


class AnthropicRenderer(Renderer):
    """Writes messages: one object, or events about content blocks."""

    def __init__(self, body: CountBody, client: EngineClient, generation: Generation) -> None:
        self._generation = generation
        self._reader = AnswerReader(client, generation)
        self._stops = body.stops
        self._done: list[dict[str, Any]] = []  # blocks that have ended
        self._open: dict[str, Any] | None = None
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": client.name,
        }

    async def whole(self, events: Events) -> dict[str, Any]:
        """Write the answer as one object."""
        async for several in events:
            for event in several:
                self._add(event)
        self._close()
        return {
            **self._head,
            "content": self._done,
            **self._stop(),
            "usage": self._usage(),
        }

    async def stream(self, events: Events) -> AsyncIterator[bytes]:
        """Write the answer as a stream of events."""
        begun: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # Without `weir`: its numbers are known only at the end of the answer.
            "usage": {name: n for name, n in self._usage().items() if name != "weir"},
        }
        yield encode_event({"type": "message_start", "message": begun})
        async for several in events:
            yield b"".join(encode_event(one) for event in several for one in self._add(event))
        ended = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        last = [*self._close(), ended, {"type": "message_stop"}]
        yield b"".join(map(encode_event, last))

    def keep_alive(self, generation: Generation) -> bytes:
        """Write a comment, and this API's ping event."""
        return super().keep_alive(generation) + PING

    def failure(self, error: APIError) -> bytes:
        """Write an event that says that the answer failed."""
        return encode_event(anthropic_error(error))

    def _add(self, event: AnswerEvent) -> list[dict[str, Any]]:
        return [made for part in self._reader.read(event) for made in self._add_part(part)]

    def _add_part(self, part: AnswerPart | ThoughtDelta) -> list[dict[str, Any]]:
        """Add a part of the answer to its block. Returns the events about it."""
        if isinstance(part, CallEnd):
            return self._close()
        if isinstance(part, CallStart):
            name = self._generation.call_id(0)(part.call)
            return self._begin({"type": "tool_use", "id": name, "name": part.name, "input": ""})
        if isinstance(part, ThoughtDelta):
            events = []
            if self._open is None or self._open["type"] != "thinking":
                events = self._begin({"type": "thinking", "thinking": "", "signature": ""})
            return [*events, self._delta("thinking", "thinking_delta", "thinking", part.text)]
        if part.call is not None:
            return [self._delta("input", "input_json_delta", "partial_json", part.text)]
        events = []
        if self._open is None or self._open["type"] != "text":
            events = self._begin({"type": "text", "text": ""})
        return [*events, self._delta("text", "text_delta", "text", part.text)]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self._open = block
        shown = {**block, "input": {}} if block["type"] == "tool_use" else dict(block)
        start = {
            "type": "content_block_start",
            "index": len(self._done),
            "content_block": shown,
        }
        return [*events, start]

    def _delta(self, field: str, kind: str, name: str, text: str) -> dict[str, Any]:
        assert self._open is not None
        self._open[field] += text
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": len(self._done), "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        """End the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        if block["type"] == "tool_use":
            given = Call("", "", block["input"]).parse_arguments()
            # A call that was cut off has no valid arguments. Only a stream shows their text so far.
            block["input"] = given if isinstance(given, dict) else {}
        self._done.append(block)
        return [{"type": "content_block_stop", "index": len(self._done) - 1}]

    def _stop(self) -> dict[str, Any]:
        """Return why the answer ended."""
        end = self._generation.finished[0]
        if end.reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._reader.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        sequence, request = self._generation.sequences[0], self._generation.request
        if self._stops and sequence.output_ids[-1] not in request.stop_ids:
            stop = self._stops[0] if len(self._stops) == 1 else None
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Token usage in this API's fields. `input_tokens` leaves out cached tokens."""
        usage = usage_of(self._generation)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "weir": usage["weir"],
        }
