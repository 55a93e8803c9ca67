"""Messages of a conversation, and the hashes by which a saved history is found again.

A client sends its whole history with every turn. Rendering and tokenizing the history again would
give other tokens than those that were fed. So every prefix is hashed, message by message, and the
turn starts at the longest prefix that was saved.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from weir.errors import WeirError, quote

THINKING = re.compile(r"\A\s*<think>.*?(</think>\s*|\Z)", re.DOTALL)
"""The thoughts before an answer, which clients leave out of the history that they send.

In an answer that was cut off, the thoughts may have no end.
"""
PART = 65_536
"""Characters of a content that are encoded at once."""
DROPPED = "[This output was dropped.]"
"""Replaces the text of a result that was dropped, in a prompt whose history is read again, and in
descriptions of messages.
"""
_plain = json.JSONEncoder(ensure_ascii=False).encode
_encode = json.JSONEncoder(sort_keys=True).encode


@dataclass(frozen=True)
class Call:
    """A call of one of the client's functions. `arguments` are JSON, unless they were cut off."""

    id: str
    name: str
    arguments: str

    def for_chat(self, arguments: Any) -> dict[str, Any]:
        """Return the call in the format of chats, with its arguments as text or as values."""
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}

    def parse_arguments(self) -> Any:
        """Return the arguments as values.

        Returns them as text if they are not JSON, or if they have lone surrogates, which no text
        can have.
        """
        try:
            found = json.loads(self.arguments)
            if "\\u" in self.arguments:
                _plain(found).encode()
        except (ValueError, RecursionError):
            return self.arguments
        return found


class ResultPlace(NamedTuple):
    """The place of a tool result's tokens in a stream: the first, and the one after the last.

    `chain` is the hash of all messages up to the result. It identifies the result wherever its
    history is read.
    """

    start: int
    stop: int
    chain: str


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        name: the name of the author, or of the function whose result the message is; None for most.
        calls: the tool calls in it.
        result: the id of the call whose result the message is; None if it is not a result.
        place: for a result, the index of its call among the latest calls before it.
        where: the place of its tokens, if it is a result that was read; None if unknown.
    """

    role: str
    content: str
    name: str | None = None
    calls: tuple[Call, ...] = ()
    result: str | None = None
    place: int | None = None
    where: ResultPlace | None = field(default=None, compare=False)

    def for_template(self) -> dict[str, Any]:
        """Return the message in the format of chat templates."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.calls:
            message["tool_calls"] = [call.for_chat(call.parse_arguments()) for call in self.calls]
        if self.result is not None:
            message["tool_call_id"] = self.result
        return message

    def to_json(self) -> list[Any]:
        """Return the message as JSON values, for `from_json`."""
        fields: list[Any] = [self.role, self.content, self.name]
        if not self.calls and self.result is None:
            return fields
        calls = [[call.id, call.name, call.arguments] for call in self.calls]
        where = [] if self.where is None else [list(self.where)]
        return [*fields, calls, self.result, self.place, *where]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Message:
        """Return the message from the values of `to_json`. Raises TypeError or ValueError for
        others.
        """
        role, content, name, *more = fields
        calls, result, place, *where = more or ([], None, None)
        found = ResultPlace(*where[0]) if where else None
        calls = tuple(Call(*call) for call in calls)
        return cls(role, content, name, calls, result, place, found)

    def canonical(self) -> str:
        """Return a text that is the same for all ways in which clients send this message back.

        Line ends are one character, and outer white space is left out. An assistant's message is
        also without thoughts and name. For calls, names and arguments count, but not ids, the
        formatting of the JSON or the notation of numbers. For a result, the place of its call
        counts.
        """
        return "".join(self.canonical_parts())

    def canonical_parts(self) -> Iterator[str]:
        """Yield the parts of `canonical`.

        A long message has many parts, so that its JSON is never in memory as a whole. The JSON can
        have six times as many characters as the message.
        """
        content, name = self.content.replace("\r\n", "\n"), self.name
        if self.role == "assistant":
            content, name = THINKING.sub("", content), None
        content = content.strip()
        fields: list[Any] = [self.role, "", name]
        if self.calls:
            fields.append([[call.name, same_value(call.parse_arguments())] for call in self.calls])
        if self.result is not None:
            fields.append(self.place)
        text = _encode(fields)
        inside = len(f'[{_encode(self.role)}, "')
        yield text[:inside]
        for at in range(0, len(content), PART):
            yield _encode(content[at : at + PART])[1:-1]
        yield text[inside:]


def same_value(value: Any) -> Any:
    """Return a JSON value in which equal numbers are the same: 1.0 becomes 1, and 1e2 becomes
    100.
    """
    if isinstance(value, dict):
        return {name: same_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [same_value(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class StrayResult(WeirError):
    """A tool result whose call was not made before it, or already has a result.

    Attributes:
        behind: number of results that come after it.
        number: the index of its message.
    """

    def __init__(self, number: int, behind: int, call: str, *, twice: bool) -> None:
        super().__init__(
            f"the call {quote(call)} already has a result. Leave out the second one"
            if twice
            else (
                f"there is no call {quote(call)}. A result must have the id of a call in the "
                "latest message with calls before it"
            )
        )
        self.number = number
        self.behind = behind


def link_results(messages: Sequence[Message], before: Sequence[Message] = ()) -> list[Message]:
    """Fill in `name` and `place` of tool results. Raises StrayResult for one without an open call.

    Args:
        before: the messages right before these.
    """
    linked = []
    for message in _link(messages, before):
        if isinstance(message, StrayResult):
            raise message
        linked.append(message)
    return linked


def find_stray_results(messages: Sequence[Message]) -> list[StrayResult]:
    """Return all results that `link_results` would refuse, in order."""
    return [found for found in _link(messages) if isinstance(found, StrayResult)]


def _link(
    messages: Sequence[Message], before: Sequence[Message] = ()
) -> Iterator[Message | StrayResult]:
    made: Sequence[Call] = ()  # the latest calls
    waiting: list[int] = []  # the places of calls without a result
    for number, message in enumerate([*before, *messages], -len(before)):
        if message.calls:
            made, waiting = message.calls, list(range(len(message.calls)))
        place = next((at for at in waiting if made[at].id == message.result), None)
        if place is not None:
            waiting.remove(place)
        if number < 0:
            continue
        if message.result is None:
            yield message
        elif place is None:
            behind = sum(later.result is not None for later in messages[number + 1 :])
            twice = message.result in [call.id for call in made]
            yield StrayResult(number, behind, message.result, twice=twice)
        else:
            yield replace(message, name=made[place].name, place=place)


def hash_prefixes(root: str, messages: Sequence[Message]) -> list[str]:
    """Return, for each message, the hash of the history up to and including it, in hexadecimal.

    Args:
        root: hash of what comes before the messages: the earlier part of the history, or the model
            and its settings.
    """
    hashes = []
    for message in messages:
        digest = hashlib.sha256(f"{root}\n".encode())
        for part in message.canonical_parts():
            digest.update(part.encode())
        root = digest.hexdigest()
        hashes.append(root)
    return hashes


def call_id(node: str, number: int) -> str:
    """Return the id of a call. The id of its turn cannot be computed from it."""
    return f"call_{hashlib.sha256(f'{node} {number}'.encode()).hexdigest()[:24]}"
