"""Who is at which conversation: one request at a time. Knows nothing else."""

from __future__ import annotations

import threading

from weir.errors import WeirError


class Locked(WeirError):
    """Somebody else is at the conversation."""


class Locks:
    """Who is at which conversation: one request at a time."""

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def take(self, owner: str, conversation: str) -> None:
        """A conversation is nobody else's until `give`.

        Raises:
            Locked: it is somebody else's.
        """
        with self._lock:
            if (owner, conversation) in self._held:
                raise Locked("another request is at this conversation; come again when it is done")
            self._held.add((owner, conversation))

    def give(self, owner: str, conversation: str) -> None:
        """It is anybody's again."""
        with self._lock:
            self._held.discard((owner, conversation))
