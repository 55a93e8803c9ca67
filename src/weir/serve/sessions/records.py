"""Saved turns: a checkpoint of the row, and a record with the owner and the messages.

This module knows nothing about HTTP or models.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from weir.cache import RowFormat, RowState
from weir.errors import WeirError
from weir.policies import FileFacts, ListOf, Whole, read_facts
from weir.serve.messages import Message, ResultPlace

OnSaved = Callable[[Exception | None], None]
"""Called once: with None when a turn is safely saved, or when it is kept in memory because the disk
is full; otherwise with the reason why the turn cannot be saved.
"""
TOPIC = 80
"""Length of `TurnRecord.topic` in characters."""


class NameTaken(WeirError):
    """The owner already has a session with this name."""


class StorageFull(WeirError):
    """Nothing can be saved until there is room."""


DISK_FULL = (
    "the disk that stores sessions is full, so turns that must be saved are not answered. Delete "
    "sessions or free some space"
)


def describe_full(needed: int, free: int | None) -> str:
    """Describe that the disk is full, with the needed and the free bytes."""
    has = "" if free is None else f". Needed: {needed:,} bytes, free: {max(free, 0):,} bytes"
    return DISK_FULL + has


HIDDEN = "~"
"""First character of the name of a session whose turns the client does not want stored.

Names that clients give to sessions cannot begin with it.
"""


def is_hidden(session: str) -> bool:
    """Return whether a session's turns can be continued, but not listed or fetched by their ids."""
    return session.startswith(HIDDEN)


NOT_KEPT = "the state that this turn continues is no longer kept"


class Checkpoint:
    """The end of a turn, with everything needed to continue from there.

    Args:
        state: the state of the row, or a function that reads it and raises a WeirError if it
            cannot.
        pending: tokens of the turn that the row has not read yet: the last token of the answer.
    """

    def __init__(self, state: RowState | Callable[[], RowState], pending: tuple[int, ...]) -> None:
        self._state = state
        self.pending = pending

    @property
    def state(self) -> RowState:
        """The state of the row. A state that is not in memory is read again on every access."""
        return self._state if isinstance(self._state, RowState) else self._state()

    def to_bytes(self) -> bytes:
        """Write the state with the pending tokens."""
        return self.state.to_bytes(pending=list(self.pending))

    @classmethod
    def from_bytes(
        cls, data: bytes, row_format: RowFormat, pending: tuple[int, ...], *, trusted: bool = True
    ) -> Checkpoint:
        """Read what `to_bytes` wrote.

        Args:
            data: the bytes.
            row_format: the format that the row must have.
            pending: the pending tokens of the turn to which the bytes belong.
            trusted: whether the bytes are known to be as they were written, so that fewer checks
                are needed.

        Raises:
            WeirError: the bytes are damaged, belong to another turn, or describe an impossible row.
        """
        state, notes = RowState.from_bytes(data, row_format, trusted=trusted)
        read_facts(_CheckpointNotes, notes, "the notes of the row")
        if tuple(notes["pending"]) != pending:
            raise WeirError("it is the end of another turn")
        return cls(state, pending)


class _CheckpointNotes(FileFacts):
    pending: ListOf[Whole]


@dataclass(frozen=True)
class TurnRecord:
    """A saved turn: its owner, its place in a conversation, and its messages.

    Attributes:
        node: the id of the turn.
        owner: hash of the API key of the request; empty if the server needs none.
        session: of the sessions that the turn is still in, the one it was added to first.
        parent: the id of the turn that this one continues; None for the first turn of a stream.
        chain: hash of all messages of the conversation, up to and including the answer of this
            turn.
        messages: the messages of this turn, with its answer last.
        last: the last token of the answer, which the row has not read yet.
        seen: number of tokens of the stream so far, including `last`.
        usage: numbers about the turn by name, for the `usage` of its answer.
        created: when the turn ended, in seconds since 1970.
        ids: the tokens of this turn, prompt and answer, as `pack_ids` writes them. The last one is
            number `seen` of the stream. Empty if unknown.
        kept: the places in the stream of the tool results that the turn's state keeps permanently.
    """

    node: str
    owner: str
    session: str
    parent: str | None
    chain: str
    messages: tuple[Message, ...]
    last: int
    seen: int
    usage: dict[str, int] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    ids: bytes = b""
    kept: tuple[ResultPlace, ...] = ()

    @property
    def topic(self) -> str:
        """The beginning of the last user message, on one line."""
        users = (message.content for message in reversed(self.messages) if message.role == "user")
        line = " ".join(next(users, "")[: 4 * TOPIC].split())[:TOPIC]
        return line.encode("utf-8", "replace").decode()


Turn = tuple[Checkpoint, TurnRecord]
"""A turn as it is saved."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids in four bytes each."""
    return array("I", ids).tobytes()


def unpack_ids(ids: bytes) -> array[int]:
    """Return the token ids that `pack_ids` wrote."""
    found = array("I")
    found.frombytes(ids)
    return found


@dataclass(frozen=True)
class TurnTokens:
    """The tokens of one turn, as `pack_ids` writes them. They end before position `end` of the
    stream.
    """

    node: str
    end: int
    ids: bytes

    @property
    def start(self) -> int:
        """The position of the turn's first token in the stream."""
        return self.end - len(self.ids) // 4


@dataclass(frozen=True)
class SessionSummary:
    """A session as lists show it.

    Attributes:
        id: the name of the session.
        head: the id of its newest turn.
        turns: number of its turns that are kept.
        created, used: when the oldest kept turn and the newest turn ended, in seconds since 1970.
        seen, usage: as in the `TurnRecord` of the newest turn.
        topic: the topic of the newest turn with a user message; empty if there is none.
    """

    id: str
    head: str
    turns: int
    created: float
    used: float
    seen: int
    usage: dict[str, int]
    topic: str


def find_path(node: str, parents: Mapping[str, str | None]) -> list[str]:
    """Return the ids of a turn and its ancestors, the oldest first, as far as `parents` contains
    them.
    """
    path: dict[str, None] = {}
    at: str | None = node
    while at is not None and at in parents and at not in path:
        path[at] = None
        at = parents[at]
    return list(reversed(path))
