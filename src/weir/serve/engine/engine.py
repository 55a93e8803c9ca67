"""The engine: many endless sessions through one model, in rows that are allocated once.

A step ends what was cancelled, gives free rows to turns that wait, makes one decode call over the
rows that answer, and one call more that reads a piece of a prompt, or several prompts that are no
longer together. So nobody's prompt stops the others for longer than a piece takes, and no row is
ever taken from a turn: what a row holds does not grow. Knows tokens and nodes; nothing about text,
HTTP or disks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import StreamingCache
from weir.errors import WeirError
from weir.policies import Policy
from weir.pools import Marks
from weir.serve.engine.inspection import InspectionQueue, RowInspection, look
from weir.serve.engine.request import Sequence, Stage
from weir.serve.engine.rows import RowAllocator
from weir.serve.engine.runner import ModelRunner
from weir.serve.engine.sampler import SampledToken, choose
from weir.serve.engine.scheduler import WaitQueue, read_together
from weir.serve.sessions import Checkpoint, SessionStore

PIECE = 256
"""Tokens of a prompt that are read between two decode calls."""


class Cancelled(WeirError):
    """Nobody wants the turn any more."""


@dataclass(frozen=True)
class EngineLoad:
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


class Engine:
    """Answers turns of many sessions.

    `submit`, `cancel`, `look` and `load` may be called from any thread; everything else happens in
    the thread that calls `run`, or `step` in a test.

    Args:
        model: a causal language model; nobody else may feed it meanwhile.
        policy: of every row.
        rows: turns that are answered at once.
        store: keeps the ends of turns.
        chunk: tokens between two folds; None for what the policy was measured with, or 64.
        piece: tokens of prompts that are read between two decode calls.
        queue: turns that may wait while no row is free.
        deterministic: what a turn answers depends on nobody else: each row is read and decoded in
            calls of its own, since a matrix product of another batch may round otherwise.

    Attributes:
        cache: the rows.
        feeder: of them.
        deterministic: as given.
        on_step: called when listeners have heard of the tokens of a step, all of them.

    Raises:
        WeirError: the model cannot be served, or the rows do not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy,
        rows: int,
        store: SessionStore,
        *,
        chunk: int | None = None,
        piece: int = PIECE,
        queue: int = 64,
        deterministic: bool = False,
    ) -> None:
        self.model = model
        self.cache = StreamingCache(model, policy, chunk=chunk, batch=rows, failures="keep")
        self.store = store
        self.on_step: Callable[[], None] = lambda: None
        self._piece = piece
        self.deterministic = deterministic
        self.feeder = ModelRunner(model, self.cache)
        self._table = RowAllocator(rows)
        self._waiting = WaitQueue(queue)
        self._turns: list[Sequence] = []  # with a row, the one that was served longest ago first
        self._looks = InspectionQueue()
        self._seen = self._calls = 0
        self._stopping = False
        self._news = threading.Condition()

    # --- from any thread

    def submit(self, turn: Sequence) -> None:
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
            self._waiting.add(turn, self._table.size - self._table.busy)
            self._news.notify()

    def cancel(self, turn: Sequence) -> None:
        """Cancel a sequence; its listener is told that it failed."""
        with self._news:
            turn.cancelled = True
            self._news.notify()

    def look(self, turn: Sequence) -> Future[RowInspection | None]:
        """Look into a turn's row between two steps; None where it has no row, or not any more.

        One turn is looked at in a step at most, for all who ask; so nobody slows answers down by
        asking often.
        """
        with self._news:
            self._news.notify()
            return self._looks.ask(turn)

    def stop(self) -> None:
        """Take no more turns; `run` returns when those that were taken are done."""
        with self._news:
            self._stopping = True
            self._news.notify()

    def forget(self, node: str) -> None:
        """Nobody will go on from a node any more: its row is free, and it leaves the store."""
        with self._news:
            self._table.forget(node)
        self.store.drop(node)

    def load(self) -> EngineLoad:
        """What the engine is doing."""
        with self._news:
            table = self._table
            waiting = len(self._waiting)
            return EngineLoad(
                table.size, table.busy, table.resting, waiting, self._seen, self._calls
            )

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
                self._waiting.forget()

    def _admit(self) -> None:
        """Give rows to turns that wait, those of the client first that was served longest ago."""
        while True:
            with self._news:
                turn = self._waiting.next()
                claimed = None if turn is None else self._table.claim(turn.start)
                if turn is None or claimed is None:
                    return
                self._waiting.serve(turn)
                turn.row, there = claimed
                self._turns.append(turn)
            try:
                self._place(turn, there=there)
            except Exception as error:
                self._fail(turn, error)

    def _place(self, turn: Sequence, *, there: bool) -> None:
        """Make a turn's row stand where the turn starts."""
        assert turn.row is not None
        if turn.forked is not None:
            (state, logits), turn.forked = turn.forked, None
            self.cache.put_row(turn.row, state, check=False)
            turn.stage = Stage.ANSWERING
            self._choose([turn], logits[None])
            return
        turn.todo = list(turn.ids)
        turn.stage = Stage.READING
        if turn.start is None:
            self.cache.reset_row(turn.row, seed=turn.seed)
            beginning: int | None = turn.beginning
        else:
            node = self.store.load(turn.start)
            if not there:
                # A store returns what it was given: one on disk checks that by a checksum.
                self.cache.put_row(turn.row, node.state, check=False)
            turn.todo = [*node.pending, *turn.todo]
            beginning = self.cache.marks[turn.row].beginning
        answer = self.cache.origin + self.cache.seen[turn.row] + len(turn.todo)
        self.cache.mark(turn.row, Marks(beginning, answer - turn.header, turn.header))

    def _answer(self) -> None:
        """A token of each answer."""
        turns = [turn for turn in self._turns if turn.stage is Stage.ANSWERING]
        if turns and not self.deterministic:
            self._decode(turns)
            return
        for turn in turns:
            if turn.stage is Stage.ANSWERING:  # and did not fail with the one before
                self._decode([turn])

    def _decode(self, turns: list[Sequence]) -> None:
        """One decode call over the rows of these turns, and their next tokens."""
        try:
            good, logits = self._feed({turn: turn.chosen[-1:] for turn in turns})
        except Exception as error:
            self._lose(turns, error)
            return
        self._calls += 1
        self._choose(good, logits)

    def _read(self) -> None:
        """A piece of the prompt that was served longest ago, or short ones together with it."""
        reading = [turn for turn in self._turns if turn.stage is Stage.READING]
        turns = reading[:1] if self.deterministic else read_together(reading, self._piece)
        if not turns:
            return
        self._turns = [turn for turn in self._turns if turn not in turns] + turns
        try:
            good, logits = self._feed({turn: turn.todo[: self._piece] for turn in turns})
        except Exception as error:
            if len(turns) == 1 or self.cache.broken:
                self._lose(turns, error)
                return
            for turn in turns:
                turn.apart = True  # whose fault it is shows where each is read by itself
            return
        for turn in good:
            turn.read += len(turn.todo[: self._piece])
            turn.todo = turn.todo[self._piece :]
        over = []
        for at, turn in enumerate(good):
            if turn.todo:
                continue
            try:
                if turn.answers:
                    self._fork(turn, logits[at])
            except Exception as error:
                self._fail(turn, error)  # and with it the answers that were to begin there
                continue
            turn.stage = Stage.ANSWERING
            over.append(at)
        self._choose([good[at] for at in over], logits[over])

    def _fork(self, turn: Sequence, logits: Tensor) -> None:
        """A prompt has been read that other answers begin with."""
        assert turn.row is not None
        state = self.cache.take_row(turn.row)
        with self._news:
            for other in turn.answers:
                other.forked = (state, logits)
                self._waiting.first(other)

    def _show(self) -> None:
        """Let those who asked for it first look into their turn's row."""
        with self._news:
            first = self._looks.first()
        if first is not None:
            look(self.cache, *first)

    def _feed(self, tokens: Mapping[Sequence, list[int]]) -> tuple[list[Sequence], Tensor]:
        """One call of the model over rows of turns.

        Returns:
            The turns that took their tokens, and the logits after them [turns, vocabulary]; the
            others have failed.
        """
        by_row = {turn.row: turn for turn in tokens if turn.row is not None}
        fed = self.feeder.feed({row: tokens[turn] for row, turn in by_row.items()})
        self._seen += sum(map(len, tokens.values()))
        if not fed.failed:
            return list(tokens), fed.logits
        for row, error in fed.failed.items():
            self._fail(by_row[row], error)
        good = [at for at, row in enumerate(by_row) if row not in fed.failed]
        return [turn for row, turn in by_row.items() if row not in fed.failed], fed.logits[good]

    def _lose(self, turns: list[Sequence], error: Exception) -> None:
        """A call has failed, and so have the turns that were in it."""
        for turn in turns:
            self._fail(turn, error)
        if self.cache.broken:
            self._start_over(error)

    def _choose(self, turns: list[Sequence], logits: Tensor) -> None:
        """The next token of each answer, from the logits after what came last [turns, vocabulary].

        What goes wrong with one is that one's alone.
        """
        for turn, choice in zip(
            turns, choose([each.chooser for each in turns], logits), strict=True
        ):
            try:
                if isinstance(choice, Exception):
                    raise choice
                self._chosen(turn, choice)
            except Exception as error:
                self._fail(turn, error)

    def _chosen(self, turn: Sequence, choice: SampledToken) -> None:
        turn.chosen.append(choice.token)
        reason = turn.listener.chose(choice)
        if choice.token in turn.stops or turn.chooser.done:
            reason = "stop"
        elif reason is None and len(turn.chosen) >= turn.limit:
            reason = "length"
        if reason is not None:
            self._end(turn, reason)

    def _end(self, turn: Sequence, reason: str) -> None:
        """Save where a turn has come to; its listener is told when that is safe."""
        assert turn.row is not None
        # The copy may find no memory; then the turn fails, which one that is done cannot.
        state = self.cache.take_row(turn.row) if turn.record else None
        turn.stage = Stage.DONE
        with self._news:
            self._turns.remove(turn)
            if state is None:
                self._table.release(turn.row)
            else:
                self._table.rest(turn.row, turn.node)
        if state is None or turn.record is None:
            turn.listener.ended(reason)
            return

        def done(error: Exception | None) -> None:
            if error is None:
                turn.listener.ended(reason)
                return
            with self._news:
                self._table.forget(turn.node)
            turn.listener.failed(error)

        try:
            record = turn.record(turn, reason)
            self.store.save(Checkpoint(state, (turn.chosen[-1],)), record, done)
        except Exception as error:
            done(error)

    def _fail(self, turn: Sequence, error: Exception) -> None:
        """A turn never happened, nor do the other answers to its prompt that wait for it."""
        if turn.stage is Stage.DONE:
            return
        orphans = turn.answers if turn.stage in (Stage.WAITING, Stage.READING) else []
        turn.stage = Stage.DONE
        with self._news:
            if turn in self._turns:
                self._turns.remove(turn)
            self._waiting.leave(turn)
            if turn.row is not None:
                self._table.release(turn.row)
        turn.listener.failed(error)
        for other in orphans:
            self._fail(other, error)

    def _start_over(self, error: Exception) -> None:
        """A call was interrupted while it folded, so that no row can be trusted: all are emptied.

        Ends of turns are in the store; turns under way have failed.
        """
        for turn in list(self._turns):
            self._fail(turn, error)
        with self._news:
            self._table.clear()
        self.cache.reset()
