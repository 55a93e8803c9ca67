"""Items of OpenAI's responses and conversations, and the messages that a model is asked with.

A new kind of item needs a line in `message_of` and a form in `serve/app/itembodies.py`. Knows
nothing about where items are kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from weir.serve.messages import Message

Item = dict[str, Any]
"""As a client is told of it, with its id."""


def new_id(kind: str) -> str:
    """An id that nobody has: `msg`, `conv`."""
    return f"{kind}_{secrets.token_hex(16)}"


def input_item(role: str, texts: Sequence[str]) -> Item:
    """A message that a client sent."""
    if role == "assistant":
        return answer_item(new_id("msg"), "\n".join(texts), "completed")
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": parts,
    }


def answer_item(
    name: str, text: str | None, status: str, logprobs: Sequence[dict[str, Any]] = ()
) -> Item:
    """An answer.

    Args:
        name: its id.
        text: what was said; None where nothing is known of it yet.
        status: "in_progress", "completed" or "incomplete".
        logprobs: of its tokens.
    """
    parts = [] if text is None else [answer_part(text, logprobs)]
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": parts}


def answer_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The one part that an answer has."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_of(item: Item) -> Message:
    """What an item says to a model."""
    role = "system" if item["role"] == "developer" else item["role"]
    return Message(role, "\n".join(part["text"] for part in item["content"]))
