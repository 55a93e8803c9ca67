"""The scheduler: which sequence gets a row next, which row, and whose tokens are fed next.

Knows nothing about models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from weir.errors import WeirError
from weir.serve.engine.sequence import Sequence, Stage


class Busy(WeirError):
    """The queue is full."""


class WaitQueue:
    """Sequences without a row. Owners take turns; the sequences of one owner keep their order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: deque[Sequence] = deque()
        self._served: dict[str, int] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def add(self, sequence: Sequence, free: int = 0) -> None:
        """Append a sequence.

        Args:
            free: rows that are about to be given away; so many sequences do not count as waiting.

        Raises:
            Busy: the queue is full.
        """
        waiting = len(self._waiting) - free
        if waiting >= self._size:
            raise Busy(f"{waiting} turns are waiting already")
        self._waiting.append(sequence)

    def add_first(self, sequence: Sequence) -> None:
        """Put a sequence before all others, however many wait: its prompt is read already."""
        self._waiting.appendleft(sequence)

    def next(self) -> Sequence | None:
        """The next sequence of the owner served longest ago; it stays in the queue."""
        return min(self._waiting, key=lambda one: self._served.get(one.owner, 0), default=None)

    def serve(self, sequence: Sequence) -> None:
        """Remove a sequence that has got its row; its owner is now the last to be served."""
        self._waiting.remove(sequence)
        self._clock += 1
        self._served[sequence.owner] = self._clock

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that was not served, if it is here."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def reset_fairness(self) -> None:
        """Forget who was served when: the engine was idle."""
        self._served.clear()


class RowAllocator:
    """Owners of the rows of a cache.

    A row is free, or busy with a sequence, or resting: it stands at a checkpoint until a sequence
    continues there or another one needs the row.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = set(range(size))
        self._busy: set[int] = set()
        self._resting: dict[str, int] = {}  # by checkpoint, the one used last at the end

    @property
    def busy(self) -> int:
        """Number of rows that sequences have."""
        return len(self._busy)

    @property
    def resting(self) -> int:
        """Number of rows that stand at a checkpoint."""
        return len(self._resting)

    def claim(self, checkpoint: str | None) -> tuple[int, bool] | None:
        """Take a row: one that stands at the checkpoint, a free one, or the one at rest longest.

        Args:
            checkpoint: where the sequence starts; None at the beginning of a stream.

        Returns:
            The row, and whether it stands at the checkpoint already; None if all are busy.
        """
        if checkpoint is not None and checkpoint in self._resting:
            row = self._resting.pop(checkpoint)
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

    def rest(self, row: int, checkpoint: str) -> None:
        """Leave a row standing at a checkpoint."""
        self._busy.remove(row)
        # A checkpoint is the end of one turn only, but a turn may be asked for again by its name.
        before = self._resting.pop(checkpoint, None)
        if before is not None:
            self._free.add(before)
        self._resting[checkpoint] = row

    def release(self, row: int) -> None:
        """Free a row whose sequence is not saved."""
        self._busy.remove(row)
        self._free.add(row)

    def forget(self, checkpoint: str) -> None:
        """Free the row that stands at a checkpoint, if one does."""
        row = self._resting.pop(checkpoint, None)
        if row is not None:
            self._free.add(row)

    def clear(self) -> None:
        """Free all rows."""
        self._free, self._busy, self._resting = set(range(self.size)), set(), {}

    def check(self, busy: set[int]) -> None:
        """Check that every row is in one place, and that the busy ones are these.

        Raises:
            WeirError: they are not; that is a fault of the engine's.
        """
        resting = list(self._resting.values())
        rows = sorted([*self._free, *self._busy, *resting])
        if rows != list(range(self.size)) or self._busy != busy:
            raise WeirError(
                f"the engine's accounts are wrong: free {sorted(self._free)}, resting {resting}, "
                f"busy {sorted(self._busy)}, and turns have {sorted(busy)}"
            )


class Scheduler:
    """Decides which sequences run.

    Args:
        deterministic: every call is over one row.

    Attributes:
        running: sequences with a row, the one whose prompt was read longest ago first.
    """

    def __init__(self, rows: int, queue: int, prefill_chunk: int, *, deterministic: bool) -> None:
        self.waiting = WaitQueue(queue)
        self.rows = RowAllocator(rows)
        self.running: list[Sequence] = []
        self.prefill_chunk = prefill_chunk
        self._deterministic = deterministic

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for a row."""
        self.waiting.add(sequence, self.rows.size - self.rows.busy)

    def admit(self) -> tuple[Sequence, bool] | None:
        """Give the next sequence a row.

        Returns:
            The sequence, and whether its row stands where it starts; None if nobody waits or all
            rows are busy.
        """
        sequence = self.waiting.next()
        claimed = None if sequence is None else self.rows.claim(sequence.parent)
        if sequence is None or claimed is None:
            return None
        self.waiting.serve(sequence)
        sequence.row, resident = claimed
        self.running.append(sequence)
        return sequence, resident

    def decode_batches(self) -> Iterator[list[Sequence]]:
        """The sequences that get a token of their answer, by the calls that give it."""
        decoding = [sequence for sequence in self.running if sequence.stage is Stage.DECODE]
        if not self._deterministic:
            if decoding:
                yield decoding
            return
        for sequence in decoding:
            if sequence.stage is Stage.DECODE:  # and did not fail with the one before
                yield [sequence]

    def prefill_batch(self) -> list[Sequence]:
        """The sequences whose prompts are read next; they go to the end of `running`."""
        reading = [sequence for sequence in self.running if sequence.stage is Stage.PREFILL]
        chunk = self.prefill_chunk
        batch = reading[:1] if self._deterministic else group_prefills(reading, chunk)
        self.running = [sequence for sequence in self.running if sequence not in batch] + batch
        return batch

    def finish(self, sequence: Sequence, *, at_checkpoint: bool) -> None:
        """Take a sequence's row away; the row may rest at the sequence's end."""
        sequence.stage = Stage.FINISHED
        self.waiting.discard(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.row is not None and at_checkpoint:
            self.rows.rest(sequence.row, sequence.id)
        elif sequence.row is not None:
            self.rows.release(sequence.row)

    def check(self) -> None:
        """Check the rows after a step, and start afresh with fairness if nobody is left."""
        self.rows.check({one.row for one in self.running if one.row is not None})
        if not self:
            self.waiting.reset_fairness()


def group_prefills(reading: list[Sequence], chunk: int) -> list[Sequence]:
    """Choose the sequences whose prompts are read in the next call.

    A prompt longer than a chunk is read in calls of its own, so that other prompts change nothing
    in it, not even by rounding. Shorter ones are read together, as many as fit into a chunk.

    Args:
        reading: sequences whose prompts are not read yet, the one read longest ago first; that one
            is always chosen.
        chunk: tokens of a call, padding included.
    """
    short = [s for s in reading if not (s.num_read or s.alone) and len(s.unread) <= chunk]
    if reading[:1] != short[:1]:
        return list(reading[:1])
    batch, tokens = short[:1], {_row_of(one): len(one.unread) for one in short[:1]}
    for sequence in sorted(short[1:], key=lambda one: abs(_row_of(one) - _row_of(short[0]))):
        more = {**tokens, _row_of(sequence): len(sequence.unread)}
        if fits_one_call(more, chunk):
            tokens, batch = more, [*batch, sequence]
    return batch


def fits_one_call(tokens: Mapping[int, int], limit: int) -> bool:
    """Whether rows fit into one call without more padding than tokens.

    Args:
        tokens: by row, how many it is fed. Rows between the first and the last are computed too.
        limit: tokens of the call, padding included.
    """
    computed = (max(tokens) + 1 - min(tokens)) * max(tokens.values())
    return computed <= limit and computed <= 2 * sum(tokens.values())


def _row_of(sequence: Sequence) -> int:
    assert sequence.row is not None
    return sequence.row
