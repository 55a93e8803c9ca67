"""What the engine says of a request's turns, on its way to who waits for it in an event loop.

The engine never waits for a client: a mailbox holds so many pieces and no more, and a client who
does not fetch them is cut off. Knows nothing about tokens, text or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from weir.serve.choosing import Choice


@dataclass(frozen=True)
class Standing:
    """Where a stream has come to.

    Attributes:
        seen: tokens so far, the last of the answer too.
        held: slots in use in the layer that uses most, tokens that wait for a fold among them.
        bytes: of the row; they never change.
        folds: so far.
        pinned: tokens of its beginning that stay for ever, of
        beginning: so many that it has.
    """

    seen: int
    held: int
    bytes: int
    folds: int
    pinned: int
    beginning: int


@dataclass(frozen=True)
class Piece:
    """A token of an answer.

    Attributes:
        answer: which of the answers, from 0.
        text: what it adds; often nothing.
        choice: the token.
        at: when it was chosen, by `time.perf_counter`.
    """

    answer: int
    text: str
    choice: Choice
    at: float


@dataclass(frozen=True)
class End:
    """An answer is over and saved.

    Attributes:
        answer: which, from 0.
        text: what was held back of it until now.
        reason: "stop" or "length".
        tokens: that it has, an end token among them.
        standing: of its stream.
    """

    answer: int
    text: str
    reason: str
    tokens: int
    standing: Standing


@dataclass(frozen=True)
class Failure:
    """An answer never happened.

    Attributes:
        answer: which, from 0.
        error: why.
    """

    answer: int
    error: Exception


Event = Piece | End | Failure


class Mailbox:
    """Events of one request, posted from any thread and taken in one event loop.

    Args:
        loop: where they are taken.
        most: pieces that may wait.

    Attributes:
        overrun: set where more came than may wait; then pieces are lost.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self.overrun = asyncio.Event()
        self._loop = loop
        self._most = most
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._full = False
        self._some = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether more came than may wait."""
        return self._full

    def post(self, event: Event) -> None:
        """Put an event in; a piece is lost where too many wait."""
        with self._lock:
            first = not self._events
            if isinstance(event, Piece) and len(self._events) >= self._most:
                first, self._full = not self._full, True
                wake = self.overrun.set
            else:
                self._events.append(event)
                wake = self._some.set
        if first:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                self._loop.call_soon_threadsafe(wake)

    async def take(self) -> Sequence[Event]:
        """All events that are there, once there are any."""
        while True:
            with self._lock:
                # Also where there are none: events that were taken before their wake came leave it
                # behind, and who waits for what has happened already never lets the loop go on.
                self._some.clear()
                if self._events:
                    events, self._events = self._events, []
                    return events
            await self._some.wait()
