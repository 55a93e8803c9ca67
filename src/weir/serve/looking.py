"""Looks into rows of turns under way, between two steps of an engine.

Knows nothing about models.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from weir.cache import Holding, StreamingCache
from weir.serve.turn import Stage, Turn


@dataclass(frozen=True)
class Glance:
    """What a turn under way looks like between two steps.

    Attributes:
        holding: what its row holds.
        chosen: tokens of its answer so far; the row has not read the last of them yet.
    """

    holding: Holding
    chosen: tuple[int, ...]


class Looks:
    """Who wants to look, and has not yet; one turn is looked at once, for all who ask."""

    def __init__(self) -> None:
        self._asked: dict[Turn, Future[Glance | None]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, turn: Turn) -> Future[Glance | None]:
        """Somebody wants to look into a turn's row."""
        return self._asked.setdefault(turn, Future())

    def first(self) -> tuple[Turn, Future[Glance | None]] | None:
        """Who has asked first; they are not among those who ask any more."""
        turn = next(iter(self._asked), None)
        return None if turn is None else (turn, self._asked.pop(turn))


def look(cache: StreamingCache, turn: Turn, asked: Future[Glance | None]) -> None:
    """Look into a turn's row; None where it has no row, or not any more."""
    if not asked.set_running_or_notify_cancel():
        return
    try:
        begun = turn.stage in (Stage.READING, Stage.ANSWERING) and turn.row is not None
        held = cache.holding(turn.row or 0) if begun else None
        asked.set_result(None if held is None else Glance(held, tuple(turn.chosen)))
    except Exception as error:
        asked.set_exception(error)
