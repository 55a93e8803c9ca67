"""Inspection of rows whose sequences are running, between two steps of the engine.

Knows nothing about models.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from weir.cache import Holding, StreamingCache
from weir.serve.engine.sequence import Sequence


@dataclass(frozen=True)
class RowInspection:
    """A running sequence between two steps.

    Attributes:
        holding: what its row holds.
        output_ids: its answer so far; the row has not read the last token of it yet.
    """

    holding: Holding
    output_ids: tuple[int, ...]


class InspectionQueue:
    """Requests to inspect rows. All who ask for one sequence share one inspection."""

    def __init__(self) -> None:
        self._requests: dict[Sequence, Future[RowInspection | None]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, sequence: Sequence) -> Future[RowInspection | None]:
        """Ask for an inspection; its result is None if the sequence has no row by then."""
        return self._requests.setdefault(sequence, Future())

    def pop(self) -> tuple[Sequence, Future[RowInspection | None]] | None:
        """Take the oldest request out."""
        sequence = next(iter(self._requests), None)
        return None if sequence is None else (sequence, self._requests.pop(sequence))


def inspect_row(
    cache: StreamingCache, sequence: Sequence, future: Future[RowInspection | None]
) -> None:
    """Inspect the row of a sequence and set the result of a request for it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        if sequence.row is None or not sequence.is_running:
            future.set_result(None)
        else:
            holding = cache.holding(sequence.row)
            future.set_result(RowInspection(holding, tuple(sequence.output_ids)))
    except Exception as error:
        future.set_exception(error)
