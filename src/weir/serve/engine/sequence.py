"""A sequence: a prompt that is fed to a row of the cache, and the answer sampled after it.

A sequence starts at a checkpoint (the end of an earlier turn), or at the beginning of a new stream.
If the sequence is saved, its end is a new checkpoint.
Checkpoints never change, so any of them can be continued more than once, and again after a failure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from weir.cache import RowState
from weir.serve.engine.sampler import SampledToken, Sampler
from weir.serve.messages import ResultPlace
from weir.serve.sessions.records import TurnRecord


class Stage(enum.Enum):
    """The stages of a sequence."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    CALLING = "calling"
    FINISHED = "finished"


class Listener(Protocol):
    """Receives the tokens of a sequence in the engine's thread. It must not block."""

    def on_token(self, token: SampledToken) -> str | None:
        """Take the next token of the answer. Return "stop" if the answer ends with it."""

    def on_finish(self, reason: str) -> None:
        """Handle the end of the sequence. If it must be saved, it has been saved.

        `reason` is "stop" or "length".
        """

    def on_failure(self, error: Exception) -> None:
        """Handle a failure of the sequence. The checkpoint it started from is unchanged."""


@dataclass(eq=False)
class TokenSequence:
    """One answer to one prompt.

    Attributes:
        id: the name of the sequence, and of the checkpoint at its end.
        parent: the checkpoint at which it starts; None for a new stream.
        prompt_ids: tokens to feed before the answer, at least one.
        max_tokens: maximum number of tokens of the answer, at least 1.
        stop_ids: tokens that end the answer.
        sampler: samples the answer's tokens.
        listener: is told about each token, and about the end.
        holder: the client whose share of the rows it uses (`Scheduler`): a key or, without keys, an
            address.
        seed: seed of the row's random draws, if the stream is new.
        beginning: how many of `prompt_ids` are the stream's beginning, if it is new.
        header: how many tokens at the end of `prompt_ids` are the header of the answer.
        owner: who may share the state after a part of the prompt (`PrefixStates`); None if no such
            state is kept.
        may_be_lost: whether the answer is given even if its end cannot be saved.
        forks: other answers to the same prompt, which start when this sequence has read it.
        record: makes the record that is saved with its end, from the sequence and the reason why it
            ended (`Listener.on_finish`); None if the end is not saved.
        on_stop: called in the engine's thread when a token would end the answer with the reason
            "stop". Returns the reason why the answer ends, or None if it continues with tokens from
            `Engine.resume`. Until then, the sequence keeps its row and waits. Without this
            function, such a token always ends the answer.
        dropped: places in the stream of tokens that are dropped from the row. The engine adds those
            of later calls of `Engine.drop`.
        kept: places of results that the row keeps permanently, in order. The engine adds those of
            later calls of `Engine.keep`.
        cancelled: whether the next step must end the sequence; any thread may set it.
        stage: its progress. The engine alone sets this field and the following ones.
        row: the row of the cache; None before the sequence has one.
        pending: tokens of `parent` that are fed before those of the prompt.
        unread: tokens still to be fed before the answer.
        num_read: how many tokens before the answer have been read, including `pending` ones and
            those of a `PrefixState`. Tokens that `Engine.resume` has brought count, too.
        reused: tokens of the prompt that a `PrefixState` had read already.
        alone: whether its prompt must be read in a separate call.
        output_ids: the answer so far, with the tokens that `Engine.resume` has brought. The last
            token, and those that are also in `unread`, have not been fed yet.
        num_brought: how many of `output_ids` were brought, and not sampled.
        prefilled: for a fork, the state and logits [vocabulary] at the end of the prompt.
    """

    id: str
    parent: str | None
    prompt_ids: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    sampler: Sampler
    listener: Listener
    holder: str = ""
    seed: int = 0
    beginning: int = 0
    header: int = 0
    owner: str | None = None
    may_be_lost: bool = False
    forks: list[TokenSequence] = field(default_factory=list)
    record: Callable[[TokenSequence, str], TurnRecord] | None = None
    on_stop: Callable[[], str | None] | None = None
    dropped: tuple[tuple[int, int], ...] = ()
    kept: tuple[ResultPlace, ...] = ()

    stage: Stage = Stage.WAITING
    cancelled: bool = False
    row: int | None = None
    pending: tuple[int, ...] = ()
    unread: list[int] = field(default_factory=list)
    num_read: int = 0
    reused: int = 0
    alone: bool = False
    output_ids: list[int] = field(default_factory=list)
    num_brought: int = 0
    prefilled: tuple[RowState, Tensor] | None = None

    @property
    def kept_ranges(self) -> tuple[tuple[int, int], ...]:
        """The first place of each result that is kept, and the one after its last."""
        return tuple((place.start, place.stop) for place in self.kept)

    @property
    def is_running(self) -> bool:
        """Whether it reads its prompt, generates its answer, or waits for a call that it made."""
        return self.stage in (Stage.PREFILL, Stage.DECODE, Stage.CALLING)

    @property
    def num_sampled(self) -> int:
        """Number of tokens of the answer that were sampled."""
        return len(self.output_ids) - self.num_brought
