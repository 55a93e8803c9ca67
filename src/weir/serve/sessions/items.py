"""Items of OpenAI's responses and conversations, and the messages that they represent.

A new kind of item needs lines in `_message_of` and a class in `serve/api/schemas/responses.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weir.serve.messages import Call, Message

Item = dict[str, Any]
"""An item as the client sees it, with its id."""


def new_id(kind: str) -> str:
    """Return a random id that begins with the kind, such as `msg`, `fc` or `conv`."""
    return f"{kind}_{secrets.token_hex(16)}"


def input_item(role: str, texts: Sequence[str]) -> Item:
    """Build the item of a message from a client."""
    if role == "assistant":
        return answer_item(new_id("msg"), "".join(texts), "completed")
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
    """Build the item of an answer; `text` is None if there is none yet."""
    parts = [] if text is None else [answer_part(text, logprobs)]
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": parts}


def answer_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Build the single content part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def thought_item(name: str, text: str | None, status: str) -> Item:
    """Build the item of thoughts; `text` is None if there are none yet."""
    parts = [] if text is None else [thought_part(text)]
    return {"id": name, "type": "reasoning", "status": status, "summary": [], "content": parts}


def thought_part(text: str) -> dict[str, Any]:
    """Build the single content part of thoughts."""
    return {"type": "reasoning_text", "text": text}


def call_item(name: str, call: Call, status: str) -> Item:
    """Build the item of a function call; `name` is its id, which differs from the call's."""
    return {
        "id": name,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def result_item(call: str, output: str | list[dict[str, Any]]) -> Item:
    """Build the item of a function's result, a text or text parts; `call` is the call's id."""
    return {
        "id": new_id("fco"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": call,
        "output": output,
    }


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Convert items to messages.

    The text and the calls of an answer are separate items, but become one message. Thoughts are
    not part of a history.
    """
    messages: list[Message] = []
    for item in items:
        if item["type"] == "reasoning":
            continue
        message = _message_of(item)
        before = messages[-1] if messages and messages[-1].role == "assistant" else None
        if before is not None and message.calls:
            messages[-1] = replace(before, calls=(*before.calls, *message.calls))
        elif before is not None and before.calls and message.role == "assistant":
            messages[-1] = replace(before, content=before.content + message.content)
        else:
            messages.append(message)
    return messages


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
    return "".join(part["text"] for part in parts)  # a part may end inside a word
