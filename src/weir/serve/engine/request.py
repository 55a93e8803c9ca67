"""One turn of a session: tokens that are read, then an answer token by token.

A turn starts at a node, the end of an earlier turn, and its own end is a new node; nodes never
change, so that any of them can be gone on from, more than once and again after a failure. Knows
nothing about text, models or rows' contents.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from weir.cache import RowState
from weir.serve.engine.sampler import SampledToken, Sampler
from weir.serve.sessions import TurnRecord


class Stage(enum.Enum):
    """How far a turn has come."""

    WAITING = "waiting"
    READING = "reading"
    ANSWERING = "answering"
    DONE = "done"


class Listener(Protocol):
    """Who asked for a turn. Called in the engine's thread, so that nobody may take long."""

    def chose(self, choice: SampledToken) -> str | None:
        """A token of the answer has come.

        Returns:
            Why the answer ends with it, if it does: "stop"; None to go on.
        """

    def ended(self, reason: str) -> None:
        """The turn is over and saved: "stop", or "length"."""

    def failed(self, error: Exception) -> None:
        """The turn never happened; what it started from is as it was."""


@dataclass(eq=False)
class Sequence:
    """One turn.

    Attributes:
        node: the name of its end.
        start: the node it goes on from; None for a new stream.
        ids: what is to be read before the answer, one token or more.
        limit: tokens of the answer, 1 or more.
        stops: tokens that end it.
        chooser: how its tokens are chosen.
        listener: who is told.
        client: who is asking; turns of clients take turns.
        seed: of the row's draws, where the stream is new.
        beginning: how many of `ids` are the stream's beginning, where it is new.
        header: how many of the last of `ids` stand for the answer to come.
        answers: further turns that begin where its prompt ends: other answers to the same prompt.
        record: makes the record of the turn, of it and of why it ended (`Listener.ended`), which is
            saved with its end; None where the end is not saved.
    """

    node: str
    start: str | None
    ids: list[int]
    limit: int
    stops: frozenset[int]
    chooser: Sampler
    listener: Listener
    client: str = ""
    seed: int = 0
    beginning: int = 0
    header: int = 0
    answers: list[Sequence] = field(default_factory=list)
    record: Callable[[Sequence, str], TurnRecord] | None = None

    # How it goes; the engine's alone.
    stage: Stage = Stage.WAITING
    cancelled: bool = False
    row: int | None = None
    todo: list[int] = field(default_factory=list)
    read: int = 0
    apart: bool = False  # its prompt is read by itself
    chosen: list[int] = field(default_factory=list)
    forked: tuple[RowState, Tensor] | None = None
