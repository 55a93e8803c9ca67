"""Signals and garbage collection around a command. Imports almost nothing, and knows no command.

After Ctrl-C or SIGTERM a command can report what it has done so far; after SIGTERM, which a
scheduler, a container or `kill` sends, the exit code is 143. A terminal that is closed sends
SIGHUP, which counts as SIGTERM. The garbage collector runs rarely while libraries are imported:
they create a million objects, and scanning them again and again would take a sixth of the time
until `weir chat` answers. Threads of OpenMP wait in a loop for a short time only.
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
"""Exit codes, as shells have them."""
SELDOM = 50_000
"""New objects between two collections while libraries are imported; usually some hundreds."""
SPINS = "2000"
"""Rounds that a thread of OpenMP waits in a loop before it sleeps, some 30 microseconds. GNU's
OpenMP waits for 300,000: beside another busy process, threads then wait for one that does not run.
"""
_USUAL = gc.get_threshold()


def wait_briefly() -> None:
    """Let threads of PyTorch that wait for each other sleep soon, unless the user has chosen.

    It has an effect before PyTorch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


@contextmanager
def collect_seldom() -> Iterator[None]:
    """Collect garbage rarely in this block, or until one of the next two functions is called."""
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
    """Collect garbage as any program does from here on; for commands that measure time."""
    gc.set_threshold(*_USUAL)


def _ending() -> list[signal.Signals]:
    """The signals that end a command: SIGTERM, and SIGHUP unless `nohup` has it ignored."""
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    if hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN:
        return [signal.SIGTERM]
    return [signal.SIGTERM, hang_up]


class Terminated(SystemExit):
    """Exit on SIGTERM, which no `except Exception` can catch."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM in this block, so that open files and processes are closed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = {number: signal.signal(number, end) for number in _ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """Counter of Ctrl-C presses that notes the first few and raises on the next one.

    Attributes:
        terminated: whether one of them was SIGTERM.
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
        """The word for what happened, for messages."""
        return "terminated" if self.terminated else "interrupted"

    def press(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self._pressed += 1
        self.terminated = self.terminated or number != signal.SIGINT
        if self._pressed > self._noted:
            # Restored here too: the exception may hit a `noting` block before its `try` works.
            self._noted = self._outside
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    @contextmanager
    def noting(self, presses: float) -> Iterator[None]:
        """Note this many presses in the block without raising, presses just before it included."""
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
    """Note Ctrl-C in this block instead of raising, so that no forward is left halfway.

    Args:
        noted: presses that are only noted; the one after them raises.
        sigterm: SIGTERM counts as a press; otherwise it ends the command where it is.
    """
    interrupt = Interrupt(noted)
    numbers = [signal.SIGINT, *(_ending() if sigterm else [])]
    before = {number: signal.signal(number, interrupt.press) for number in numbers}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
