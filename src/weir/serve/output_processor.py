"""A listener that makes text of an answer, saves its record, and passes both on to a mailbox.

Lives in the engine's thread. Knows nothing about event loops or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from weir.cache import StreamingCache
from weir.pools import Beginning
from weir.serve.engine import (
    FailureEvent,
    FinishEvent,
    Notifier,
    OutputQueue,
    SampledToken,
    Sequence,
    StreamStats,
    TokenEvent,
)
from weir.stream import Detokenizer


@dataclass(frozen=True)
class Answer:
    """An answer that has ended.

    Attributes:
        text: all of it.
        cut: whether it was to go on, and had no tokens left.
        standing: of its stream.
    """

    text: str
    cut: bool
    standing: StreamStats


class OutputProcessor:
    """Who is told about one answer.

    Args:
        answer: which of the request's, from 0.
        cache: the engine's.
        tokenizer: of its model.
        stops: texts that end the answer.
        mailbox: who is told further.
        bell: rung when the engine has told of a step's tokens.
        saved: called when the end of the turn is safe, before the client hears of it.
        kept: special tokens that are part of the answer's text.

    Attributes:
        turn: the turn; set before it is submitted.
    """

    turn: Sequence

    def __init__(
        self,
        answer: int,
        cache: StreamingCache,
        tokenizer: PreTrainedTokenizerBase,
        stops: list[str],
        mailbox: OutputQueue,
        bell: Notifier,
        saved: Callable[[], None],
        kept: Collection[int] = (),
    ) -> None:
        self._answer = answer
        self._cache = cache
        self._text = Detokenizer(tokenizer, stops, kept)
        self._said: list[str] = []
        self._mailbox = mailbox
        self._bell = bell
        self._saved = saved
        self._rest: str | None = None  # text that was held back until the answer ended
        self._standing: StreamStats | None = None

    def chose(self, choice: SampledToken) -> str | None:
        """A token has come: its text goes on; "stop" where a stop text is whole."""
        turn = self.turn
        ends = choice.token in turn.stops
        new = "" if ends else self._text.add(choice.token)
        if new:
            self._said.append(new)
        if self._mailbox.full:
            turn.cancelled = True  # nobody fetches it; the next step ends it
        elif self._mailbox.put(TokenEvent(self._answer, new, choice, time.perf_counter())):
            self._bell.add(self._mailbox)
        whole = turn.chooser.done or len(turn.chosen) >= turn.limit
        if ends or self._text.stopped or whole:
            # The row is the turn's until it has ended, and may be another's when it is saved.
            assert turn.row is not None
            self._standing = standing(self._cache, turn.row)
        return "stop" if self._text.stopped else None

    def finish(self, reason: str) -> Answer:
        """The whole answer, once it has ended."""
        assert self._standing is not None
        if self._rest is None:
            self._rest = "" if self._text.stopped else self._text.end()
        return Answer("".join([*self._said, self._rest]), reason == "length", self._standing)

    def ended(self, reason: str) -> None:
        """The turn is safe: the client may hear of its end."""
        try:
            answer = self.finish(reason)
            self._saved()
        except Exception as error:
            self.failed(error)
            return
        tokens, rest = len(self.turn.chosen), self._rest or ""
        self._mailbox.post(FinishEvent(self._answer, rest, reason, tokens, answer.standing))

    def failed(self, error: Exception) -> None:
        """The turn never happened."""
        self._mailbox.post(FailureEvent(self._answer, error))


def standing(cache: StreamingCache, row: int) -> StreamStats:
    """Where a row's stream stands after its last token was chosen and before it is read."""
    report = cache.report(row)
    seen = cache.seen[row]
    held = max((layer["held"] for layer in report["layers"]), default=0)
    folds = (seen - cache.waiting[row]) // cache.chunk
    pools = [pool for plan in cache.plans for pool in plan.spec.pipe.pools]
    slots = max((pool.n for pool in pools if isinstance(pool, Beginning)), default=0)
    beginning = cache.marks[row].beginning or 0
    return StreamStats(
        seen=seen + 1,
        held=held,
        bytes=cache.nbytes // (cache.batch or 1),
        folds=folds,
        pinned=min(slots, beginning),
        beginning=beginning,
    )
