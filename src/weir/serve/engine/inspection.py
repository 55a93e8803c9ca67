"""Inspection of the rows of running sequences, between two steps of an engine.

Knows nothing about models.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from weir.cache import Holding, StreamingCache
from weir.serve.engine.request import Sequence, Stage


@dataclass(frozen=True)
class RowInspection:
    """What a turn under way looks like between two steps.

    Attributes:
        holding: what its row holds.
        chosen: tokens of its answer so far; the row has not read the last of them yet.
    """

    holding: Holding
    chosen: tuple[int, ...]


class InspectionQueue:
    """Who wants to look, and has not yet; one turn is looked at once, for all who ask."""

    def __init__(self) -> None:
        self._asked: dict[Sequence, Future[RowInspection | None]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, turn: Sequence) -> Future[RowInspection | None]:
        """Somebody wants to look into a turn's row."""
        return self._asked.setdefault(turn, Future())

    def first(self) -> tuple[Sequence, Future[RowInspection | None]] | None:
        """Who has asked first; they are not among those who ask any more."""
        turn = next(iter(self._asked), None)
        return None if turn is None else (turn, self._asked.pop(turn))


def look(cache: StreamingCache, turn: Sequence, asked: Future[RowInspection | None]) -> None:
    """Look into a turn's row; None where it has no row, or not any more."""
    if not asked.set_running_or_notify_cancel():
        return
    try:
        begun = turn.stage in (Stage.READING, Stage.ANSWERING) and turn.row is not None
        held = cache.holding(turn.row or 0) if begun else None
        asked.set_result(None if held is None else RowInspection(held, tuple(turn.chosen)))
    except Exception as error:
        asked.set_exception(error)
