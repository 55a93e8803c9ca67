"""Describe the turns of a conversation that have lost tokens, for clients and models.

This module knows nothing about HTTP or rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from weir.errors import in_words
from weir.serve.messages import DROPPED, Message
from weir.serve.sessions.records import TurnRecord
from weir.serve.sessions.store import SessionStore

MOST_TURNS = 8
"""The most turns that are described."""
LOOKED_AT = 24
"""The number of newest turns that are checked."""
MOST_MESSAGES = 4
"""The most messages of a turn that are described: the first ones and the answer."""
BEGINNING = 60
"""The number of characters of a message that are shown."""


def describe_forgotten(
    store: SessionStore, owner: str, node: str | None, held: Tensor | Sequence[int], read: int
) -> list[dict[str, Any]]:
    """Describe the newest turns, up to a given one, that have lost tokens, the newest first.

    Args:
        store: has the records of the turns.
        owner: the owner of the turns.
        node: the newest turn; None for none.
        held: the tokens of the stream that are still in the cache, in order.
        read: number of tokens of the stream that the row has read, which excludes the last token of
            an answer.
    """
    dropped = store.dropped_chains(owner)
    places = held.tolist() if isinstance(held, Tensor) else held
    found: list[dict[str, Any]] = []
    for _ in range(LOOKED_AT):
        record = None if node is None else store.find_turn(owner, node)
        if record is None or len(found) == MOST_TURNS:
            break
        if (lost := describe_turn(record, places, read, dropped)) is not None:
            found.append(lost)
        node = record.parent
    return found


def describe_turn(
    record: TurnRecord, held: Sequence[int], read: int, dropped: Collection[str]
) -> dict[str, Any] | None:
    """Describe a turn that has lost tokens that were read; None if it has lost none.

    Args:
        dropped: hashes of histories that end with a result whose text must not be shown.
    """
    start, end = record.seen - len(record.ids) // 4, min(record.seen, read)
    tokens = end - start
    still = bisect_left(held, end) - bisect_left(held, start)
    if still >= tokens:
        return None
    return {
        "id": f"resp_{record.node}",
        "start": start,
        "tokens": tokens,
        "forgotten": tokens - still,
        "messages": describe_messages(record.messages, dropped),
    }


def describe_messages(
    messages: Sequence[Message], dropped: Collection[str]
) -> list[dict[str, Any]]:
    """Describe messages by their roles, their beginnings, the functions that they call, and the ids
    of the calls whose results they are.
    """
    shown = [*enumerate(messages)]
    if len(shown) > MOST_MESSAGES:
        shown = [*shown[: MOST_MESSAGES - 1], shown[-1]]
    return [
        {
            "index": number,
            "role": message.role,
            "text": _beginning_of(_text_of(message, dropped)),
            **({} if message.result is None else {"call_id": message.result}),
            **({"calls": [call.name for call in message.calls[:8]]} if message.calls else {}),
        }
        for number, message in shown
    ]


def tell_forgotten(turns: Sequence[dict[str, Any]], tokens: int) -> str:
    """Write a note that tells a model what it has forgotten."""
    lines = [
        f"{in_words(tokens, 'token')} of the earlier conversation {'is' if tokens == 1 else 'are'} "
        "no longer in your memory. "
        "Do not guess what they said: ask, or use a tool."
    ]
    for turn in turns:
        for message in turn["messages"]:
            share = "all" if turn["forgotten"] == turn["tokens"] else "a part"
            call, role = message.get("call_id"), message["role"]
            what = role if call is None else f"the output of {call}"
            lines.append(f"- {share} of a turn with {what}: {message['text']}")
    return "\n".join(lines)


def _text_of(message: Message, dropped: Collection[str]) -> str:
    """Return the text of a message, unless it is a tool result that was dropped."""
    gone = message.where is not None and message.where.chain in dropped
    return DROPPED if gone else message.content


def _beginning_of(text: str) -> str:
    line = " ".join(text[: 4 * BEGINNING].split())
    shown = line if len(line) <= BEGINNING else f"{line[: BEGINNING - 3]}..."
    return shown.encode("utf-8", "replace").decode()
