"""Signals and garbage collection around a command.

After Ctrl-C or SIGTERM, a command can report what it has done so far. After SIGTERM, which a
scheduler, a container or `kill` sends, the exit code is 143. A closed terminal sends SIGHUP, which
counts as SIGTERM.

The garbage collector runs rarely while libraries are imported: they create a million objects, and
scanning them repeatedly would take a sixth of the time until `weir chat` answers. Threads of OpenMP
wait in a loop for a short time only.

This file imports almost nothing, and no command.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM
"""Exit codes, as shells use them."""
SELDOM = 50_000
"""New objects between two collections while libraries are imported; Python's default is at most a
few thousand.
"""
SPINS = "2000"
"""Rounds that a thread of OpenMP waits in a loop before it sleeps, about 30 microseconds.

By default, GNU's OpenMP waits for 300,000 rounds. If another process is busy, threads can then use
up the processors' time by waiting for a thread that is not running.
"""
_USUAL = gc.get_threshold()


def wait_briefly() -> None:
    """Let PyTorch's threads sleep soon when they wait for each other, unless the user has set how
    long they wait.

    This has an effect only before PyTorch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


@contextmanager
def collect_seldom() -> Iterator[None]:
    """Collect garbage rarely in this block, or until `freeze_imports` or `collect_as_usual` is
    called.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


def freeze_imports() -> None:
    """Collect garbage as usual from here on, but ignore all existing objects.

    Long-running commands call this once their libraries and model are loaded.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    collect_as_usual()


def collect_as_usual() -> None:
    """Collect garbage at Python's usual rate from here on, for commands that measure time."""
    gc.set_threshold(*_USUAL)


def _ending() -> list[signal.Signals]:
    """Return the signals that end a command: SIGTERM, and SIGHUP unless `nohup` ignores it."""
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    if hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN:
        return [signal.SIGTERM]
    return [signal.SIGTERM, hang_up]


class Terminated(SystemExit):
    """Exit on SIGTERM or SIGHUP. `except Exception` does not catch this."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM or SIGHUP in this block, so that open files and processes are
    closed.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = {number: signal.signal(number, end) for number in _ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """Counter of signals (Ctrl-C, SIGTERM, SIGHUP), each of which counts as a press. The first
    `noted` presses are only counted, and the next one raises.

    Attributes:
        terminated: whether one of the signals was SIGTERM or SIGHUP.
    """

    def __init__(self, noted: float) -> None:
        self._outside = self._noted = noted
        self._pressed = 0
        self.terminated = False

    def __bool__(self) -> bool:
        return self._pressed > 0

    @property
    def code(self) -> int:
        """Exit code of a command that has reported after the interrupt."""
        return TERMINATED if self.terminated else 0

    @property
    def word(self) -> str:
        """The word for the event in messages: "terminated" or "interrupted"."""
        return "terminated" if self.terminated else "interrupted"

    def press(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self._pressed += 1
        self.terminated = self.terminated or number != signal.SIGINT
        if self._pressed > self._noted:
            # `noting` may not restore this: if the signal arrives after its `yield` but before the
            # block has begun, the exception does not pass through its `finally`.
            self._noted = self._outside
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    @contextmanager
    def noting(self, presses: float) -> Iterator[None]:
        """Raise in this block only after more than this many presses. Presses before the block
        count, too: those since the last such block, or since this object was made.
        """
        try:
            self._noted = presses  # before the check, so that no press falls between the two
            if self._pressed > presses:
                raise Terminated if self.terminated else KeyboardInterrupt
            yield
        finally:
            self._noted = self._outside
            self._pressed = 0


@contextmanager
def interruptible(noted: float = 1, *, sigterm: bool = True) -> Iterator[Interrupt]:
    """Note Ctrl-C in this block instead of raising, so that no forward pass is left half done.

    Args:
        noted: number of presses that are only noted; the one after them raises.
        sigterm: count SIGTERM and SIGHUP as presses; otherwise they end the command at once.
    """
    interrupt = Interrupt(noted)
    numbers = [signal.SIGINT, *(_ending() if sigterm else [])]
    before = {number: signal.signal(number, interrupt.press) for number in numbers}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
