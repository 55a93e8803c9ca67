"""The scheduler: decide which sequence gets a row next, which row, and whose tokens are fed next.

This module knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weir.errors import WeirError, in_words
from weir.serve.engine.sequence import Stage, TokenSequence
from weir.serve.limits import share_of


class Busy(WeirError):
    """The server has no room for a request now, for example because its queue is full."""


class Scheduler:
    """Decides which sequences run, and in which rows.

    A row is busy with a running sequence, resting, or free. A resting row holds the state of a
    checkpoint until a sequence continues there or another sequence needs the row. Clients take
    turns, and the sequences of one client keep their order.

    Args:
        rows: number of rows.
        queue: number of sequences that may wait.
        prefill_chunk: the most tokens of prompts, including padding, in one call of the model.
        deterministic: whether every call of the model computes only one row.
        shared: whether one client gets only a share of the rows and of the queue.

    Attributes:
        waiting: sequences that wait for a row; those of one client start in this order.
        running: sequences with a row; the one whose prompt was read longest ago comes first.
        resting: rows that hold a checkpoint's state, by its name; the most recently used one comes
            last.
    """

    def __init__(
        self,
        rows: int,
        queue: int,
        prefill_chunk: int,
        *,
        deterministic: bool,
        shared: bool = False,
    ) -> None:
        self.rows = rows
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self.prefill_chunk = prefill_chunk
        self._queue = queue
        self._rows_each = share_of(rows) if shared else rows
        self._queue_each = share_of(queue) if shared else queue
        self._deterministic = deterministic
        self.resting: dict[str, int] = {}
        self._served: dict[str, int] = {}  # when a client last got a row, by a counter
        self._clock = 0

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def all_calling(self) -> bool:
        """Return whether sequences are running, and all of them wait for a tool call."""
        calling = (one.stage is Stage.CALLING and not one.cancelled for one in self.running)
        return bool(self.running) and all(calling)

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for a row. Raises Busy if too many sequences, or too many of its
        client, are waiting.
        """
        if not self:
            self._served.clear()
        waiting = len(self.waiting) - (self.rows - len(self.running))
        own = sum(one.holder == sequence.holder for one in self.waiting)
        own -= self._rows_each - self._rows_of(sequence.holder)
        if waiting >= self._queue or own >= self._queue_each:
            many = max(waiting, own)
            are = "is" if many == 1 else "are"
            raise Busy(f"{in_words(many, 'turn')} {are} already waiting. Try again later.")
        self.waiting.append(sequence)

    def add_first(self, sequence: TokenSequence) -> None:
        """Put a sequence before all others, however many are waiting, because its prompt has
        already been read.
        """
        self.waiting.insert(0, sequence)

    def admit(self) -> tuple[TokenSequence, bool] | None:
        """Give a row to the next sequence of the client served longest ago.

        The row is the one that holds the state at which the sequence starts, or a free one, or the
        one that has rested longest. Also returns whether it holds that state. Returns None if all
        rows are busy, or if no waiting sequence may have one.
        """
        if len(self.running) == self.rows:
            return None
        waiting = [one for one in self.waiting if self._rows_of(one.holder) < self._rows_each]
        if not waiting:
            return None
        sequence = min(waiting, key=lambda one: self._served.get(one.holder, 0))
        row = None if sequence.parent is None else self.resting.pop(sequence.parent, None)
        resident = row is not None
        if row is None:
            taken = {*(one.row for one in self.running), *self.resting.values()}
            row = min(set(range(self.rows)) - taken, default=None)
        if row is None:
            row = self.resting.pop(next(iter(self.resting)))
        self.waiting.remove(sequence)
        self._clock += 1
        self._served[sequence.holder] = self._clock
        sequence.row = row
        self.running.append(sequence)
        return sequence, resident

    def _rows_of(self, holder: str) -> int:
        """Return the number of rows of a holder's sequences."""
        return sum(one.holder == holder for one in self.running)

    def decode_batches(self) -> Iterator[list[TokenSequence]]:
        """Return the sequences that get a token of their answer, grouped by call."""
        decoding = [sequence for sequence in self.running if sequence.stage is Stage.DECODE]
        if not self._deterministic:
            if decoding:
                yield decoding
            return
        for sequence in decoding:
            if sequence.stage is Stage.DECODE:  # it may have failed during an earlier call
                yield [sequence]

    def prefill_batch(self) -> list[TokenSequence]:
        """Return the sequences whose prompts are read next; they move to the end of `running`."""
        reading = [sequence for sequence in self.running if sequence.stage is Stage.PREFILL]
        chunk = self.prefill_chunk
        batch = reading[:1] if self._deterministic else group_prefills(reading, chunk)
        self.running = [sequence for sequence in self.running if sequence not in batch] + batch
        return batch

    def finish(self, sequence: TokenSequence, *, at_checkpoint: bool) -> None:
        """Take a sequence's row away. With `at_checkpoint`, the row then rests, and holds the state
        at the end of the sequence.
        """
        sequence.stage = Stage.FINISHED
        for sequences in (self.waiting, self.running):
            if sequence in sequences:
                sequences.remove(sequence)
        if sequence.row is not None and at_checkpoint:
            self.resting.pop(sequence.id, None)  # so that it becomes the last entry, if it is known
            self.resting[sequence.id] = sequence.row


def group_prefills(reading: list[TokenSequence], chunk: int) -> list[TokenSequence]:
    """Choose the sequences whose prompts are read in the next call.

    A prompt that is longer than a chunk, or must be read alone (`TokenSequence.alone`), is read in
    separate calls, so that other prompts do not change its result, even by rounding. Shorter
    prompts are read together, as many as `fits_one_call` allows.

    Args:
        reading: sequences with unread prompts; the one read longest ago comes first, and is always
            chosen.
        chunk: the most tokens of a call, including padding.
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
    """Return whether rows fit in one call without more padding than tokens.

    Args:
        tokens: number of tokens to feed, by row. Rows between the first and the last are computed,
            too.
        limit: the most tokens of the call, including padding.
    """
    computed = (max(tokens) + 1 - min(tokens)) * max(tokens.values())
    return computed <= limit and computed <= 2 * sum(tokens.values())


def _row_of(sequence: TokenSequence) -> int:
    assert sequence.row is not None
    return sequence.row
