"""The forms of a response on the wire: one object, or typed events with numbers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from weir.errors import WeirError
from weir.serve.app.answering import Answers
from weir.serve.app.errors import Refused, failed
from weir.serve.app.eventstream import DONE
from weir.serve.app.logs import LOG
from weir.serve.app.responsebodies import ResponseBody
from weir.serve.app.told import Tokens
from weir.serve.book import Item, answer_item, answer_part, new_id
from weir.serve.mailbox import End, Piece
from weir.serve.replies import Reply


class ResponseForm:
    """The forms that a response has.

    Args:
        body: what was asked for.
        reply: keeps it, before its end is told.
        owner: whose it is.
        tokens: tells of tokens.
    """

    def __init__(self, body: ResponseBody, reply: Reply, owner: str, tokens: Tokens) -> None:
        self._body = body
        self._reply = reply
        self._owner = owner
        self._tokens = tokens
        self._created = int(time.time())
        self._item = new_id("msg")
        self._number = 0
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """All of it as one object."""
        async for events in answers.events():
            for event in events:
                self._add(event)
        return await self._done(answers)

    async def frames(self, answers: Answers) -> AsyncIterator[bytes]:
        """All of it as events."""
        empty = self._response(answers, "in_progress", [])
        item = answer_item(self._item, None, "in_progress")
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield b"".join(
            (
                self._event("response.created", response=empty),
                self._event("response.in_progress", response=empty),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **place, part=answer_part("")),
            )
        )
        try:
            async for events in answers.events():
                yield b"".join(self._delta(event, place) for event in events)
            whole = await self._done(answers)
        except Refused as refused:
            error = refused.body["error"]
            told = {"code": error["code"] or "server_error", "message": error["message"]}
            broken = {**self._response(answers, "failed", []), "error": told}
            yield self._event("response.failed", response=broken)
            return
        (item,) = whole["output"]
        (part,) = item["content"]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        yield b"".join(
            (
                self._event("response.output_text.done", **place, **text),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{whole['status']}", response=whole),
                DONE,
            )
        )

    def _add(self, event: Piece | End) -> list[dict[str, Any]]:
        """Take in what has come; returns what is told of its token."""
        self._texts.append(event.text)
        if self._body.logprobs is None or isinstance(event, End):
            return []
        told = self._tokens.chat(event.choice)
        known = [] if told is None else [told]
        self._logprobs += known
        return known

    def _delta(self, event: Piece | End, place: dict[str, Any]) -> bytes:
        known = self._add(event)
        if not (event.text or known):
            return b""
        return self._event("response.output_text.delta", **place, delta=event.text, logprobs=known)

    async def _done(self, answers: Answers) -> dict[str, Any]:
        """The response when it has ended; it is kept before anybody hears of that.

        Raises:
            Refused: it cannot be kept.
        """
        status = "completed" if answers.ends[0].reason == "stop" else "incomplete"
        item = answer_item(self._item, "".join(self._texts), status, self._logprobs)
        whole = self._response(answers, status, [item])
        try:
            session = answers.asked.plan.session
            await asyncio.to_thread(self._reply.keep, self._owner, session, whole)
        except WeirError as error:
            LOG.error("response not kept", exc_info=error)
            raise failed() from None
        return whole

    def _event(self, kind: str, **facts: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **facts}
        self._number += 1
        told = json.dumps(data, separators=(",", ":"))
        return f"event: {kind}\ndata: {told}\n\n".encode()

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
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "conversation": None if reply.conversation is None else {"id": reply.conversation},
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.kept,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _form(body)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "truncation": body.truncation or "disabled",
            "usage": usage(answers, kept=body.kept) if ended else None,
            "user": None,
            "metadata": body.metadata or {},
        }


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
