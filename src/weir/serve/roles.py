"""System messages in places where a chat template does not take them.

Clients send several system messages, or one in the middle of a conversation. Many templates take
one only, at the beginning; some take none. What a template takes is found by rendering small
conversations. Knows nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weir.errors import WeirError
from weir.serve.messages import Message

GAP = "\n\n"
"""Put between the texts of messages that become one."""
_PROBE = "qzxv"
_OTHER = "vxzq"

Render = Callable[[list[dict[str, Any]]], str]
"""Renders a conversation as text; WeirError if the template refuses it."""


@dataclass(frozen=True)
class SystemPlaces:
    """Where a chat template takes system messages.

    Attributes:
        first: whether a conversation may begin with one.
        several: whether it may begin with more than one.
        later: whether one may come after other messages.
    """

    first: bool = True
    several: bool = True
    later: bool = True

    @classmethod
    def of(cls, render: Render) -> SystemPlaces:
        """Find out where a template takes system messages, and does not leave them out."""

        def takes(*roles: str) -> bool:
            texts = [_PROBE if role == "system" else "x" for role in roles]
            if roles.count("system") > 1:
                texts[0] = _OTHER
            pairs = zip(roles, texts, strict=True)
            try:
                text = render([{"role": role, "content": text} for role, text in pairs])
            except WeirError:
                return False
            return all(text.count(word) == texts.count(word) for word in (_PROBE, _OTHER))

        first = takes("system", "user")
        return cls(
            first,
            first and takes("system", "system", "user"),
            takes("user", "assistant", "system", "user"),
        )

    def place(self, messages: Sequence[Message], *, at_start: bool) -> list[Message]:
        """Bring system messages to where the template takes them.

        System messages before the first answer come first: agents send one after the first user
        message that is the same in all their conversations, and at the beginning it is read once.
        Those at the beginning become one. A later one that the template does not take is appended
        to the user message directly before it. If there is none, it is put in front of the user
        message directly after it. If there is none either, it becomes a user message.

        Args:
            at_start: whether the conversation begins with these messages.
        """
        if at_start and self.first:
            messages = _with_system_first(messages)
        if self.first and self.several and self.later:
            return list(messages)
        placed: list[Message] = []
        began = not at_start
        waiting: str | None = None  # a text for the next user's message
        for message in messages:
            began = began or message.role != "system"
            if message.role == "system" and not self._takes(placed, began=began):
                before = placed[-1] if placed else None
                if not began and self.first:
                    placed[-1] = _joined(placed[-1], message.content)
                elif waiting is None and before is not None and before.role == "user":
                    placed[-1] = _joined(before, message.content)
                else:
                    waiting = (waiting + GAP if waiting else "") + message.content
                continue
            if waiting is not None:
                if message.role == "user":
                    message = replace(message, content=waiting + GAP + message.content)
                else:
                    placed.append(Message("user", waiting))
                waiting = None
            placed.append(message)
        if waiting is not None:
            placed.append(Message("user", waiting))
        return placed

    def _takes(self, placed: list[Message], *, began: bool) -> bool:
        """Whether a system message may come next."""
        if began:
            return self.later
        return self.first and (self.several or not placed)


def _with_system_first(messages: Sequence[Message]) -> list[Message]:
    """Move the system messages before the first answer to the beginning."""
    roles = [message.role for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    start = sorted(messages[:end], key=lambda message: message.role != "system")
    return [*start, *messages[end:]]


def _joined(message: Message, text: str) -> Message:
    return replace(message, content=message.content + GAP + text)
