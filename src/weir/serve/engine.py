"""The engine: many endless sessions through one model, in rows that are allocated once.

A step ends what was cancelled, gives free rows to turns that wait, makes one decode call over the
rows that answer, and at most one piece of one prompt as a call of its own. So nobody's prompt stops
the others for longer than a piece takes, and no row is ever taken from a turn: what a row holds
does not grow. Knows tokens and nodes; nothing about text, HTTP or disks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import Holding, StreamingCache
from weir.errors import WeirError
from weir.models import input_device, transformers_model
from weir.policies import Policy
from weir.pools import Marks
from weir.serve.choosing import Choice
from weir.serve.rowtable import RowTable
from weir.serve.shelf import Shelf
from weir.serve.turn import Node, Stage, Turn

PIECE = 256
"""Tokens of a prompt that are read between two decode calls."""


class Busy(WeirError):
    """As many turns wait as are allowed to."""


class Cancelled(WeirError):
    """Nobody wants the turn any more."""


@dataclass(frozen=True)
class Load:
    """What an engine is doing.

    Attributes:
        rows, busy, resting: all rows, those that turns have, those at the end of a saved turn.
        waiting: turns without a row.
        seen: tokens read and answered since the start.
        calls: decode calls since the start.
    """

    rows: int
    busy: int
    resting: int
    waiting: int
    seen: int
    calls: int


@dataclass(frozen=True)
class Glance:
    """What a turn under way looks like between two steps.

    Attributes:
        holding: what its row holds.
        chosen: tokens of its answer so far; the row has not read the last of them yet.
    """

    holding: Holding
    chosen: tuple[int, ...]


class Engine:
    """Answers turns of many sessions.

    `submit`, `cancel`, `look` and `load` may be called from any thread; everything else happens in
    the thread that calls `run`, or `step` in a test.

    Args:
        model: a causal language model; nobody else may feed it meanwhile.
        policy: of every row.
        rows: turns that are answered at once.
        shelf: where ends of turns are kept.
        chunk: tokens between two folds.
        piece: tokens of a prompt that are read between two decode calls.
        queue: turns that may wait while no row is free.
        deterministic: what a turn answers depends on nobody else: each row is decoded in a call of
            its own, since a matrix product of another batch may round otherwise.

    Attributes:
        cache: the rows.
        on_step: called when listeners have heard of the tokens of a step, all of them.

    Raises:
        WeirError: the model cannot be served, or the rows do not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy,
        rows: int,
        shelf: Shelf,
        *,
        chunk: int = 64,
        piece: int = PIECE,
        queue: int = 64,
        deterministic: bool = False,
    ) -> None:
        self.model = model
        self.cache = StreamingCache(model, policy, chunk=chunk, batch=rows, failures="keep")
        self.shelf = shelf
        self.on_step: Callable[[], None] = lambda: None
        self._piece = piece
        self._queue = queue
        self._deterministic = deterministic
        self._device = input_device(transformers_model(model))
        self._table = RowTable(rows)
        self._waiting: deque[Turn] = deque()
        self._turns: list[Turn] = []  # with a row, the one that was served longest ago first
        self._looks: dict[Turn, Future[Glance | None]] = {}
        self._served: dict[str, int] = {}
        self._clock = self._seen = self._calls = 0
        self._stopping = False
        self._news = threading.Condition()

    # --- from any thread

    def submit(self, turn: Turn) -> None:
        """Let a turn wait for a row.

        Raises:
            Busy: as many wait as may.
            WeirError: the engine is stopping, or the turn has nothing to read.
        """
        if not turn.ids:
            raise WeirError("a turn reads one token or more")
        if turn.limit < 1:
            raise WeirError(f"a turn answers with one token or more, not {turn.limit}")
        with self._news:
            if self._stopping:
                raise WeirError("the engine is stopping and takes no more turns")
            # Those that get a row in the next step do not wait for one.
            waiting = len(self._waiting) - (self._table.size - self._table.busy)
            if waiting >= self._queue:
                raise Busy(f"{waiting} turns are waiting already")
            self._waiting.append(turn)
            self._news.notify()

    def cancel(self, turn: Turn) -> None:
        """End a turn as if it had never begun; its listener is told that it failed."""
        with self._news:
            turn.cancelled = True
            self._news.notify()

    def look(self, turn: Turn) -> Future[Glance | None]:
        """Look into a turn's row between two steps; None where it has no row, or not any more.

        One turn is looked at in a step at most, for all who ask; so nobody slows answers down by
        asking often.
        """
        with self._news:
            if turn not in self._looks:
                self._looks[turn] = Future()
                self._news.notify()
            return self._looks[turn]

    def stop(self) -> None:
        """Take no more turns; `run` returns when those that were taken are done."""
        with self._news:
            self._stopping = True
            self._news.notify()

    def forget(self, node: str) -> None:
        """Nobody will go on from a node any more: its row is free, and it leaves the shelf."""
        with self._news:
            self._table.forget(node)
        self.shelf.drop(node)

    def load(self) -> Load:
        """What the engine is doing."""
        with self._news:
            table = self._table
            waiting = len(self._waiting)
            return Load(table.size, table.busy, table.resting, waiting, self._seen, self._calls)

    # --- in the engine's thread

    def run(self) -> None:
        """Answer turns until `stop`."""
        while True:
            with self._news:
                while not (self._waiting or self._turns or self._looks or self._stopping):
                    self._news.wait()
                if not (self._waiting or self._turns or self._looks):
                    return
            self.step()

    @torch.no_grad()
    def step(self) -> None:
        """One step: those who left, those who come, a token of each answer, a piece of a prompt."""
        with self._news:
            gone = [turn for turn in (*self._turns, *self._waiting) if turn.cancelled]
        for turn in gone:
            self._fail(turn, Cancelled("the turn was cancelled"))
        self._admit()
        self._answer()
        self.on_step()
        self._read()
        self._show()
        self.on_step()
        with self._news:
            self._table.check({turn.row for turn in self._turns if turn.row is not None})
            if not self._turns and not self._waiting:
                self._served.clear()  # nobody waits, so that nobody is to be first

    def _admit(self) -> None:
        """Give rows to turns that wait, those of the client first that was served longest ago."""
        while (turn := self._next_waiting()) is not None:
            with self._news:
                claimed = self._table.claim(turn.start)
                if claimed is None:
                    return
                self._waiting.remove(turn)
                turn.row, there = claimed
                self._turns.append(turn)
            self._clock += 1
            self._served[turn.client] = self._clock
            try:
                self._place(turn, there=there)
            except Exception as error:
                self._fail(turn, error)

    def _next_waiting(self) -> Turn | None:
        with self._news:
            return min(
                self._waiting, key=lambda turn: self._served.get(turn.client, 0), default=None
            )

    def _place(self, turn: Turn, *, there: bool) -> None:
        """Make a turn's row stand where the turn starts."""
        assert turn.row is not None
        if turn.forked is not None:
            (state, logits), turn.forked = turn.forked, None
            self.cache.put_row(turn.row, state, check=False)
            turn.stage = Stage.ANSWERING
            self._choose(turn, logits)
            return
        turn.todo = list(turn.ids)
        turn.stage = Stage.READING
        if turn.start is None:
            self.cache.reset_row(turn.row, seed=turn.seed)
            beginning: int | None = turn.beginning
        else:
            node = self.shelf.get(turn.start)
            if not there:
                # A shelf gives back what it was given: one on disk knows by a checksum.
                self.cache.put_row(turn.row, node.state, check=False)
            turn.todo = [*node.pending, *turn.todo]
            beginning = self.cache.marks[turn.row].beginning
        answer = self.cache.origin + self.cache.seen[turn.row] + len(turn.todo)
        self.cache.mark(turn.row, Marks(beginning, answer - turn.header, turn.header))

    def _answer(self) -> None:
        """A token of each answer."""
        turns = [turn for turn in self._turns if turn.stage is Stage.ANSWERING]
        if not self._deterministic:
            self._decode(turns)
            return
        for turn in turns:
            if turn.stage is Stage.ANSWERING:  # and did not fail with the one before
                self._decode([turn])

    def _decode(self, turns: list[Turn]) -> None:
        """One decode call over the rows of these turns, and their next tokens."""
        if not turns:
            return
        by_row = {turn.row: turn for turn in turns if turn.row is not None}
        first, last = min(by_row), max(by_row)
        ids = torch.zeros(last + 1 - first, 1, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, turn in by_row.items():
            ids[row - first], mask[row - first] = turn.chosen[-1], 1
        whole = len(by_row) == len(ids)  # then nothing needs to be masked
        logits = self._forward(ids, None if whole else mask, first, list(by_row.values()))
        if logits is None:
            return
        self._calls += 1
        likeliest = logits.argmax(dim=-1).tolist()
        for row, turn in by_row.items():
            if row - first in self.cache.failed:
                self._fail(turn, self.cache.failed[row - first])
            elif turn.chooser.plain:
                self._chosen(turn, Choice(likeliest[row - first]))
            else:
                self._choose(turn, logits[row - first])

    def _read(self) -> None:
        """One piece of the prompt that was served longest ago."""
        turn = next((turn for turn in self._turns if turn.stage is Stage.READING), None)
        if turn is None:
            return
        assert turn.row is not None
        self._turns.remove(turn)
        self._turns.append(turn)
        piece, turn.todo = turn.todo[: self._piece], turn.todo[self._piece :]
        logits = self._forward(torch.tensor([piece]), None, turn.row, [turn])
        if logits is None:
            return
        turn.read += len(piece)
        if turn.todo:
            return
        turn.stage = Stage.ANSWERING
        if turn.answers:
            state = self.cache.take_row(turn.row)
            with self._news:
                for other in turn.answers:
                    other.forked = (state, logits[0])
                    self._waiting.appendleft(other)
        self._choose(turn, logits[0])

    def _show(self) -> None:
        """Let those who asked for it first look into their turn's row."""
        with self._news:
            turn = next(iter(self._looks), None)
            if turn is None:
                return
            asked = self._looks.pop(turn)
        if not asked.set_running_or_notify_cancel():
            return
        try:
            begun = turn.stage in (Stage.READING, Stage.ANSWERING) and turn.row is not None
            held = self.cache.holding(turn.row or 0) if begun else None
            asked.set_result(None if held is None else Glance(held, tuple(turn.chosen)))
        except Exception as error:
            asked.set_exception(error)

    def _forward(
        self, ids: Tensor, mask: Tensor | None, row: int, turns: list[Turn]
    ) -> Tensor | None:
        """Logits after the last token of rows that lie side by side [rows, vocabulary].

        None where the call failed: then the turns have failed, which were in it.
        """
        real = None if mask is None else mask.to(self._device)
        try:
            with self.cache.only(row, row + len(ids)):
                out = self.model(
                    input_ids=ids.to(self._device),
                    attention_mask=real,
                    past_key_values=self.cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
        except Exception as error:
            for turn in turns:
                self._fail(turn, error)
            if self.cache.broken:
                self._start_over(error)
            return None
        self._seen += int(ids.numel() if mask is None else mask.sum())
        logits: Tensor = out.logits[:, -1]
        return logits

    def _choose(self, turn: Turn, logits: Tensor) -> None:
        """The next token of an answer, from the logits after what came last [vocabulary]."""
        try:
            self._chosen(turn, turn.chooser.choose(logits))
        except Exception as error:
            self._fail(turn, error)

    def _chosen(self, turn: Turn, choice: Choice) -> None:
        turn.chosen.append(choice.token)
        reason = turn.listener.chose(choice)
        if choice.token in turn.stops or turn.chooser.done:
            reason = "stop"
        elif reason is None and len(turn.chosen) >= turn.limit:
            reason = "length"
        if reason is not None:
            self._end(turn, reason)

    def _end(self, turn: Turn, reason: str) -> None:
        """Save where a turn has come to; its listener is told when that is safe."""
        assert turn.row is not None
        turn.stage = Stage.DONE
        state = self.cache.take_row(turn.row) if turn.keep else None
        with self._news:
            self._turns.remove(turn)
            if state is None:
                self._table.release(turn.row)
            else:
                self._table.rest(turn.row, turn.node)
        if state is None:
            turn.listener.ended(reason)
            return

        def done(error: Exception | None) -> None:
            if error is None:
                turn.listener.ended(reason)
                return
            with self._news:
                self._table.forget(turn.node)
            turn.listener.failed(error)

        self.shelf.put(turn.node, Node(state, (turn.chosen[-1],)), done)

    def _fail(self, turn: Turn, error: Exception) -> None:
        """A turn never happened, nor do the other answers to its prompt that wait for it."""
        if turn.stage is Stage.DONE:
            return
        orphans = turn.answers if turn.stage in (Stage.WAITING, Stage.READING) else []
        turn.stage = Stage.DONE
        with self._news:
            if turn in self._turns:
                self._turns.remove(turn)
            if turn in self._waiting:
                self._waiting.remove(turn)
            if turn.row is not None:
                self._table.release(turn.row)
        turn.listener.failed(error)
        for other in orphans:
            self._fail(other, error)

    def _start_over(self, error: Exception) -> None:
        """A call was interrupted while it folded, so that no row can be trusted: all are emptied.

        Ends of turns are on the shelf; turns under way have failed.
        """
        for turn in list(self._turns):
            self._fail(turn, error)
        with self._news:
            self._table.clear()
        self.cache.reset()
