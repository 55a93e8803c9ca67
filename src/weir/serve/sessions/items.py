"""Items of OpenAI's responses and conversations, and the messages that a model is asked with.

A new kind of item needs a line in `messages_of` and a form in `serve/api/schemas/items.py`. Knows
nothing about where items are kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weir.serve.messages import Call, Message

Item = dict[str, Any]
"""As a client is told of it, with its id."""


def new_id(kind: str) -> str:
    """An id that nobody has: of a `msg`, an `fc`, an `fco`, a `conv`."""
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


def call_item(name: str, call: Call, status: str) -> Item:
    """A call of a function.

    Args:
        name: the item's id, which is not the call's.
        call: it.
        status: as `answer_item` has it.
    """
    return {
        "id": name,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def result_item(call: str, output: str | list[dict[str, Any]]) -> Item:
    """What a function has returned, as a text or as parts that are texts; `call`: the call's id."""
    return {
        "id": new_id("fco"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": call,
        "output": output,
    }


def messages_of(items: Sequence[Item]) -> list[Message]:
    """What items say to a model.

    An answer is one message: its calls, and what it says before and between them, are items of
    their own.
    """
    said: list[Message] = []
    for item in items:
        message = _message_of(item)
        before = said[-1] if said and said[-1].role == "assistant" else None
        if before is not None and message.calls:
            said[-1] = replace(before, calls=(*before.calls, *message.calls))
        elif before is not None and before.calls and message.role == "assistant":
            said[-1] = replace(before, content=before.content + message.content)
        else:
            said.append(message)
    return said


def _message_of(item: Item) -> Message:
    if item["type"] == "function_call":
        call = Call(item["call_id"], item["name"], item["arguments"])
        return Message("assistant", "", calls=(call,))
    if item["type"] == "function_call_output":
        output = item["output"]
        return Message(
            "tool", output if isinstance(output, str) else _text(output), result=item["call_id"]
        )
    role = "system" if item["role"] == "developer" else item["role"]
    return Message(role, _text(item["content"]))


def _text(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)
