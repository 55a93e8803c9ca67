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

from weir.serve.engine.sampler import SampledToken


@dataclass(frozen=True)
class StreamStats:
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
class TokenEvent:
    """A token of an answer.

    Attributes:
        answer: which of the answers, from 0.
        text: what it adds; often nothing.
        choice: the token.
        at: when it was chosen, by `time.perf_counter`.
    """

    answer: int
    text: str
    choice: SampledToken
    at: float


@dataclass(frozen=True)
class FinishEvent:
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
    standing: StreamStats


@dataclass(frozen=True)
class FailureEvent:
    """An answer never happened.

    Attributes:
        answer: which, from 0.
        error: why.
    """

    answer: int
    error: Exception


Event = TokenEvent | FinishEvent | FailureEvent


class OutputQueue:
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
        """Put an event in, and wake who waits for one; a piece is lost where too many wait."""
        if self.put(event):
            _wake(self._loop, [self])

    def put(self, event: Event) -> bool:
        """Put an event in; a piece is lost where too many wait.

        Returns:
            Whether somebody is to be woken for it (`Notifier.add`).
        """
        with self._lock:
            if isinstance(event, TokenEvent) and len(self._events) >= self._most:
                first, self._full = not self._full, True
            else:
                first = not self._events
                self._events.append(event)
        return first

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

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where events are taken."""
        return self._loop

    def awake(self) -> None:
        """Something was put in; called in the loop."""
        self._some.set()
        if self._full:
            self.overrun.set()


class Notifier:
    """Wakes those who wait at many mailboxes together.

    A step of an engine has an event for each of its rows, and to wake a loop takes as long as to
    put ten in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[OutputQueue] = []

    def add(self, mailbox: OutputQueue) -> None:
        """Somebody is to be woken at this mailbox, when it rings."""
        with self._lock:
            self._waiting.append(mailbox)

    def ring(self) -> None:
        """Wake them."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for loop in {mailbox.loop for mailbox in waiting}:
            _wake(loop, [mailbox for mailbox in waiting if mailbox.loop is loop])


def _wake(loop: asyncio.AbstractEventLoop, mailboxes: Sequence[OutputQueue]) -> None:
    def awake() -> None:
        for mailbox in mailboxes:
            mailbox.awake()

    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
        loop.call_soon_threadsafe(awake)
