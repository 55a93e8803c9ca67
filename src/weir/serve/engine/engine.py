"""The engine: run endless sequences of many owners through one model, in rows allocated once.

A step gives free rows to waiting sequences, makes one decode call over the rows that answer, and
makes one more call that reads a chunk of a prompt, or several short prompts. In each step, a long
prompt thus delays the others by at most one chunk. A sequence keeps its row until it ends: rows do
not grow, so none has to be taken away to make room for others. This file works with tokens and
checkpoints, and does not use text, HTTP or disks.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import Holding, StreamingCache
from weir.errors import WeirError
from weir.models import CACHE, input_device, transformers_model
from weir.native import compile_steps
from weir.policies import Policy
from weir.pools import Marks
from weir.serve.engine.prefixes import PrefixKey, PrefixPlace, PrefixState, PrefixStates
from weir.serve.engine.sampler import SampledToken, sample
from weir.serve.engine.scheduler import Scheduler
from weir.serve.engine.sequence import Stage, TokenSequence
from weir.serve.messages import ResultPlace
from weir.serve.sessions.records import Checkpoint
from weir.serve.sessions.store import SessionStore

if TYPE_CHECKING:
    from weir.serve.after_thoughts import AfterThoughts
    from weir.serve.structured import GrammarConstraint

LOG = logging.getLogger("weir.serve")
PREFILL_CHUNK = 128
"""The most tokens of prompts that are read between two decode calls."""
PREFIXES = 8
"""Number of prompt states that are kept in memory (`PrefixStates`)."""
IDLE_SECONDS = 0.05
"""The longest pause between two steps while all sequences wait for tool calls to finish."""
GROWTH = 4
"""Decode calls are compiled for some numbers of rows. Each is this many times the one before,
except the last, which is all rows.

Computing an unused row costs little compared with compiling another program.
"""


class Cancelled(WeirError):
    """The sequence was cancelled."""


@dataclass(frozen=True)
class RowInspection:
    """A running sequence between two steps.

    Its row has not read the last of `output_ids` yet, or several of the last while it reads what
    `Engine.resume` has brought.
    """

    holding: Holding
    output_ids: tuple[int, ...]


@dataclass(frozen=True)
class Continuation:
    """The tokens with which an answer continues after a call that the server has run.

    Attributes:
        ids: tokens to feed after the last token of the answer, at least one.
        header: how many of them, at the end, are the header of the model's next message.
        constraint: the format that the next message must follow; None for any text.
    """

    ids: list[int]
    header: int = 0
    constraint: GrammarConstraint | AfterThoughts | None = None


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine.

    Attributes:
        rows: number of rows.
        busy: number of rows in which a sequence runs.
        resting: number of rows that still hold the state of a sequence that has ended.
        waiting: number of sequences that wait for a row.
        seen: number of tokens that were read or generated since the start.
        calls: number of decode calls since the start.
    """

    rows: int
    busy: int
    resting: int
    waiting: int
    seen: int
    calls: int


class ModelRunner:
    """Calls the model over neighboring rows of a cache.

    Rows among them that get no tokens are padded, and so is the beginning of rows that get fewer
    tokens than others.

    Attributes:
        sizes: the numbers of rows that a call of one token per row may have, ascending; empty for
            any number. A compiled step has a graph for each.
    """

    def __init__(self, model: PreTrainedModel, cache: StreamingCache) -> None:
        self.sizes: tuple[int, ...] = ()
        self._model = model
        self._cache = cache
        self._served = transformers_model(model)
        self._device = input_device(self._served)

    def run(self, tokens: Mapping[int, list[int]]) -> tuple[Tensor, dict[int, WeirError]]:
        """Call the model once. If it raises, no row has changed, unless `cache.broken`.

        Returns:
            The logits after the last token of each row, in the order in which rows were given
                [rows, vocabulary], and the reason for each row that did not take its tokens. The
                logits of such a row have no meaning.
        """
        width = max(map(len, tokens.values()))
        first, stop = self._span(tokens, width)
        # Padding comes first, so that the last column is the last token of every row.
        parts = [list(tokens.get(row, ())) for row in range(first, stop)]
        ids = torch.tensor([[0] * (width - len(part)) + part for part in parts])
        mask = None
        if any(len(part) < width for part in parts):
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in parts])
        with self._cache.only(first, stop):
            found = None
            if width == 1 and mask is None and self._model is self._served:
                found = self._cache.run_step([part[0] for part in parts])
            logits = self._call(ids, mask) if found is None else found
        index = [row - first for row in tokens]
        if index != list(range(len(logits))):
            logits = logits[index]
        return logits, {row + first: error for row, error in self._cache.failed.items()}

    def _call(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return the model's logits after the last column [rows, vocabulary]."""
        out = self._model(
            input_ids=ids.to(self._device),
            attention_mask=None if mask is None else mask.to(self._device),
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: self._cache},
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _span(self, rows: Collection[int], width: int) -> tuple[int, int]:
        """Return the first row of a call, and the row after its last."""
        first, stop = min(rows), max(rows) + 1
        if width > 1 or not self.sizes:
            return first, stop
        size = next(size for size in self.sizes if size >= stop - first)
        first = min(first, (self._cache.batch or size) - size)
        return first, first + size


class Engine:
    """Runs sequences.

    `submit`, `cancel`, `resume`, `drop`, `keep`, `inspect`, `forget`, `stop`, `load` and `is_busy`
    may be called from any thread. All else happens in the thread that calls `run`, or `step` in a
    test.

    Args:
        chunk: tokens between two folds; None for the chunk that a policy file was measured with, or
            for 64 if the policy does not come from such a file.
        shared: whether one client gets only a share of the rows and of the queue.
        deterministic: make an answer independent of other answers. Each row is read and decoded in
            a separate call, because matrix products of other batch sizes may round differently.
        prefixes: number of prompt states that are kept in memory, so that neither an interrupted
            prompt nor a beginning that conversations share is read twice.
        prefix_place: keeps those beginnings while the server is not running.

    Attributes:
        on_step: called twice in a step, after listeners have received the tokens of a call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy,
        rows: int,
        store: SessionStore,
        *,
        chunk: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        queue: int = 64,
        shared: bool = False,
        deterministic: bool = False,
        prefixes: int = PREFIXES,
        prefix_place: PrefixPlace | None = None,
    ) -> None:
        self.model = model
        self.cache = StreamingCache(model, policy, chunk=chunk, batch=rows, failures="keep")
        self.store = store
        self.deterministic = deterministic
        self.runner = ModelRunner(model, self.cache)
        self.scheduler = Scheduler(
            rows, queue, prefill_chunk, deterministic=deterministic, shared=shared
        )
        self.prefixes = PrefixStates(prefixes, prefix_place)
        self.on_step: Callable[[], None] = lambda: None
        self._inspections: dict[TokenSequence, Future[RowInspection | None]] = {}
        self._seen = self._calls = 0
        self._resumed: list[tuple[TokenSequence, Continuation | Exception]] = []
        self._drops: list[tuple[TokenSequence, tuple[int, int]]] = []
        self._keeps: list[tuple[TokenSequence, ResultPlace, Future[bool]]] = []
        self._forgotten: list[str] = []  # checkpoints whose `PrefixState`s the next step drops
        self._stopping = False
        self._changed = threading.Condition()  # guards what other threads change, and wakes `run`

    @torch.no_grad()
    def warm_up(self) -> None:
        """Read a piece of a prompt and decode a token, in one row and in all rows, before any
        sequence.

        A first call compiles or loads code for seconds, during which all clients would wait.
        """
        self.runner.run({0: [0] * self.scheduler.prefill_chunk})
        self.runner.run({0: [0]})  # one row and several may run different code
        self.runner.run({row: [0] for row in range(self.scheduler.rows)})
        self.cache.reset()

    # --- from any thread

    def submit(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for a row. Raises WeirError if the engine is stopping, and Busy if
        too many are waiting.
        """
        with self._changed:
            if self._stopping:
                raise WeirError(
                    "the engine is stopping and takes no more turns. Try again when the server is "
                    "back."
                )
            self.scheduler.add(sequence)
            self._changed.notify()

    def cancel(self, sequence: TokenSequence) -> None:
        """End a sequence in the next step; its listener is told that it failed."""
        with self._changed:
            sequence.cancelled = True
            self._changed.notify()

    def resume(self, sequence: TokenSequence, found: Continuation | Exception) -> None:
        """Continue a sequence whose `on_stop` returned None, or fail it.

        Does nothing if the sequence has ended, for example because it was cancelled.
        """
        with self._changed:
            self._resumed.append((sequence, found))
            self._changed.notify()

    def drop(self, sequence: TokenSequence, place: tuple[int, int]) -> None:
        """Drop tokens from the row of a sequence that waits or runs, before its next step.

        Args:
            sequence: the sequence.
            place: the positions of the tokens in the stream: the first, and the one after the last.
        """
        with self._changed:
            self._drops.append((sequence, place))
            self._changed.notify()

    def keep(self, sequence: TokenSequence, place: ResultPlace) -> Future[bool]:
        """Keep a tool result of a running sequence from its next step on.

        The future says whether it is kept. It is not kept if some of its tokens have left the
        window, if it does not fit, or if the sequence is not running.
        """
        future: Future[bool] = Future()
        with self._changed:
            self._keeps.append((sequence, place, future))
            self._changed.notify()
        return future

    def inspect(self, sequence: TokenSequence) -> Future[RowInspection | None]:
        """Inspect a sequence's row between two steps; the result is None if it is not running then.

        A step inspects at most one row, so that frequent requests do not slow down answers. All
        requests for one sequence share one inspection.
        """
        with self._changed:
            self._changed.notify()
            return self._inspections.setdefault(sequence, Future())

    def stop(self) -> None:
        """Take no more sequences. `run` returns when the current ones have ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def forget(self, checkpoint: str) -> None:
        """Drop a checkpoint, and free the row that holds its state."""
        with self._changed:
            self.scheduler.resting.pop(checkpoint, None)
            self._forgotten.append(checkpoint)
        self.store.drop(checkpoint)

    def load(self) -> EngineLoad:
        """Return the load of the engine."""
        with self._changed:
            plan = self.scheduler
            busy, resting, waiting = map(len, (plan.running, plan.resting, plan.waiting))
            return EngineLoad(plan.rows, busy, resting, waiting, self._seen, self._calls)

    @property
    def is_busy(self) -> bool:
        """Return whether sequences are running or waiting."""
        return bool(self.scheduler)

    # --- in the engine's thread

    def run(self) -> None:
        """Run steps until `stop`, and then until all sequences have ended."""
        while True:
            with self._changed:
                asked = self._inspections or self._keeps
                while not (self.scheduler or asked or self._stopping):
                    self._changed.wait()
                    asked = self._inspections or self._keeps
                if not (self.scheduler or asked):
                    return
                if self.scheduler.all_calling and not (self._resumed or asked or self._drops):
                    # Every change wakes this thread, and a new sequence may find a free row.
                    self._changed.wait(IDLE_SECONDS)
            self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Give rows to waiting sequences, decode a token of every answer, and read a chunk of a
        prompt.
        """
        self._cancel()
        self._drop()
        self._keep()
        self._go_on()
        self._admit()
        for batch in self.scheduler.decode_batches():
            self._decode(batch)
        self.on_step()
        self._prefill(self.scheduler.prefill_batch())
        self._inspect()
        self.on_step()

    def _cancel(self) -> None:
        with self._changed:
            forgotten, self._forgotten = self._forgotten, []
            known = (*self.scheduler.running, *self.scheduler.waiting)
            cancelled = [sequence for sequence in known if sequence.cancelled]
        for checkpoint in forgotten:
            self.prefixes.forget(checkpoint)
        for sequence in cancelled:
            if sequence.stage is Stage.PREFILL:
                try:
                    self._keep_prefix(sequence)  # its client may ask again
                except WeirError as error:
                    LOG.warning("the part of a prompt that was read is not kept: %s", error)
            self._fail(sequence, Cancelled("the turn was cancelled"))

    def _drop(self) -> None:
        """Drop the tokens for which `drop` was called."""
        with self._changed:
            drops, self._drops = self._drops, []
        for sequence, place in drops:
            sequence.dropped = (*sequence.dropped, place)
            if sequence.is_running:
                self._drop_from(sequence)

    def _drop_from(self, sequence: TokenSequence) -> None:
        """Drop from a sequence's row the tokens of `sequence.dropped` that the row has already
        read.
        """
        if sequence.row is None or not sequence.dropped:
            return
        seen = self.cache.origin + self.cache.seen[sequence.row]
        read = [(start, min(stop, seen)) for start, stop in sequence.dropped if start < seen]
        self.cache.drop(sequence.row, read)

    def _keep(self) -> None:
        """Keep the results for which `keep` was called."""
        with self._changed:
            keeps, self._keeps = self._keeps, []
        for sequence, place, future in keeps:
            future.set_result(sequence.is_running and self._keep_in_row(sequence, place))

    def _keep_in_row(self, sequence: TokenSequence, place: ResultPlace) -> bool:
        """Keep a result in the row of a sequence, if all of it can be kept."""
        assert sequence.row is not None
        if place in sequence.kept:
            return True
        row = sequence.row
        folded = self.cache.origin + self.cache.seen[row] - self.cache.waiting[row]
        if place.start < folded - self.cache.window:
            return False
        before = sequence.kept
        sequence.kept = tuple(sorted((*before, place)))
        try:
            self.cache.mark(row, replace(self.cache.marks[row], kept=sequence.kept_ranges))
        except WeirError:
            sequence.kept = before
            return False
        return True

    def _go_on(self) -> None:
        """Continue the sequences whose calls have finished."""
        with self._changed:
            resumed, self._resumed = self._resumed, []
        for sequence, found in resumed:
            if sequence.stage is not Stage.CALLING:
                continue
            if isinstance(found, Exception):
                self._fail(sequence, found)
                continue
            assert sequence.row is not None
            sequence.unread = [sequence.output_ids[-1], *found.ids]
            sequence.output_ids += found.ids
            sequence.num_brought += len(found.ids)
            sequence.alone = True
            sequence.sampler.constraint = found.constraint
            self._mark_header(sequence, found.header)
            sequence.stage = Stage.PREFILL

    def _mark_header(self, sequence: TokenSequence, header: int) -> None:
        """Mark the last `header` of a sequence's unread tokens as the header of its answer."""
        assert sequence.row is not None
        answer = self.cache.origin + self.cache.seen[sequence.row] + len(sequence.unread)
        before = self.cache.marks[sequence.row]
        self.cache.mark(sequence.row, replace(before, turn=answer - header, header=header))

    def _admit(self) -> None:
        """Give free rows to waiting sequences."""
        while True:
            with self._changed:
                admitted = self.scheduler.admit()
            if admitted is None:
                return
            sequence, resident = admitted
            try:
                self._place(sequence, resident=resident)
            except Exception as error:
                self._fail(sequence, error)

    def _place(self, sequence: TokenSequence, *, resident: bool) -> None:
        """Put the state from which a sequence starts into its row."""
        assert sequence.row is not None
        if sequence.prefilled is not None:
            (state, logits), sequence.prefilled = sequence.prefilled, None
            self.cache.put_row(sequence.row, state, check=False)
            sequence.stage = Stage.DECODE
            self._sample([sequence], logits[None])
            return
        checkpoint = None if sequence.parent is None else self.store.load(sequence.parent)
        sequence.pending = () if checkpoint is None else checkpoint.pending
        sequence.unread = [*sequence.pending, *sequence.prompt_ids]
        sequence.stage = Stage.PREFILL
        beginning: int | None = sequence.beginning
        if (known := self._find_prefix(sequence)) is not None:
            self.cache.put_row(sequence.row, known.state, check=False)
            sequence.num_read = sequence.reused = len(known.ids)
            sequence.unread = sequence.unread[len(known.ids) :]
        elif checkpoint is None:
            self.cache.reset_row(sequence.row, seed=sequence.seed)
        elif not resident:
            # No check is needed: a store returns what it was given, and a store on disk has a
            # checksum.
            self.cache.put_row(sequence.row, checkpoint.state, check=False)
        self._drop_from(sequence)
        if checkpoint is not None:
            beginning = self.cache.marks[sequence.row].beginning
        answer = self.cache.origin + self.cache.seen[sequence.row] + len(sequence.unread)
        header = sequence.header
        marks = Marks(beginning, answer - header, header, sequence.kept_ranges)
        self.cache.mark(sequence.row, marks)

    def _find_prefix(self, sequence: TokenSequence) -> PrefixState | None:
        """Return, for a prompt that is about to be read, the kept state that has read the most of
        its tokens. None if there is no such state.

        The state must not have read tokens of the answer's header, which are marked for this
        prompt.
        """
        if sequence.owner is None:
            return None
        most = len(sequence.unread) - max(1, sequence.header)
        key = _key_of(sequence, sequence.owner)
        found = self.prefixes.find(key, sequence.unread, most)
        if found is None and key.kept and sequence.parent is None:
            # A state that has not read the first result to be kept can be used, too.
            most = min(most, sequence.kept[0].start - self.cache.origin)
            found = self.prefixes.find(replace(key, kept=()), sequence.unread, most)
        return found

    def _keep_prefix(self, sequence: TokenSequence) -> None:
        """Keep the state of a row in which a part of a prompt has been read."""
        if sequence.owner is None or sequence.row is None or not sequence.num_read:
            return
        if sequence.output_ids:
            return  # it is reading the result of a call
        if len(sequence.unread) < max(1, sequence.header) or self.cache.broken:
            return
        ids = array("I", [*sequence.pending, *sequence.prompt_ids][: sequence.num_read])
        state = self.cache.take_row(sequence.row)
        key = _key_of(sequence, sequence.owner)
        if key.kept and self.cache.seen[sequence.row] + self.cache.origin <= sequence.kept[0].start:
            key = replace(key, kept=())
        self.prefixes.add(PrefixState(key, ids, state))

    def _size_of_piece(self, sequence: TokenSequence) -> int:
        """Return how many tokens of a prompt are read next.

        The end of a long beginning ends a piece, so that its state can be kept for other
        conversations.
        """
        size = self.scheduler.prefill_chunk
        if self._shares_beginning(sequence) and sequence.num_read < sequence.beginning:
            size = min(size, sequence.beginning - sequence.num_read)
        return size

    def _shares_beginning(self, sequence: TokenSequence) -> bool:
        """Return whether a prompt begins with a system message or tools that are worth keeping.

        A beginning shorter than a piece is read faster together with the tokens after it.
        """
        return (
            sequence.owner is not None
            and sequence.parent is None
            and self.scheduler.prefill_chunk <= sequence.beginning < len(sequence.prompt_ids)
        )

    def _decode(self, batch: list[TokenSequence]) -> None:
        """Feed the last token of each answer, and sample the next."""
        try:
            fed, logits = self._run({sequence: sequence.output_ids[-1:] for sequence in batch})
        except Exception as error:
            self._fail_batch(batch, error)
            return
        self._calls += 1
        self._sample(fed, logits)

    def _prefill(self, batch: list[TokenSequence]) -> None:
        """Feed a chunk of each prompt; sample the first token of answers whose prompt is read."""
        if not batch:
            return
        sizes = {one: self._size_of_piece(one) for one in batch}
        try:
            fed, logits = self._run({one: one.unread[:size] for one, size in sizes.items()})
        except Exception as error:
            if len(batch) == 1 or self.cache.broken:
                self._fail_batch(batch, error)
                return
            for sequence in batch:
                # Read one at a time, so that the sequence with the error is found.
                sequence.alone = True
            return
        ready = []
        for at, sequence in enumerate(fed):
            size = sizes[sequence]
            sequence.num_read += len(sequence.unread[:size])
            sequence.unread = sequence.unread[size:]
            self._drop_from(sequence)
            if sequence.unread:
                if sequence.num_read == sequence.beginning and self._shares_beginning(sequence):
                    self._keep_prefix(sequence)
                continue
            try:
                if sequence.forks and not sequence.output_ids:
                    self._fork(sequence, logits[at])
            except Exception as error:
                self._fail(sequence, error)  # its forks fail with it
                continue
            sequence.stage = Stage.DECODE
            ready.append(at)
        self._sample([fed[at] for at in ready], logits[ready])

    def _run(self, tokens: Mapping[TokenSequence, list[int]]) -> tuple[list[TokenSequence], Tensor]:
        """Call the model once over the rows of some sequences; return those that took their tokens,
        and the logits after them [sequences, vocabulary]. The others have failed.
        """
        by_row = {sequence.row: sequence for sequence in tokens if sequence.row is not None}
        logits, failed = self.runner.run({row: tokens[one] for row, one in by_row.items()})
        self._seen += sum(map(len, tokens.values()))
        for row, error in failed.items():
            self._fail(by_row[row], error)
        good = [at for at, row in enumerate(by_row) if row not in failed]
        fed = [sequence for row, sequence in by_row.items() if row not in failed]
        return fed, logits[good] if failed else logits

    def _fork(self, sequence: TokenSequence, logits: Tensor) -> None:
        """Let the forks of a sequence start where its prompt ends."""
        assert sequence.row is not None
        state = self.cache.take_row(sequence.row)
        with self._changed:
            for fork in sequence.forks:
                fork.prefilled = (state, logits)
                self.scheduler.add_first(fork)

    def _sample(self, sequences: list[TokenSequence], logits: Tensor) -> None:
        """Sample the next token of each answer from the logits [sequences, vocabulary]."""
        tokens = sample([sequence.sampler for sequence in sequences], logits)
        for sequence, token in zip(sequences, tokens, strict=True):
            try:
                if isinstance(token, Exception):
                    raise token
                self._append(sequence, token)
            except Exception as error:
                self._fail(sequence, error)

    def _append(self, sequence: TokenSequence, token: SampledToken) -> None:
        """Add a token to an answer, which may end it."""
        sequence.output_ids.append(token.id)
        reason = sequence.listener.on_token(token)
        if token.id in sequence.stop_ids or sequence.sampler.done:
            reason = "stop"
        elif reason is None and sequence.num_sampled >= sequence.max_tokens:
            reason = "length"
        if reason == "stop" and sequence.on_stop is not None:
            reason = sequence.on_stop()
            if reason is None:
                sequence.stage = Stage.CALLING
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: TokenSequence, reason: str) -> None:
        """Save the end of a sequence; its listener is told when it has been saved."""
        assert sequence.row is not None
        # There may be no memory for the copy. The sequence then fails, so it must not be finished
        # yet.
        state = self.cache.take_row(sequence.row) if sequence.record else None
        with self._changed:
            self.scheduler.finish(sequence, at_checkpoint=state is not None)
        if state is None or sequence.record is None:
            sequence.listener.on_finish(reason)
            return

        def on_saved(error: Exception | None) -> None:
            if error is None:
                sequence.listener.on_finish(reason)
                return
            with self._changed:
                self.scheduler.resting.pop(sequence.id, None)
            if sequence.may_be_lost:
                sequence.listener.on_finish(reason)
            else:
                sequence.listener.on_failure(error)

        try:
            checkpoint = Checkpoint(state, (sequence.output_ids[-1],))
            self.store.save(checkpoint, sequence.record(sequence, reason), on_saved)
        except Exception as error:
            on_saved(error)

    def _fail(self, sequence: TokenSequence, error: Exception) -> None:
        """End a sequence without saving it, and its forks if they still wait for its prompt."""
        if sequence.stage is Stage.FINISHED:
            return
        waits = sequence.stage in (Stage.WAITING, Stage.PREFILL) and not sequence.output_ids
        forks = sequence.forks if waits else []
        with self._changed:
            self.scheduler.finish(sequence, at_checkpoint=False)
        sequence.listener.on_failure(error)
        for fork in forks:
            self._fail(fork, error)

    def _fail_batch(self, batch: list[TokenSequence], error: Exception) -> None:
        """Fail the sequences of a call that failed.

        If the call was interrupted during a fold, no row can be trusted: all running sequences fail
        and all rows are emptied. Checkpoints are not affected.
        """
        for sequence in batch:
            self._fail(sequence, error)
        if not self.cache.broken:
            return
        for sequence in list(self.scheduler.running):
            self._fail(sequence, error)
        with self._changed:
            self.scheduler.resting.clear()
        self.cache.reset()

    def _inspect(self) -> None:
        """Answer the oldest request for an inspection."""
        with self._changed:
            sequence = next(iter(self._inspections), None)
            if sequence is None:
                return
            future = self._inspections.pop(sequence)
        if not future.set_running_or_notify_cancel():
            return
        try:
            found = None
            if sequence.row is not None and sequence.is_running:
                found = RowInspection(self.cache.holding(sequence.row), tuple(sequence.output_ids))
            future.set_result(found)
        except Exception as error:
            future.set_exception(error)


def _key_of(sequence: TokenSequence, owner: str) -> PrefixKey:
    """Return the key of the prompt states that a sequence may continue from. The sequence's own
    states are kept under the same key.
    """
    if sequence.parent is not None:
        return PrefixKey(owner, sequence.parent, 0, 0, sequence.kept_ranges)
    return PrefixKey(owner, None, sequence.beginning, sequence.seed, sequence.kept_ranges)


def sizes_of(engine: Engine) -> tuple[int, ...]:
    """Return the row counts of compiled decode calls: 1, 4, 16, ... and all; only 1 if
    deterministic.
    """
    rows = engine.load().rows
    sizes = [1]
    while not engine.deterministic and sizes[-1] < rows:
        sizes.append(min(GROWTH * sizes[-1], rows))
    return tuple(sizes)


def compile_engine(engine: Engine, **options: Any) -> bool:
    """Run an engine's decode steps natively on a CPU, or under `torch.compile` on a GPU.

    Answers differ only by rounding. On a GPU, the program for each number of rows is compiled when
    a call first has that many. Returns whether `torch.compile` is used.
    """
    compiles = compile_steps(engine.model, **options)
    if compiles:
        engine.runner.sizes = sizes_of(engine)
    return compiles
