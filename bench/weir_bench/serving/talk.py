"""Conversations of a client with a server: each turn sends a message and waits for the answer.

This file makes requests and reads answers. `load.py` runs several conversations concurrently.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from weir.errors import WeirError
from weir_bench.serving.wire import Wire

SAID = "time of year may have made many people who would have been there know that not all of them"


@dataclass(frozen=True)
class Reply:
    """An answer, as its client received it.

    Attributes:
        asked: when the request was sent, by `time.perf_counter`.
        arrived: when each piece of text arrived.
        tokens: tokens of the answer, as counted by the server.
        read: tokens of the prompt that the server had not cached.
        prompt: all tokens of the prompt, including the earlier conversation.
        text: the text of the answer.
    """

    asked: float
    arrived: tuple[float, ...]
    tokens: int
    read: int
    prompt: int
    text: str

    @property
    def first(self) -> float:
        """Seconds from the request to the first text."""
        return self.arrived[0] - self.asked


@dataclass
class Talk:
    """A conversation through `/v1/chat/completions`, whose client sends the whole history.

    `more` has additional fields of every request, which only some servers support.
    """

    port: int
    model: str
    more: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    messages: list[dict[str, str]] = field(default_factory=list)

    path: ClassVar[str] = "/v1/chat/completions"

    def __post_init__(self) -> None:
        self._wire = Wire(self.port)

    def close(self) -> None:
        """Close the connection. The conversation can continue later."""
        self._wire.close()

    async def turn(self, words: str, tokens: int) -> Reply:
        """Send a message and return the answer."""
        common = {"model": self.model, "temperature": 0, "stream": True, **self.more}
        # Encode the request before the clock starts, so that only the server's work is timed.
        data = json.dumps({**common, **self.body(words, tokens)}).encode()
        arrived: list[float] = []
        texts: list[str] = []
        usage: dict[str, Any] = {}
        asked = time.perf_counter()
        async for when, event in self._wire.events(self.path, data):
            text, told = self.hear(event)
            if text:
                arrived.append(when)
                texts.append(text)
            usage = told or usage
        if not arrived:
            raise WeirError("the answer has no text")
        said = "".join(texts)
        self.messages.append({"role": "user", "content": words})
        self.messages.append({"role": "assistant", "content": said})
        known = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt = usage.get("prompt_tokens") or 0
        written = usage.get("completion_tokens") or len(arrived)
        return Reply(asked, tuple(arrived), written, prompt - known, prompt, said)

    def body(self, words: str, tokens: int) -> dict[str, Any]:
        """Return the fields of a request with a message and a limit on the answer's tokens."""
        messages = [*self.messages, {"role": "user", "content": words}]
        options = {"stream_options": {"include_usage": True}}
        return {"max_tokens": tokens, "messages": messages, **options}

    def hear(self, event: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
        """Return the text in an event and the numbers of tokens, if it has them."""
        if "error" in event:
            raise WeirError(f"the answer failed: {event['error'].get('message')}")
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
        return "".join(delta.get("content") or "" for delta in deltas), event.get("usage")


@dataclass
class ById(Talk):
    """A conversation through `/v1/responses`, whose client names the previous response."""

    last: str | None = None

    path: ClassVar[str] = "/v1/responses"

    def body(self, words: str, tokens: int) -> dict[str, Any]:
        """Return the fields of a request with a message and a limit on the answer's tokens."""
        return {"input": words, "previous_response_id": self.last, "max_output_tokens": tokens}

    def hear(self, event: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
        """Return the text in an event and the numbers of tokens, named as in chat completions."""
        kind = event.get("type")
        if kind in ("error", "response.failed"):
            raise WeirError(f"the answer failed: {event}")
        if kind not in ("response.completed", "response.incomplete"):
            return event.get("delta") if kind == "response.output_text.delta" else None, None
        self.last, usage = event["response"]["id"], event["response"].get("usage") or {}
        return None, {
            "prompt_tokens": usage.get("input_tokens", 0),
            "completion_tokens": usage.get("output_tokens", 0),
            "prompt_tokens_details": usage.get("input_tokens_details"),
        }


def something(chance: random.Random, words: int) -> str:
    """Return a message of random words."""
    vocabulary = SAID.split()
    return " ".join(chance.choice(vocabulary) for _ in range(words))
