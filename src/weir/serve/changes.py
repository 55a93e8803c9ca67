"""Continue conversations whose system messages have changed, with a note about the change.

Agents put the time, the folder's files or the state of git in the system message. Each change makes
a different history, which would otherwise be read again from its beginning.
"""

from __future__ import annotations

import difflib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from weir.serve.messages import Message, hash_prefixes

MOST_NOTED = 2000
"""The most characters of a note. After a larger change, the history is read again."""
MOST_LINES = 5000
"""The most lines of system messages that are compared."""
AROUND = 40
"""A note about a change within a long text repeats about this many characters before the change,
and as many after it.
"""
MOST_KEPT = 4096
"""Number of turns that are remembered, of all owners together."""


@dataclass(frozen=True)
class Outline:
    """A history without its first system messages.

    Attributes:
        systems: the texts of the system messages before the first answer.
        hashes: the hash of the first n messages of the history, by n, without those system
            messages. Histories that differ only in the texts of those system messages have the same
            hashes.
    """

    systems: tuple[str, ...]
    hashes: tuple[str, ...]

    @classmethod
    def of(cls, root: str, messages: Sequence[Message]) -> Outline:
        """Return the outline of a history. `root` is as for `hash_prefixes`."""
        roles = [message.role for message in messages]
        start = roles.index("assistant") if "assistant" in roles else len(roles)
        first = [n for n in range(start) if roles[n] == "system"]
        number = hashlib.sha256(f"{root}\nwithout {first}".encode()).hexdigest()
        others = [message for n, message in enumerate(messages) if n not in first]
        hashed = iter(hash_prefixes(number, others))
        hashes, last = [number], number
        for n in range(len(messages)):
            last = last if n in first else next(hashed)
            hashes.append(last)
        return cls(tuple(messages[n].content for n in first), tuple(hashes))


class ChangedPrefixes:
    """Remembers the newest turns by their outlines. Can be called from any thread."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[str, str], tuple[str, tuple[str, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, owner: str, outline: str, node: str, systems: tuple[str, ...]) -> None:
        """Remember the turn at the end of a history, and the texts of its first system messages.

        `outline` is the last hash of the history's `Outline`.
        """
        with self._lock:
            self._kept[owner, outline] = node, systems
            self._kept.move_to_end((owner, outline))
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def find(self, owner: str, outline: str) -> tuple[str, tuple[str, ...]] | None:
        """Return the newest turn whose outline ends with this hash, and its system messages."""
        with self._lock:
            return self._kept.get((owner, outline))


def describe_change(old: Sequence[str], new: Sequence[str]) -> str | None:
    """Write the note that tells a model how its system messages have changed.

    Returns None if the note would be too long, or if there are too many lines to compare.
    """
    before = [line for text in old for line in text.splitlines()]
    after = [line for text in new for line in text.splitlines()]
    if len(before) + len(after) > MOST_LINES:
        return None
    was, now = [], []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind != "equal":
            one, other = _narrow("\n".join(before[start:end]), "\n".join(after[new_start:new_end]))
            was.append(one)
            now.append(other)
    said, says = ("\n".join(text for text in texts if text) for texts in (was, now))
    parts = ["The system message at the beginning has changed."]
    if said:
        parts.append(f"This no longer applies:\n{said}")
    if says:
        parts.append(f"This applies now:\n{says}")
    note = "\n".join(parts)
    return note if len(note) <= MOST_NOTED else None


def _narrow(old: str, new: str) -> tuple[str, str]:
    """Cut the common beginning and end off two texts, except for a few words."""
    shorter = min(len(old), len(new))
    start = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    end = next((n for n in range(shorter - start) if old[-1 - n] != new[-1 - n]), shorter - start)
    first = 0 if start <= AROUND else old.rfind(" ", 0, start - AROUND) + 1

    def cut(text: str) -> str:
        last = len(text) if end <= AROUND else text.find(" ", len(text) - end + AROUND)
        last = len(text) if last < 0 else last
        return text[first:last]

    return cut(old), cut(new)
