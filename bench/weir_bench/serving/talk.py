"""Conversations as clients have them: each turn says something new and waits for the answer.

Knows what is said on the wire and when it came, nothing about how many talk at once.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weir.errors import WeirError
from weir_bench.serving.wire import Wire

SAID = "time of year may have made many people who would have been there know that not all of them"


@dataclass(frozen=True)
class Reply:
    """An answer, as its client saw it.

    Attributes:
        asked: when the request was sent, by `time.perf_counter`.
        arrived: when each piece of text came.
        tokens: of the answer, as the server counts.
        read: tokens of the prompt that were not known already.
        prompt: all tokens of the conversation before it.
        text: all of it.
    """

    asked: float
    arrived: tuple[float, ...]
    tokens: int
    read: int
    prompt: int
    text: str

    @property
    def first(self) -> float:
        """Seconds until the first text."""
        return self.arrived[0] - self.asked


@dataclass
class Talk:
    """One conversation through `/v1/chat/completions`, whose client sends its whole history.

    Args:
        port: of the server.
        model: as the server calls it.
        more: fields of every request that only some servers know.
    """

    port: int
    model: str
    more: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._wire = Wire(self.port)

    def close(self) -> None:
        """Hang up; the conversation may go on later."""
        self._wire.close()

    async def turn(self, words: str, tokens: int) -> Reply:
        """Say something and hear the answer."""
        messages = [*self.messages, {"role": "user", "content": words}]
        options = {"stream_options": {"include_usage": True}}
        body = {"max_tokens": tokens, "messages": messages, **options}
        heard = Listening()
        reply = await self._ask("/v1/chat/completions", body, heard, heard.add)
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply

    async def _ask(
        self, path: str, body: dict[str, Any], heard: Listening, add: Callable[[float, Any], None]
    ) -> Reply:
        """Send a request and hear all of its answer, each event by `add`."""
        common = {"model": self.model, "temperature": 0, "stream": True, **self.more}
        data = json.dumps({**common, **body}).encode()  # the client's own work is not the server's
        asked = time.perf_counter()
        async for when, event in self._wire.events(path, data):
            add(when, event)
        return heard.reply(asked)


@dataclass
class ById(Talk):
    """One conversation through `/v1/responses`, whose client names what it goes on from."""

    last: str | None = None

    async def turn(self, words: str, tokens: int) -> Reply:
        """Say something and hear the answer."""
        body = {"input": words, "previous_response_id": self.last, "max_output_tokens": tokens}
        heard = Listening()
        reply = await self._ask("/v1/responses", body, heard, heard.add_response)
        self.last = heard.id
        return reply


@dataclass
class Listening:
    """An answer while its events come.

    Attributes:
        id: of the response, where the server names it.
    """

    id: str | None = None
    _arrived: list[float] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _usage: dict[str, Any] = field(default_factory=dict)

    def add(self, when: float, event: dict[str, Any]) -> None:
        """An event of `/v1/chat/completions`."""
        if "error" in event:
            raise WeirError(f"the answer failed: {event['error'].get('message')}")
        for choice in event.get("choices") or ():
            self._said(when, (choice.get("delta") or {}).get("content"))
        self._usage = event.get("usage") or self._usage

    def add_response(self, when: float, event: dict[str, Any]) -> None:
        """An event of `/v1/responses`."""
        kind = event.get("type")
        if kind == "response.output_text.delta":
            self._said(when, event.get("delta"))
        elif kind in ("response.completed", "response.incomplete"):
            whole = event["response"]
            self.id, usage = whole["id"], whole.get("usage") or {}
            self._usage = {
                "prompt_tokens": usage.get("input_tokens", 0),
                "completion_tokens": usage.get("output_tokens", 0),
                "prompt_tokens_details": usage.get("input_tokens_details"),
            }
        elif kind in ("error", "response.failed"):
            raise WeirError(f"the answer failed: {event}")

    def reply(self, asked: float) -> Reply:
        """All of it."""
        if not self._arrived:
            raise WeirError("the answer has no text")
        known = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt = self._usage.get("prompt_tokens") or 0
        tokens = self._usage.get("completion_tokens") or len(self._arrived)
        text = "".join(self._texts)
        return Reply(asked, tuple(self._arrived), tokens, prompt - known, prompt, text)

    def _said(self, when: float, text: str | None) -> None:
        if text:
            self._arrived.append(when)
            self._texts.append(text)


def something(chance: random.Random, words: int) -> str:
    """So many words to say, no two times the same."""
    vocabulary = SAID.split()
    return " ".join(chance.choice(vocabulary) for _ in range(words))
