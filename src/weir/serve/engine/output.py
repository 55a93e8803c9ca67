"""The output of a request: text made from sampled tokens, on its way to an event loop.

`OutputProcessor` runs in the engine's thread. `EventSender` takes its events to the `OutputQueue`
of the request that waits in an event loop. The engine never waits for a client: a queue has a fixed
size, and a client that does not read is disconnected. This file does not use HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weir.cache import StreamingCache
from weir.pools import Beginning
from weir.serve.engine.sampler import SampledToken
from weir.serve.engine.sequence import TokenSequence
from weir.stream import Detokenizer


@dataclass(frozen=True)
class StreamStats:
    """Tokens and bytes of a stream at the end of an answer.

    Attributes:
        seen: tokens so far, including the last one of the answer.
        held: slots in use in the fullest layer, including tokens that wait for a fold.
        bytes: size of the row in bytes, which changes only if the policy keeps every token.
        folds: number of folds so far.
        pinned: tokens of the stream's beginning that are never evicted.
        beginning: number of tokens of the stream's beginning.
        forgotten: tokens that no layer and KV head holds any longer.
        pinned_outputs: tokens of pinned outputs of tools.
    """

    seen: int
    held: int
    bytes: int
    folds: int
    pinned: int
    beginning: int
    forgotten: int
    pinned_outputs: int

    @classmethod
    def of(cls, cache: StreamingCache, row: int, held: int) -> StreamStats:
        """Make the stats of a row whose last token is sampled and not fed yet.

        `held` is how many tokens of the stream are still held.
        """
        report, seen = cache.report(row), cache.seen[row]
        pools = [pool for plan in cache.plans for pool in plan.spec.pipe.pools]
        slots = max((pool.n for pool in pools if isinstance(pool, Beginning)), default=0)
        beginning = cache.marks[row].beginning or 0
        return cls(
            seen=seen + 1,
            held=max((layer["held"] for layer in report["layers"]), default=0),
            bytes=cache.nbytes // (cache.batch or 1),
            folds=(seen - cache.waiting[row]) // cache.chunk,
            pinned=min(slots, beginning),
            beginning=beginning,
            forgotten=seen - held,
            pinned_outputs=sum(stop - start for start, stop in cache.marks[row].kept),
        )


@dataclass(frozen=True)
class TokenEvent:
    """A token of one of the request's answers, sampled `at` a time of `time.perf_counter`."""

    answer: int
    text: str
    token: SampledToken
    at: float


@dataclass(frozen=True)
class RoundEvent:
    """The end of a part of an answer that called one of the server's tools. The answer continues.

    Attributes:
        text: the rest of the part, which was held back until now.
        opens_thoughts: whether the next part begins inside thoughts.
    """

    answer: int
    text: str
    opens_thoughts: bool = False


@dataclass(frozen=True)
class ToolUse:
    """A call of one of the server's tools.

    Attributes:
        tokens: number of tokens of the result and the control tokens around it.
    """

    name: str
    arguments: str
    result: str
    tokens: int


@dataclass(frozen=True)
class FinishEvent:
    """The end of an answer. If the answer must be saved, it has been saved.

    Attributes:
        answer: the index of the answer in the request.
        text: the rest of the answer, which was held back until now.
        reason: "stop" or "length".
        tokens: number of the answer's tokens, including an end token.
        stats: tokens and bytes of the stream.
        used: the calls of the server's tools in the answer.
        lost: descriptions of the turns that have lost tokens (`describe_forgotten`).
    """

    answer: int
    text: str
    reason: str
    tokens: int
    stats: StreamStats
    used: tuple[ToolUse, ...] = ()
    lost: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class FailureEvent:
    """The failure of an answer."""

    answer: int
    error: Exception


AnswerEvent = TokenEvent | RoundEvent | FinishEvent
OutputEvent = AnswerEvent | FailureEvent


class OutputQueue:
    """The events of one request, for its event loop.

    `overrun` is set when more than `size` tokens are waiting. Tokens beyond that are lost.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, size: int, overrun: asyncio.Event | None = None
    ) -> None:
        self.loop = loop
        self.size = size
        self.overrun = overrun or asyncio.Event()
        self._events: list[OutputEvent] = []
        self._ready = asyncio.Event()

    def put(self, event: OutputEvent) -> None:
        """Add an event. A token is lost if too many are waiting."""
        if isinstance(event, TokenEvent) and len(self._events) >= self.size:
            self.overrun.set()
            return
        self._events.append(event)
        self._ready.set()

    async def take(self) -> list[OutputEvent]:
        """Wait for events, and take all of them."""
        await self._ready.wait()
        self._ready.clear()
        events, self._events = self._events, []
        return events


class EventSender:
    """Sends events from any thread to the queues of event loops, in batches.

    A step of the engine has an event for every row, and waking a loop takes as long as adding ten
    events to a queue.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[tuple[OutputQueue, OutputEvent]] = []

    def add(self, queue: OutputQueue, event: OutputEvent) -> None:
        """Add an event, to be sent with the next `send`."""
        with self._lock:
            self._events.append((queue, event))

    def send(self) -> None:
        """Send all added events, waking each loop once."""
        with self._lock:  # held while loops are woken, too, so that events arrive in order
            events, self._events = self._events, []
            for loop in {queue.loop for queue, _ in events}:
                those = [(queue, event) for queue, event in events if queue.loop is loop]
                with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits
                    loop.call_soon_threadsafe(_put_all, those)

    def send_now(self, queue: OutputQueue, event: OutputEvent) -> None:
        """Send an event, and all events that were added before."""
        self.add(queue, event)
        self.send()


def _put_all(events: list[tuple[OutputQueue, OutputEvent]]) -> None:
    for queue, event in events:
        queue.put(event)


@dataclass(frozen=True)
class AnswerRound:
    """The text of a part of an answer.

    Attributes:
        opens_thoughts: whether the part begins inside thoughts; None for the first part, where this
            depends on the end of the prompt.
    """

    text: str
    opens_thoughts: bool | None = None


@dataclass(eq=False, repr=False)
class OutputProcessor:
    """The listener of one sequence: turns its tokens into text and sends events to a queue.

    Args:
        make_detokenizer: makes the detokenizer of a part of the answer.

    Attributes:
        on_saved: called at the end of the answer, after it was saved (if it must be), and before
            the client is told that it ended.
        describe: describes the turns that have lost tokens, from the tokens that are still held and
            the number that were read.
        stats: the stats of its stream; set with the last token.
        held: the tokens of the stream that are still held at that time.
        rounds: the earlier parts of the answer, each of which called one of the server's tools.
        used: these calls.
        opens_thoughts: as in `AnswerRound`, for the current part.
    """

    answer: int
    cache: StreamingCache
    make_detokenizer: Callable[[], Detokenizer]
    queue: OutputQueue
    sender: EventSender
    on_saved: Callable[[], None]
    describe: Callable[[Tensor, int], Iterable[dict[str, Any]]] = lambda held, read: ()
    sequence: TokenSequence = field(init=False)
    stats: StreamStats = field(init=False)
    held: Tensor = field(init=False)
    detokenizer: Detokenizer = field(init=False)
    rounds: list[AnswerRound] = field(default_factory=list)
    used: list[ToolUse] = field(default_factory=list)
    opens_thoughts: bool | None = None
    _text: list[str] = field(default_factory=list)
    _rest: str | None = None  # text held back until the answer ended

    def __post_init__(self) -> None:
        self.detokenizer = self.make_detokenizer()

    def on_token(self, token: SampledToken) -> str | None:
        """Send the text that a token adds. Returns "stop" if it completes a stop text."""
        sequence = self.sequence
        is_stop = token.id in sequence.stop_ids
        text = "" if is_stop else self.detokenizer.add(token.id)
        if text:
            self._text.append(text)
        if self.queue.overrun.is_set():
            sequence.cancelled = True  # the client does not read; the next step ends the sequence
        else:
            at = time.perf_counter()
            self.sender.add(self.queue, TokenEvent(self.answer, text, token, at))
        done = sequence.sampler.done or sequence.num_sampled >= sequence.max_tokens
        if is_stop or self.detokenizer.stopped or done:
            # By the time the answer is saved, its row may belong to another sequence.
            assert sequence.row is not None
            self.held = self.cache.held_tokens(sequence.row)
            self.stats = StreamStats.of(self.cache, sequence.row, len(self.held))
        return "stop" if self.detokenizer.stopped else None

    def finish(self) -> str:
        """Return the text of the whole answer, or of its last part, once it has ended."""
        if self._rest is None:
            self._rest = "" if self.detokenizer.stopped else self.detokenizer.end()
        return "".join([*self._text, self._rest])

    def next_round(self, use: ToolUse, *, opens_thoughts: bool = False) -> None:
        """Begin the next part of the answer, after a call of one of the server's tools.

        Args:
            use: that call.
            opens_thoughts: whether the next part begins inside thoughts.
        """
        text = self.finish()
        self.rounds.append(AnswerRound(text, self.opens_thoughts))
        self.used.append(use)
        end = RoundEvent(self.answer, self._rest or "", opens_thoughts)
        self._text, self._rest, self.opens_thoughts = [], None, opens_thoughts
        self.detokenizer = self.make_detokenizer()
        self.sender.send_now(self.queue, end)

    def all_rounds(self) -> list[AnswerRound]:
        """Return all parts of the answer, once it has ended."""
        return [*self.rounds, AnswerRound(self.finish(), self.opens_thoughts)]

    def on_finish(self, reason: str) -> None:
        """Send the end of the answer. If the answer must be saved, it has been saved."""
        try:
            self.finish()
            self.on_saved()
            lost = (
                tuple(self.describe(self.held, self.stats.seen - 1)) if self.stats.forgotten else ()
            )
        except Exception as error:
            self.on_failure(error)
            return
        tokens, rest = self.sequence.num_sampled, self._rest or ""
        end = FinishEvent(self.answer, rest, reason, tokens, self.stats, tuple(self.used), lost)
        self.sender.send_now(self.queue, end)

    def on_failure(self, error: Exception) -> None:
        """Send that the answer has failed."""
        self.sender.send_now(self.queue, FailureEvent(self.answer, error))
