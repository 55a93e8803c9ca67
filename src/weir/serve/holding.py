"""Who may end a turn of a session, where several servers share their sessions: a protocol.

A server alone needs none. Knows nothing about how others are kept out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weir.errors import WeirError
from weir.serve.records import Record


class Elsewhere(WeirError):
    """Another server is answering this session.

    Args:
        seconds: until it is worth asking again.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__("another replica is answering this session")
        self.seconds = seconds


class Lost(WeirError):
    """Another server has the session now: the turn never happened."""


class Hold(Protocol):
    """A session, for one turn that is to end here."""

    def add(self, record: Record) -> None:
        """Keep the record of a node, as `Store.add`.

        Raises:
            Lost: the session went to another server meanwhile.
            WeirError: it cannot be kept.
        """

    def release(self) -> None:
        """The turn is over, however it ended."""


Holder = Callable[[str, str], Hold]
"""Takes hold of a session, by owner and name; raises `Elsewhere`."""
