"""Who has which row: the accounts of an engine, and nothing else.

A row is free, or busy with a turn, or resting: it stands at the end of a turn that is saved, until
that turn goes on or another one needs the row. Knows nothing about models or tokens.
"""

from __future__ import annotations

from weir.errors import WeirError


class RowAllocator:
    """The rows of an engine.

    Args:
        size: how many there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = set(range(size))
        self._busy: set[int] = set()
        self._resting: dict[
            str, int
        ] = {}  # by the node they stand at, the one used last at the end

    @property
    def busy(self) -> int:
        """Rows that turns have."""
        return len(self._busy)

    @property
    def resting(self) -> int:
        """Rows that stand at the end of a saved turn."""
        return len(self._resting)

    def claim(self, node: str | None) -> tuple[int, bool] | None:
        """A row for a turn.

        Args:
            node: where the turn starts; None at the beginning of a stream.

        Returns:
            The row, and whether it stands at `node` already; None if every row is busy. Who rests
            longest gives way.
        """
        if node is not None and node in self._resting:
            row = self._resting.pop(node)
            self._busy.add(row)
            return row, True
        if self._free:
            row = min(self._free)
            self._free.remove(row)
        elif self._resting:
            row = self._resting.pop(next(iter(self._resting)))
        else:
            return None
        self._busy.add(row)
        return row, False

    def rest(self, row: int, node: str) -> None:
        """A turn has ended and is being saved as `node`; its row may go on from there."""
        self._busy.remove(row)
        # A node is the end of one turn only, but a turn may be asked for again under its name.
        before = self._resting.pop(node, None)
        if before is not None:
            self._free.add(before)
        self._resting[node] = row

    def release(self, row: int) -> None:
        """A turn has failed or was cancelled: what is in its row is of no use."""
        self._busy.remove(row)
        self._free.add(row)

    def forget(self, node: str) -> None:
        """A node was deleted: no turn goes on from there."""
        row = self._resting.pop(node, None)
        if row is not None:
            self._free.add(row)

    def clear(self) -> None:
        """All rows are free."""
        self._free, self._busy, self._resting = set(range(self.size)), set(), {}

    def check(self, busy: set[int]) -> None:
        """Every row has one owner, and those that turns have are these.

        Raises:
            WeirError: the accounts do not add up; that is a fault of the engine's.
        """
        resting = list(self._resting.values())
        rows = sorted([*self._free, *self._busy, *resting])
        if rows != list(range(self.size)) or self._busy != busy:
            raise WeirError(
                f"the engine's accounts are wrong: free {sorted(self._free)}, resting {resting}, "
                f"busy {sorted(self._busy)}, and turns have {sorted(busy)}"
            )
