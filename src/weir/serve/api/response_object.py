"""The forms of a response on the wire: one object, or typed events with numbers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from weir.errors import WeirError
from weir.serve.api.errors import Refused, failed
from weir.serve.api.generation import Answers
from weir.serve.api.logprobs import Tokens
from weir.serve.api.logs import LOG
from weir.serve.api.output_items import OutputItems, Told
from weir.serve.api.schemas.responses import ResponseBody
from weir.serve.api.sse import DONE
from weir.serve.client import Wish
from weir.serve.engine import FinishEvent, TokenEvent
from weir.serve.messages import call_id
from weir.serve.response_turn import ResponseTurn
from weir.serve.sessions import Item
from weir.serve.tools import CallParser


class ResponseForm:
    """The forms that a response has.

    Args:
        body: what was asked for.
        reply: keeps it, before its end is told.
        owner: whose it is.
        wish: how the body is answered.
        tokens: tells of tokens.
    """

    def __init__(
        self, body: ResponseBody, reply: ResponseTurn, owner: str, wish: Wish, tokens: Tokens
    ) -> None:
        self._body = body
        self._reply = reply
        self._owner = owner
        self._names = {tool.name for tool in wish.tools}
        self._alone = wish.alone
        self._tokens = tokens
        self._created = int(time.time())
        self._number = 0

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """All of it as one object."""
        items = self._items(answers)
        async for events in answers.events():
            for event in events:
                items.add(event.text, self._known(event))
        status = _status(answers)
        items.end(status)
        return await self._done(answers, status, items.done)

    async def frames(self, answers: Answers) -> AsyncIterator[bytes]:
        """All of it as events."""
        items = self._items(answers)
        empty = self._response(answers, "in_progress", [])
        yield self._events(
            [(f"response.{kind}", {"response": empty}) for kind in ("created", "in_progress")]
        )
        try:
            async for events in answers.events():
                yield self._events(
                    [told for event in events for told in items.add(event.text, self._known(event))]
                )
            status = _status(answers)
            last = items.end(status)
            whole = await self._done(answers, status, items.done)
        except Refused as refused:
            error = refused.body["error"]
            told = {"code": error["code"] or "server_error", "message": error["message"]}
            broken = {**self._response(answers, "failed", []), "error": told}
            yield self._events([("response.failed", {"response": broken})])
            return
        yield self._events([*last, (f"response.{status}", {"response": whole})]) + DONE

    def _items(self, answers: Answers) -> OutputItems:
        form, turn = answers.desk.wording.form if self._names else None, answers.asked.turns[0]
        reader = None if form is None else CallParser(form, self._names, self._alone)
        return OutputItems(reader, partial(call_id, turn.node))

    def _known(self, event: TokenEvent | FinishEvent) -> list[dict[str, Any]]:
        """What is told of a token."""
        if self._body.logprobs is None or isinstance(event, FinishEvent):
            return []
        told = self._tokens.chat(event.choice)
        return [] if told is None else [told]

    async def _done(self, answers: Answers, status: str, items: list[Item]) -> dict[str, Any]:
        """The response when it has ended; it is kept before anybody hears of that.

        Raises:
            Refused: it cannot be kept.
        """
        whole = self._response(answers, status, items)
        try:
            session = answers.asked.plan.session
            await asyncio.to_thread(self._reply.keep, self._owner, session, whole)
        except WeirError as error:
            LOG.error("response not kept", exc_info=error)
            raise failed() from None
        return whole

    def _events(self, events: Sequence[Told]) -> bytes:
        """Events as they are sent, each with its number."""
        sent = bytearray()
        for kind, facts in events:
            data = {"type": kind, "sequence_number": self._number, **facts}
            self._number += 1
            sent += f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
        return bytes(sent)

    def _response(self, answers: Answers, status: str, output: list[Item]) -> dict[str, Any]:
        body, reply = self._body, self._reply
        ended = status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{answers.asked.turns[0].node}",
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
            "model": answers.desk.name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "conversation": None if reply.conversation is None else {"id": reply.conversation},
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "service_tier": "default",
            "store": body.kept,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _form(body)},
            "tool_choice": _choice(body),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "truncation": body.truncation or "disabled",
            "usage": usage(answers, kept=body.kept) if ended else None,
            "user": None,
            "metadata": body.metadata or {},
        }


def _status(answers: Answers) -> str:
    return "completed" if answers.ends[0].reason == "stop" else "incomplete"


def _choice(body: ResponseBody) -> str | dict[str, Any]:
    """The choice among tools, as the client has said it."""
    said = body.tool_choice
    return said or "auto" if isinstance(said, str | None) else said.model_dump()


def _form(body: ResponseBody) -> dict[str, Any]:
    """The form of the answer, as the client has said it."""
    said = body.text and body.text.format
    return said.model_dump(by_alias=True, exclude_none=True) if said else {"type": "text"}


def usage(answers: Answers, *, kept: bool) -> dict[str, Any]:
    """What a response took, in the words of responses."""
    told = answers.usage()
    read, cached = told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]
    written = read - cached if kept else 0
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": told["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": told["total_tokens"],
        "weir": told["weir"],
    }
