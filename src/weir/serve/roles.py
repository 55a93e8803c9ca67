"""Move system messages to places where a chat template accepts them.

Clients send several system messages, or one in the middle of a conversation. Many templates accept
only one, at the beginning, and some accept none. The accepted places are found by rendering small
conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weir.errors import WeirError
from weir.serve.messages import Message

GAP = "\n\n"
"""Separator between the texts of messages that are joined."""
_PROBE = "qzxv"
_OTHER = "vxzq"

Render = Callable[[list[dict[str, Any]]], str]
"""Renders a conversation as text. Raises WeirError if the template refuses it."""


@dataclass(frozen=True)
class SystemPlaces:
    """The places where a chat template accepts system messages.

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
        """Find out where a template accepts system messages and does not leave them out."""

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
        """Move system messages to places that the template accepts.

        If the conversation begins with these messages, and the template accepts a system message at
        the beginning, the system messages before the first answer are moved there. Some agents send
        a system message after the first user message, with the same text in all conversations. At
        the beginning, it is part of what the conversations share, and is read only once.

        If the template accepts only one system message at the beginning, those at the beginning are
        joined. Any other system message that the template does not accept is appended to the user
        message directly before it. If there is no such user message, it is put before the text of
        the user message directly after it. If there is none either, it becomes a user message.

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
        """Return whether a system message may come next. `began` says whether a message that is not
        a system message has come before.
        """
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
