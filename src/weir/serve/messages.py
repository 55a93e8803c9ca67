"""Messages of a conversation, and how a history is known again: by hashes, never by tokens.

A client sends its whole history with every turn. Templates and tokenizers would write it otherwise
than it was fed, so each beginning of it is hashed message by message, and the longest beginning
that was saved is where the turn starts. Knows nothing about tokens, owners or disks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weir.errors import WeirError, quote

THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
"""What reasoning models say first, and clients leave out of the history they send."""


@dataclass(frozen=True)
class Call:
    """A call of a client's function.

    Attributes:
        id: by which its result is sent back.
        name: of the function.
        arguments: as JSON, if the model was not cut short.
    """

    id: str
    name: str
    arguments: str

    def known(self) -> Any:
        """The arguments as values; as they are where they are no JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        content: its text.
        name: of who says it, or of the function whose result it is; None for most.
        calls: of an assistant's.
        result: the id of the call whose result it is.
        place: which of the calls before it that is, from 0.
    """

    role: str
    content: str
    name: str | None = None
    calls: tuple[Call, ...] = ()
    result: str | None = None
    place: int | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.known()},
                }
                for call in self.calls
            ]
        if self.result is not None:
            message["tool_call_id"] = self.result
        return message

    def kept(self) -> list[Any]:
        """As JSON that `read` makes the same message of."""
        kept: list[Any] = [self.role, self.content, self.name]
        if not self.calls and self.result is None:
            return kept
        calls = [[call.id, call.name, call.arguments] for call in self.calls]
        return [*kept, calls, self.result, self.place]

    @classmethod
    def read(cls, kept: Sequence[Any]) -> Message:
        """A message from what `kept` gave.

        Raises:
            TypeError, ValueError: it is none.
        """
        role, content, name, *more = kept
        calls, result, place = more or ([], None, None)
        return cls(role, content, name, tuple(Call(*call) for call in calls), result, place)

    def canonical(self) -> str:
        """The same text for all that clients make of one message.

        Line ends are one character; of answers, thoughts are left out and the spaces around them.
        Of calls, names and arguments count, and neither how JSON writes them nor their ids: of a
        result it counts which of the calls before it is meant.
        """
        content = self.content.replace("\r\n", "\n")
        if self.role == "assistant":
            content = THOUGHTS.sub("", content).strip()
        said: list[Any] = [self.role, content, self.name]
        if self.calls:
            said.append([[call.name, call.known()] for call in self.calls])
        if self.result is not None:
            said.append(self.place)
        return json.dumps(said, sort_keys=True)


class NoCall(WeirError):
    """A result is of no call that was made before it, or of one that has its result.

    Attributes:
        number: which of the messages that is, from 0.
        behind: how many results come after it.
    """

    def __init__(self, number: int, behind: int, name: str, *, twice: bool) -> None:
        super().__init__(
            f"the call {quote(name)} has its result already: leave the second out"
            if twice
            else f"there is no call {quote(name)}: a result has the id of a call that the "
            "assistant made last before it"
        )
        self.number = number
        self.behind = behind


def placed(messages: Sequence[Message], before: Sequence[Message] = ()) -> list[Message]:
    """Messages whose results know which call they are of.

    Args:
        messages: as a client sent them.
        before: what was said right before.

    Raises:
        NoCall: a result is of no call that was made last before it, or of one that has its result.
    """
    known = []
    for found in _known(messages, before):
        if isinstance(found, NoCall):
            raise found
        known.append(found)
    return known


def strays(messages: Sequence[Message]) -> list[NoCall]:
    """What `placed` would raise for each of the results that are of no call, in their order."""
    return [found for found in _known(messages) if isinstance(found, NoCall)]


def _known(
    messages: Sequence[Message], before: Sequence[Message] = ()
) -> Iterator[Message | NoCall]:
    waiting = _Waiting()
    for message in before:
        waiting.place(message)
    for number, message in enumerate(messages):
        place = waiting.place(message)
        if message.result is None:
            yield message
        elif place is None:
            behind = sum(each.result is not None for each in messages[number + 1 :])
            twice = message.result in [call.id for call in waiting.calls]
            yield NoCall(number, behind, message.result, twice=twice)
        else:
            yield replace(message, name=waiting.calls[place].name, place=place)


class _Waiting:
    """The calls that were made last, and which of them have no result yet."""

    def __init__(self) -> None:
        self.calls: Sequence[Call] = ()
        self._open: list[int] = []

    def place(self, message: Message) -> int | None:
        """Which of the calls a message is the result of; each has one."""
        if message.calls:
            self.calls, self._open = message.calls, list(range(len(message.calls)))
        for place in self._open:
            if self.calls[place].id == message.result:
                self._open.remove(place)
                return place
        return None


def chain(root: str, messages: Sequence[Message]) -> list[str]:
    """The hash of each beginning of a conversation.

    Args:
        root: of what comes before: the hash of an earlier beginning, or what the model is and how
            it is served.
        messages: what follows.

    Returns:
        One for each message, in hexadecimal: of the beginning that ends with it.
    """
    hashes = []
    for message in messages:
        root = hashlib.sha256(f"{root}\n{message.canonical()}".encode()).hexdigest()
        hashes.append(root)
    return hashes


def call_id(node: str, number: int) -> str:
    """The id of a call.

    Args:
        node: the turn whose answer it is in; nobody can tell that from the id.
        number: which of the answer's calls it is, from 0.
    """
    return f"call_{hashlib.sha256(f'{node} {number}'.encode()).hexdigest()[:24]}"
