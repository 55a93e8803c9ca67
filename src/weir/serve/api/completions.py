"""`POST /v1/chat/completions` and `POST /v1/completions`. Text completions are not saved."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from weir.serve.api.chat_request import AnswerReader, ChatRequest, answer_chat
from weir.serve.api.dependencies import Client, Owner
from weir.serve.api.errors import APIError
from weir.serve.api.generation import (
    Events,
    Renderer,
    make_request,
    progress_of,
    send_answers,
    usage_of,
)
from weir.serve.api.logprobs import LogprobFormatter, clip
from weir.serve.api.models import check_model
from weir.serve.api.openapi import describe_body
from weir.serve.api.output_format import refuse_own_tools
from weir.serve.api.requests import read_content
from weir.serve.api.schemas.chat import ChatBody, CompletionBody, TextBody
from weir.serve.api.sse import DONE, encode_event
from weir.serve.api.thinking import note_without_template
from weir.serve.client import EngineClient, Generation
from weir.serve.engine.output import AnswerEvent, FinishEvent, TokenEvent
from weir.serve.messages import Call, Message
from weir.serve.thoughts import ThoughtDelta
from weir.serve.tools.parser import AnswerPart, CallStart, TextDelta, join_parts

DEFAULT_LIMIT = 16
"""The most tokens that continue a text if a request sets no limit, as in OpenAI's API."""

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=describe_body(ChatBody, streams=True))
async def chat(request: Request, client: Client, owner: Owner) -> Response:
    """Complete a chat. Messages that a saved turn already contains are not processed again."""
    body, messages = await read_content(request, ChatBody, owner, "messages", "history")
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    limit: tuple[str, int | None] = ("max_tokens", body.max_tokens)
    if body.max_completion_tokens is not None:
        limit = ("max_completion_tokens", body.max_completion_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    held_to = None if body.response_format is None else body.response_format.held_to
    asked = ChatRequest(body, messages, body.offer, limit, logprobs, held_to)
    return await answer_chat(request, client, owner, asked, partial(ChatRenderer, body, client))


@router.post("/v1/completions", openapi_extra=describe_body(TextBody, streams=True))
async def complete(request: Request, client: Client, owner: Owner) -> Response:
    """Complete a prompt, given as text or as token ids. Nothing is saved."""
    body, prompt = await read_content(
        request, TextBody, owner, "prompt", "only_prompt", client.limits.prompt
    )
    check_model(client, body.model)
    refuse_own_tools(body)
    note_without_template(body)
    match = partial(client.matcher.complete, owner, prompt)
    limit = ("max_tokens", body.max_tokens)
    job = make_request(client, body, match, limit, body.logprobs, DEFAULT_LIMIT)
    make = partial(TextRenderer, body, client)
    return await send_answers(request, job, "prompt", make, body)


class CompletionRenderer(Renderer):
    """Writes completions as one object, or as chunks with choices.

    Args:
        head: the fields of a chunk besides its choices.
    """

    def __init__(
        self,
        body: CompletionBody,
        client: EngineClient,
        generation: Generation,
        head: dict[str, Any],
    ) -> None:
        self._generation = generation
        self._include_usage = body.include_usage
        self._with_progress = body.wants_progress
        self._counts_always = body.counts_always
        self._count = 0  # tokens of all answers so far
        self._num_answers = body.num_answers
        self._stop_ids = generation.request.stop_ids
        self._logprobs = LogprobFormatter(client.tokenizer, self._stop_ids)
        self._head = head

    async def stream(self, events: Events) -> AsyncIterator[bytes]:
        """Write answers as events."""
        for choice in self._first_choices():
            yield encode_event(self._chunk(choice))
        async for several in events:
            self._count += sum(isinstance(one, TokenEvent) for one in several)
            if encoded := b"".join(map(self._encode, several)):
                yield encoded
        if self._include_usage:
            yield encode_event({**self._head, "choices": [], "usage": usage_of(self._generation)})
        yield DONE

    def keep_alive(self, generation: Generation) -> bytes:
        """Write a comment. Until the first answer begins, also write a chunk with the progress of
        the prompt, if the client asks for it.
        """
        comment = super().keep_alive(generation)
        if not self._with_progress or generation.sequences[0].output_ids:
            return comment
        chunk = {**self._chunk(self._no_choice()), "prompt_progress": progress_of(generation)}
        return comment + encode_event(chunk)

    @abstractmethod
    def _no_choice(self) -> dict[str, Any]:
        """Return a choice that adds nothing to the first answer."""

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        if self._counts_always:
            usage = {"usage": usage_of(self._generation, self._count)}
        return {**self._head, "choices": [choice], **usage}

    def _first_choices(self) -> Iterator[dict[str, Any]]:
        """Return the choices of the chunks that come before any token."""
        yield from ()

    @abstractmethod
    def _encode(self, event: AnswerEvent) -> bytes:
        """Encode an event as chunks."""


class ChatRenderer(CompletionRenderer):
    """Writes chat completions."""

    def __init__(self, body: ChatBody, client: EngineClient, generation: Generation) -> None:
        self._with_logprobs = bool(body.logprobs)
        self._readers = [AnswerReader(client, generation) for _ in range(body.num_answers)]
        head = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": client.name,
            "object": "chat.completion.chunk",
        }
        super().__init__(body, client, generation, head)

    async def whole(self, events: Events) -> dict[str, Any]:
        """Write all answers as one object."""
        parts: list[list[AnswerPart]] = [[] for _ in range(self._num_answers)]
        thoughts = [""] * self._num_answers
        logprobs: list[list[dict[str, Any]]] = [[] for _ in parts]
        async for several in events:
            for event in several:
                for part in self._readers[event.answer].read(event):
                    if isinstance(part, ThoughtDelta):
                        thoughts[event.answer] += part.text
                    else:
                        parts[event.answer].append(part)
                logprobs[event.answer] += self._logprobs.entries_of(event)
        choices = [
            {
                "index": answer,
                "message": _message(
                    join_parts(own, self._generation.call_id(answer)), thoughts[answer].rstrip()
                ),
                "logprobs": {"content": known, "refusal": None} if self._with_logprobs else None,
                "finish_reason": self._finish_reason(self._generation.finished[answer]),
            }
            for answer, (own, known) in enumerate(zip(parts, logprobs, strict=True))
        ]
        usage = usage_of(self._generation)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _first_choices(self) -> Iterator[dict[str, Any]]:
        for answer in range(self._num_answers):
            content = None if self._readers[answer].has_tools else ""
            yield self._choice(answer, {"role": "assistant", "content": content})

    def _encode(self, event: AnswerEvent) -> bytes:
        logprobs = self._logprobs.entries_of(event)
        make_id = self._generation.call_id(event.answer)
        deltas = [
            delta
            for part in self._readers[event.answer].read(event)
            if (delta := _delta(part, make_id))
        ]
        if logprobs and not deltas:
            deltas = [{} if self._readers[event.answer].has_tools else {"content": ""}]
        # The log-probabilities of a token are sent with the first part that the token produced.
        choices = [
            self._choice(event.answer, delta, None if number else logprobs)
            for number, delta in enumerate(deltas)
        ]
        if isinstance(event, FinishEvent):
            choices.append(self._choice(event.answer, {}, reason=self._finish_reason(event)))
        return b"".join(encode_event(self._chunk(choice)) for choice in choices)

    def _no_choice(self) -> dict[str, Any]:
        return self._choice(0, {})

    def _finish_reason(self, end: FinishEvent) -> str:
        return self._readers[end.answer].finish_reason(end)

    def _choice(
        self,
        answer: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": answer,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": reason,
        }


def _message(message: Message, thoughts: str) -> dict[str, Any]:
    """Return an answer as JSON."""
    data: dict[str, Any] = {
        "role": "assistant",
        "content": message.content,
        "refusal": None,
        "annotations": [],
    }
    if thoughts:
        data["reasoning_content"] = thoughts
    if message.calls:
        data["content"] = message.content or None
        data["tool_calls"] = [call.for_chat(call.arguments) for call in message.calls]
    return data


def _delta(part: AnswerPart | ThoughtDelta, make_id: Callable[[int], str]) -> dict[str, Any] | None:
    """Return the delta for a part of an answer, or None for the end of a call."""
    if isinstance(part, ThoughtDelta):
        return {"reasoning_content": part.text}
    if isinstance(part, TextDelta) and part.call is None:
        return {"content": part.text}
    if isinstance(part, TextDelta):
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
    if isinstance(part, CallStart):
        call = Call(make_id(part.call), part.name, "")
        return {"tool_calls": [{"index": part.call, **call.for_chat("")}]}
    return None


class TextRenderer(CompletionRenderer):
    """Writes text completions."""

    def __init__(self, body: TextBody, client: EngineClient, generation: Generation) -> None:
        self._with_logprobs = body.logprobs is not None
        self._offsets = [0] * body.num_answers
        head = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": client.name,
        }
        super().__init__(body, client, generation, head)

    async def whole(self, events: Events) -> dict[str, Any]:
        """Write all answers as one object."""
        texts: list[list[str]] = [[] for _ in range(self._num_answers)]
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

    def _encode(self, event: AnswerEvent) -> bytes:
        if isinstance(event, TokenEvent) and not (event.text or self._with_logprobs):
            return b""
        tokens = [event] if isinstance(event, TokenEvent) else []
        reason = event.reason if isinstance(event, FinishEvent) else None
        return encode_event(self._chunk(self._choice(event.answer, event.text, tokens, reason)))

    def _choice(
        self, answer: int, text: str, tokens: list[TokenEvent], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": answer,
            "text": text,
            "logprobs": self._logprobs_of(answer, tokens) if self._with_logprobs else None,
            "finish_reason": reason,
        }

    def _no_choice(self) -> dict[str, Any]:
        return self._choice(0, "", [], None)

    def _logprobs_of(self, answer: int, events: list[TokenEvent]) -> dict[str, list[Any]]:
        """Return log-probabilities in OpenAI's older format, which has parallel lists."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists: dict[str, list[Any]] = {name: [] for name in names}
        for event in events:
            token = event.token
            if token.logprob is None or token.id in self._stop_ids:
                continue
            text = self._logprobs.text(token.id)
            top = {self._logprobs.text(other): clip(logprob) for other, logprob in token.top}
            top[text] = clip(token.logprob)  # as OpenAI does, even if it is not among the likeliest
            values = (text, clip(token.logprob), top, self._offsets[answer])
            for name, value in zip(names, values, strict=True):
                lists[name].append(value)
            self._offsets[answer] += len(text)
        return lists
