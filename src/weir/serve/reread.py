"""Find out why a history is read again although a part of it was answered before.

The history is compared with the latest conversations of its owner.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from weir.errors import in_words
from weir.serve.messages import Message
from weir.serve.sessions.records import TurnRecord, find_path
from weir.serve.sessions.store import SessionStore

COMPARED = 8
"""Number of an owner's latest sessions that a history is compared with."""
EXCERPT = 40
"""Number of characters of two texts that are shown where they differ."""


@dataclass(frozen=True)
class Reread:
    """The part of a history that is read again, and the reason.

    Attributes:
        start: the index of the first message that is read again.
        messages: number of messages that are read again, up to the last answer.
        why: "changed" (a message differs from the one that was answered), "tools" (the same
            messages with other tools), "template" (the chat template cannot continue a
            conversation), or "unknown" (no conversation that goes on like this is kept).
        detail: the difference, in words.
    """

    start: int
    messages: int
    why: str
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Return the values as clients see them."""
        return {
            "from_message": self.start,
            "messages": self.messages,
            "why": self.why,
            "detail": self.detail,
        }


def find_nearest(
    store: SessionStore, owner: str, messages: Sequence[Message], session: str | None
) -> list[Message]:
    """Find an owner's conversation that is most like a history; empty if there is none.

    Args:
        session: the session that the client has named.
    """
    best, nearest = 0, list[Message]()
    for candidate in _conversations(store, owner, session):
        same = _count_same(candidate, messages)
        # A conversation with only one different message is closer than one that only begins in the
        # same way.
        near = same + _count_same(candidate[same + 1 :], messages[same + 1 :])
        if near > best:
            best, nearest = near, candidate
    return nearest


def same_results(nearest: Sequence[Message], messages: Sequence[Message]) -> dict[int, str]:
    """Find the tool results of a history that were already read in a conversation.

    Returns the hash of the conversation up to each of these results, by the index of the result in
    `messages`.

    Results are the same if all messages up to them are the same, apart from system messages.
    """
    old = [message for message in nearest if message.role != "system"]
    new = [(at, message) for at, message in enumerate(messages) if message.role != "system"]
    found: dict[int, str] = {}
    for (at, message), before in zip(new, old, strict=False):
        if message.canonical() != before.canonical():
            break
        if before.where is not None:
            found[at] = before.where.chain
    return found


def explain_reread(
    nearest: Sequence[Message],
    messages: Sequence[Message],
    known: int,
    answered: int,
    dropped: Collection[str],
    *,
    refused: bool,
) -> Reread:
    """Find out why messages are read again.

    Args:
        nearest: the conversation that is most like them.
        known: how many messages are not read again.
        answered: how many messages there are up to the last answer.
        dropped: hashes of histories that end with a result whose text must not be shown.
        refused: whether the template could not continue a turn that was found.
    """
    count = answered - known
    if refused:
        detail = "the chat template cannot render a turn without the turns before it"
        return Reread(known, count, "template", detail)
    at = _count_same(nearest, messages)
    if not nearest:
        return Reread(known, count, "unknown", "no conversation like this is kept for this key")
    if known >= at >= len(nearest):
        detail = f"no conversation of this key goes on with messages[{at}] ({messages[at].role})"
        return Reread(known, count, "unknown", detail)
    if at >= min(len(nearest), answered):
        detail = "the same messages were answered with other tools"
        if at < answered:
            detail = (
                f"the messages before messages[{at}] were answered with other tools, and "
                f"messages[{at}] is new"
            )
        return Reread(known, count, "tools", detail)
    return Reread(known, count, "changed", _difference(at, nearest[at], messages[at], dropped))


def _conversations(store: SessionStore, owner: str, session: str | None) -> list[list[Message]]:
    """Return the latest conversations of an owner, with that of the named session first."""
    latest = [one.id for one in reversed(store.list_sessions(owner))]
    names = dict.fromkeys([*([] if session is None else [session]), *latest])
    found = []
    for name in islice(names, COMPARED):
        turns = {turn.node: turn for turn in store.list_turns(owner, name)}
        if turns:
            found.append(_messages_of(turns))
    return found


def _messages_of(turns: dict[str, TurnRecord]) -> list[Message]:
    """Return the messages up to the newest of some turns."""
    newest = next(reversed(turns))
    parents = {node: turn.parent for node, turn in turns.items()}
    return [m for node in find_path(newest, parents) for m in turns[node].messages]


def _count_same(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Return how many first messages two conversations have in common."""
    pairs = zip(one, other, strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a.canonical() != b.canonical()),
        min(len(one), len(other)),
    )


def _difference(at: int, old: Message, new: Message, dropped: Collection[str]) -> str:
    """Say in which way a message differs."""
    place = f"messages[{at}] ({new.role})"
    if old.role != new.role:
        return f"{place} had the role {old.role} before"
    if old.content != new.content:
        pairs = enumerate(zip(old.content, new.content, strict=False))
        shorter = min(len(old.content), len(new.content))
        first = next((n for n, (a, b) in pairs if a != b), shorter)
        if old.where is not None and old.where.chain in dropped:
            return f"{place} differs from the dropped output, from character {first} on"
        was, now = (repr(text[first : first + EXCERPT]) for text in (old.content, new.content))
        return f"{place} differs from character {first} on: it was {was} and is {now}"
    if len(old.calls) != len(new.calls):
        return f"{place} has {in_words(len(new.calls), 'call')}, and had {len(old.calls)} before"
    for n, (a, b) in enumerate(zip(old.calls, new.calls, strict=True)):
        if a.name != b.name:
            return f"call {n} of {place} is to {b.name!r}, and was to {a.name!r} before"
        if a.arguments != b.arguments:
            return f"the arguments of call {n} of {place} differ"
    return f"{place} differs in its name or in the call that it answers"
