"""Who answers a session now: a table of leases, one for all replicas.

It keeps replicas out of each other's way and tells a router where a session's row is. It keeps
nothing safe: its clock may jump, it may be lost and begin anew, there may be two of it; what nobody
may do twice is refused by the `Ledger`. Knows nothing about Ray, disks or what a session is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

SECONDS = 10.0
"""Without a word from a replica for so long, others may have what it answers."""
REMEMBERED = 1_000_000
"""SessionManager whose last replica is remembered."""


class Leases(Protocol):
    """What a replica asks of the table."""

    def begin(self, session: str, replica: str) -> float:
        """A turn of a session is to begin on a replica.

        Returns:
            0 if it may; otherwise seconds until it is worth asking again.
        """

    def end(self, session: str, replica: str) -> None:
        """It is over."""

    def beat(self, replica: str, sessions: Iterable[str]) -> None:
        """A replica lives, and answers these."""


@dataclass
class _Replica:
    """A replica as the table knows it.

    Attributes:
        heard: when it spoke last.
        turns: under way, by session.
    """

    heard: float
    turns: Counter[str] = field(default_factory=Counter)


class LeaseTable:
    """Leases in memory.

    Args:
        seconds: after which a silent replica has lost what it answers.
        clock: seconds from anywhere on; it may jump.
        most: sessions whose last replica is remembered.
    """

    def __init__(
        self,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        most: int = REMEMBERED,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._most = most
        self._replicas: dict[str, _Replica] = {}
        self._last: dict[str, str] = {}  # replica by session, the one used longest ago first

    def begin(self, session: str, replica: str) -> float:
        """A turn of a session is to begin on a replica.

        Returns:
            0 if it may; otherwise seconds until it is worth asking again: another replica answers
            the session, and was heard of.
        """
        now = self._clock()
        last = self._last.get(session, replica)
        if last != replica and self._replicas[last].turns[session]:
            left = self._left(last, now)
            if left > 0:
                return left
            self._forget(last)
        mine = self._replicas.setdefault(replica, _Replica(now))
        mine.heard = now
        mine.turns[session] += 1
        self._last.pop(session, None)
        self._last[session] = replica
        if len(self._last) > self._most:
            self._shorten()
        return 0.0

    def end(self, session: str, replica: str) -> None:
        """A turn is over; the session stays where it is until somebody else begins one."""
        found = self._replicas.get(replica)
        if found is None:
            return
        if found.turns[session] > 1:
            found.turns[session] -= 1
        else:
            del found.turns[session]

    def beat(self, replica: str, sessions: Iterable[str]) -> None:
        """A replica lives, and answers these: so a table that was lost knows them again."""
        now = self._clock()
        found = self._replicas.setdefault(replica, _Replica(now))
        found.heard = now
        under_way = Counter(sessions)
        for session in under_way:
            last = self._last.setdefault(session, replica)
            if last not in self._replicas:
                self._last[session] = replica
        found.turns = Counter({s: n for s, n in under_way.items() if self._last[s] == replica})

    def holder(self, session: str) -> str | None:
        """The replica that answered a session last, if it was heard of."""
        last = self._last.get(session)
        if last is None or self._left(last, self._clock()) <= 0:
            return None
        return last

    def _left(self, replica: str, now: float) -> float:
        """Seconds that a replica still has what it answers."""
        found = self._replicas.get(replica)
        if found is None:
            return 0.0
        found.heard = min(found.heard, now)  # a clock that went back gives nobody more than this
        return found.heard + self._seconds - now

    def _forget(self, replica: str) -> None:
        """A replica was silent for too long: nothing is its any more."""
        del self._replicas[replica]
        for session in [s for s, last in self._last.items() if last == replica]:
            del self._last[session]

    def _shorten(self) -> None:
        """Forget where the session was that was used longest ago and is not answered now."""
        for session, last in self._last.items():
            if not self._replicas[last].turns[session]:
                del self._last[session]
                return
