"""Who may end a turn of a session, where several servers share their sessions: a protocol.

A server alone needs none. Knows nothing about how others are kept out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from weir.errors import WeirError
from weir.serve.sessions.records import TurnRecord


class AnsweredElsewhere(WeirError):
    """Another server is answering this session.

    Args:
        seconds: until it is worth asking again.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("another replica is answering this session")
        self.seconds = seconds


class LeaseLost(WeirError):
    """Another server has the session now: the turn never happened."""


class SessionLease(Protocol):
    """A session, for one turn that is to end here."""

    def add(self, record: TurnRecord) -> None:
        """Keep the record of a node, as `SessionStore.add`.

        Raises:
            LeaseLost: the session went to another server meanwhile.
            WeirError: it cannot be kept.
        """

    def release(self) -> None:
        """The turn is over, however it ended."""


AcquireLease = Callable[[str, str], SessionLease]
"""Takes hold of a session, by owner and name; raises `AnsweredElsewhere`."""


class ConversationLocked(WeirError):
    """Somebody else is at the conversation."""


class ConversationLocks:
    """Who is at which conversation: one request at a time."""

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def acquire(self, owner: str, conversation: str) -> None:
        """A conversation is nobody else's until `give`.

        Raises:
            ConversationLocked: it is somebody else's.
        """
        with self._lock:
            if (owner, conversation) in self._held:
                raise ConversationLocked(
                    "another request is at this conversation; come again when it is done"
                )
            self._held.add((owner, conversation))

    def release(self, owner: str, conversation: str) -> None:
        """It is anybody's again."""
        with self._lock:
            self._held.discard((owner, conversation))
