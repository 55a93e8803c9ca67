"""What is kept of turns beside their state: whose they are, and where in a conversation they stand.

Records, and a protocol for who keeps them. Knows nothing about HTTP or models.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Protocol

from weir.errors import WeirError
from weir.serve.engine import Checkpoint, CheckpointStore
from weir.serve.messages import Message


class NameTaken(WeirError):
    """There is a session of this name already."""


TOPIC = 80
"""Characters of what a conversation is called by."""


@dataclass(frozen=True)
class TurnRecord:
    """A saved turn.

    Attributes:
        node: its name on the shelf.
        owner: hash of the key that it was asked for with; empty where the server needs none.
        session: the session it belongs to; names are an owner's own.
        parent: the node it goes on from; None at the beginning of a stream.
        chain: the hash of all messages up to its answer, that one too.
        messages: those of this turn, its answer last.
        last: the last token of its answer.
        seen: tokens of the stream so far, the last of its answer too.
        usage: what it took, as it was told to the client.
        created: when it ended, in seconds since 1970.
        ids: the tokens of this turn, what was fed and the answer, as `pack_ids` writes them: they
            stand in the stream right before `seen`. Empty where they are not known.
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

    @property
    def topic(self) -> str:
        """The beginning of what was last said to the model, in a line."""
        said = next((each.content for each in reversed(self.messages) if each.role == "user"), "")
        line = " ".join(said[: 4 * TOPIC].split())[:TOPIC]
        return line.encode("utf-8", "replace").decode()


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids in four bytes each: a prompt of a million is kept as such."""
    return array("I", ids).tobytes()


def unpack_ids(ids: bytes) -> array[int]:
    """The token ids that `pack_ids` has written."""
    found = array("I")
    found.frombytes(ids)
    return found


@dataclass(frozen=True)
class TurnTokens:
    """The tokens of one turn in its stream.

    Attributes:
        node: the turn's end.
        end: how many tokens the stream has there.
        ids: `TurnRecord.ids`.
    """

    node: str
    end: int
    ids: bytes

    @property
    def start(self) -> int:
        """The place in the stream of its first token."""
        return self.end - len(self.ids) // 4


@dataclass(frozen=True)
class SessionSummary:
    """A conversation of an owner's, with no more of what was said than it is called by.

    Attributes:
        id: its name, among the owner's.
        head: the node of its newest turn.
        turns: how many are kept.
        created: when the first that is kept ended, in seconds since 1970.
        used: when its newest ended.
        seen: tokens of the stream at its newest.
        usage: of its newest.
        topic: of its newest.
    """

    id: str
    head: str
    turns: int
    created: float
    used: float
    seen: int
    usage: dict[str, int]
    topic: str


class SessionStore(CheckpointStore, Protocol):
    """A shelf that knows whose its nodes are. Called from any thread.

    A turn is saved in two steps: `put` makes its state safe, and then `add` its record; nobody is
    told that it ended before both are. A node without a record is nobody's and may be dropped when
    a store is opened. `drop` drops a node's record as well, and a session goes with its last node.
    What a store has no room for it drops by itself, what was used longest ago first.

    A turn may be in several sessions, since a fork shares what came before it. It goes when it is
    in none any more; the session of its record is the one it has been in for longest.
    """

    def add(self, record: TurnRecord) -> None:
        """Keep the record of a node that is on the shelf; it becomes the head of its session.

        Raises:
            WeirError: it cannot be kept, or its node is not on the shelf any more.
        """

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        """The owner's newest turn that ends a conversation of this hash, if its node is kept."""

    def find_turn(self, owner: str, node: str) -> TurnRecord | None:
        """A turn of the owner's, if its node is kept."""

    def ancestry(self, owner: str, node: str) -> list[TurnTokens]:
        """The tokens that led to a turn of the owner's, the oldest first: back to the beginning of
        the stream, or to the last turn whose tokens are not known or that is not kept.
        """

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        """A session of the owner's."""

    def list_sessions(self, owner: str) -> list[SessionSummary]:
        """All of the owner's, those used longest ago first."""

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """The turns of a session that are kept, in the order they came; none if there is none."""

    def fork(self, owner: str, node: str, session: str) -> SessionSummary:
        """Begin a session that ends with a turn: with that and those it goes on from.

        Raises:
            NameTaken: the owner has a session of this name.
            WeirError: the owner has no such turn.
        """

    def remove_turns(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        """Take turns out of a session.

        Returns:
            Those that were in no other: they are dropped.

        Raises:
            WeirError: the disk does not let go of them.
        """

    def import_session(
        self, records: Sequence[TurnRecord], nodes: Sequence[Checkpoint]
    ) -> SessionSummary:
        """Keep turns of one new session, those that go on from others behind them; all or none.

        Raises:
            WeirError: they cannot be kept.
        """

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file on its way, on the disk that nodes are on."""


def find_path(node: str, turns: Mapping[str, str | None]) -> list[str]:
    """The turns that lead to one, it too, the oldest first.

    Args:
        node: of the turn.
        turns: what each goes on from, by node; what is not there ends the path.
    """
    path: dict[str, None] = {}
    at: str | None = node
    while at is not None and at in turns and at not in path:
        path[at] = None
        at = turns[at]
    return list(reversed(path))
