"""Ctrl-C as a question and SIGTERM as an end that still says what was done.

A command that is told to end by a scheduler, a container or `kill` reports what it has, as after
Ctrl-C, and leaves with exit code 143. Imports next to nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM
"""Exit codes, as shells have them."""


class Terminated(SystemExit):
    """SIGTERM came; no `except Exception` keeps it from ending the process."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in this block, so that what is open is closed and told of."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupt:
    """How often Ctrl-C was pressed, and from which press on it breaks off.

    Attributes:
        terminated: whether it was SIGTERM.
    """

    def __init__(self, noted: float) -> None:
        self._outside = self._noted = noted
        self._pressed = 0
        self.terminated = False

    def __bool__(self) -> bool:
        return self._pressed > 0

    @property
    def code(self) -> int:
        """The exit code of a command that has reported all the same."""
        return TERMINATED if self.terminated else 0

    @property
    def word(self) -> str:
        """What has happened."""
        return "terminated" if self.terminated else "interrupted"

    def press(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self._pressed += 1
        self.terminated = self.terminated or number == signal.SIGTERM
        if self._pressed > self._noted:
            # Here and not only where a block ends: it may be one that has hardly begun.
            self._noted = self._outside
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    @contextmanager
    def noting(self, presses: float) -> Iterator[None]:
        """In this block so many presses are only noted, those just before it among them."""
        try:
            self._noted = presses  # before the look back, so that none falls between the two
            if self._pressed > presses:
                raise KeyboardInterrupt
            yield
        finally:
            self._noted = self._outside
            self._pressed = 0


@contextmanager
def interruptible(noted: float = 1, *, sigterm: bool = True) -> Iterator[Interrupt]:
    """Ctrl-C is noted instead of breaking off, so that no forward is left half way.

    A second one breaks off after all, or the one after so many as are to be `noted`. SIGTERM is as
    Ctrl-C, unless it is to end the command where it is (`sigterm=False`).
    """
    interrupt = Interrupt(noted)
    numbers = [signal.SIGINT, *([signal.SIGTERM] if sigterm else [])]
    before = [signal.signal(number, interrupt.press) for number in numbers]
    try:
        yield interrupt
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
