"""Who waits for a row or to be read, and who is next.

Knows nothing about models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from weir.errors import WeirError
from weir.serve.engine.request import Sequence
from weir.serve.engine.runner import side_by_side


class Busy(WeirError):
    """As many turns wait as are allowed to."""


class WaitQueue:
    """Turns that wait: clients take turns, and those of one client come in their order.

    Args:
        most: turns that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: deque[Sequence] = deque()
        self._served: dict[str, int] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._turns)

    def add(self, turn: Sequence, free: int = 0) -> None:
        """One turn more, behind the others.

        Args:
            turn: that is to wait.
            free: rows that are given away next: as many turns do not wait for one.

        Raises:
            Busy: as many wait as may.
        """
        waiting = len(self._turns) - free
        if waiting >= self._most:
            raise Busy(f"{waiting} turns are waiting already")
        self._turns.append(turn)

    def first(self, turn: Sequence) -> None:
        """One turn more, before the others and however many wait: its prompt is read already."""
        self._turns.appendleft(turn)

    def next(self) -> Sequence | None:
        """A turn of the client that was served longest ago; it goes on waiting."""
        return min(self._turns, key=lambda turn: self._served.get(turn.client, 0), default=None)

    def serve(self, turn: Sequence) -> None:
        """A turn waits no longer: its client has been served just now."""
        self._turns.remove(turn)
        self._clock += 1
        self._served[turn.client] = self._clock

    def leave(self, turn: Sequence) -> None:
        """A turn waits no longer, if it did: nobody was served."""
        if turn in self._turns:
            self._turns.remove(turn)

    def forget(self) -> None:
        """Nobody is to be first any more: there was a time when nobody waited."""
        self._served.clear()


def read_together(reading: list[Sequence], piece: int) -> list[Sequence]:
    """Turns whose prompts are read in the next call.

    A prompt that is longer than a piece is read by itself, so that others change nothing in it, not
    even by rounding; one that is not, together with as many as take no longer than a piece.

    Args:
        reading: turns whose prompts are not read yet, the one that was served longest ago first; it
            is read in any case.
        piece: tokens of prompts that a call may take as long as.
    """
    short = [t for t in reading if not (t.read or t.apart) and len(t.todo) <= piece]
    if reading[:1] != short[:1]:
        return list(reading[:1])
    turns, tokens = short[:1], {row_of(turn): len(turn.todo) for turn in short[:1]}
    for turn in sorted(short[1:], key=lambda turn: abs(row_of(turn) - row_of(short[0]))):
        more = {**tokens, row_of(turn): len(turn.todo)}
        if side_by_side(more, piece):
            tokens, turns = more, [*turns, turn]
    return turns


def row_of(turn: Sequence) -> int:
    """The row of a turn that has one."""
    assert turn.row is not None
    return turn.row
