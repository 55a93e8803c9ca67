"""Messages of a conversation, and how a history is known again: by hashes, never by tokens.

A client sends its whole history with every turn. Templates and tokenizers would write it otherwise
than it was fed, so each beginning of it is hashed message by message, and the longest beginning
that was saved is where the turn starts. Knows nothing about tokens, owners or disks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
"""What reasoning models say first, and clients leave out of the history they send."""


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        role: "system", "user" or "assistant".
        content: its text.
        name: of who says it; None for most.
    """

    role: str
    content: str
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates take it."""
        message = {"role": self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}

    def canonical(self) -> str:
        """The same text for all that clients make of one message.

        Line ends are one character; of answers, thoughts are left out and the spaces around them.
        """
        content = self.content.replace("\r\n", "\n")
        if self.role == "assistant":
            content = THOUGHTS.sub("", content).strip()
        return json.dumps([self.role, content, self.name])


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
