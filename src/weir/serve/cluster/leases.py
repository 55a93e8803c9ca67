"""Lease table of all replicas: which one answers a session now, and which did last.

It keeps replicas out of each other's way and tells the router where a session's row is. No safety
depends on it: the clock may jump, the table may be lost and start empty, there may be two; the
`Ledger` refuses whatever only one replica may do. Knows nothing about Ray or sessions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

SECONDS = 10.0
"""A replica that is silent for so long loses what it answers."""
REMEMBERED = 1_000_000
"""Sessions whose last replica is remembered."""


class LeaseTable:
    """Leases in memory.

    Args:
        seconds: time after which a silent replica loses its leases.
        clock: seconds from any start; it may jump.
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
        self._heard: dict[str, float] = {}  # when a replica spoke last
        self._turns: dict[str, Counter[str]] = {}  # number under way by session, by replica
        self._last: dict[str, str] = {}  # replica by session, the least recently used first

    def begin(self, session: str, replica: str) -> float:
        """Lease a session for a turn.

        Returns:
            0 if it is leased; if another replica answers the session, seconds until the next try.
        """
        last = self._last.get(session, replica)
        if last != replica and self._turns[last][session]:
            left = self._seconds_left(last)
            if left > 0:
                return left
            self._forget(last)
        self._hear(replica)[session] += 1
        self._last.pop(session, None)
        self._last[session] = replica
        if len(self._last) > self._most:
            idle = (s for s, held_by in self._last.items() if not self._turns[held_by][s])
            if (oldest := next(idle, None)) is not None:
                del self._last[oldest]
        return 0.0

    def end(self, session: str, replica: str) -> None:
        """End a turn; the session stays with the replica until another one begins a turn of it."""
        turns = self._turns.get(replica, Counter())
        turns[session] -= 1
        if turns[session] <= 0:
            del turns[session]

    def beat(self, replica: str, sessions: Iterable[str]) -> None:
        """Record a replica's heartbeat and its turns under way; restores a lost table."""
        self._hear(replica)
        under_way = Counter(sessions)
        for session in under_way:
            if self._last.setdefault(session, replica) not in self._heard:
                self._last[session] = replica
        mine = {s: n for s, n in under_way.items() if self._last[s] == replica}
        self._turns[replica] = Counter(mine)

    def holder(self, session: str) -> str | None:
        """The replica that answered a session last, unless it is silent."""
        last = self._last.get(session)
        return last if last is not None and self._seconds_left(last) > 0 else None

    def _hear(self, replica: str) -> Counter[str]:
        """Record that a replica is alive, and return its turns."""
        self._heard[replica] = self._clock()
        return self._turns.setdefault(replica, Counter())

    def _seconds_left(self, replica: str) -> float:
        """Seconds until a silent replica loses its leases."""
        if replica not in self._heard:
            return 0.0
        now = self._clock()
        self._heard[replica] = min(self._heard[replica], now)  # the clock may have gone back
        return self._heard[replica] + self._seconds - now

    def _forget(self, replica: str) -> None:
        """Drop the leases of a replica that was silent for too long."""
        del self._heard[replica], self._turns[replica]
        self._last = {s: last for s, last in self._last.items() if last != replica}
