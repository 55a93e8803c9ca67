"""Leases: one request at a time per conversation, and one server at a time per session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from weir.errors import WeirError


class AnsweredElsewhere(WeirError):
    """Another server is answering this session.

    Args:
        seconds: time until the next try.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("another replica is answering this session")
        self.seconds = seconds


class LeaseLost(WeirError):
    """Another server has taken over the session, so this turn is discarded."""


class SessionLease(Protocol):
    """The right to answer a session, for one turn.

    Attributes:
        epoch: epoch of the claim; the store refuses records of older epochs (`TurnRecord.epoch`).
    """

    epoch: int

    def release(self) -> None:
        """End the lease, however the turn ended."""


AcquireLease = Callable[[str, str], SessionLease]
"""Leases a session, by owner and name; raises `AnsweredElsewhere`."""


class ConversationLocked(WeirError):
    """Another request is using the conversation."""


class ConversationLocks:
    """Lets one request at a time use a conversation."""

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def acquire(self, owner: str, conversation: str) -> None:
        """Keep other requests out until `release`.

        Raises:
            ConversationLocked: another request is using it.
        """
        with self._lock:
            if (owner, conversation) in self._held:
                raise ConversationLocked(
                    "another request is at this conversation; come again when it is done"
                )
            self._held.add((owner, conversation))

    def release(self, owner: str, conversation: str) -> None:
        """Let other requests use it again."""
        with self._lock:
            self._held.discard((owner, conversation))
