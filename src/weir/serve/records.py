"""What is kept of turns beside their state: whose they are, and where in a conversation they stand.

A protocol, and memory as its simplest form. Knows nothing about HTTP or models.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from weir.errors import WeirError
from weir.serve.messages import Message
from weir.serve.shelf import Done, MemoryShelf, Shelf
from weir.serve.turn import Node


@dataclass(frozen=True)
class Record:
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
        ids: the tokens of this turn, what was fed and the answer, as `packed` writes them: they
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


def packed(ids: Iterable[int]) -> bytes:
    """Token ids in four bytes each: a prompt of a million is kept as such."""
    return array("I", ids).tobytes()


def unpacked(ids: bytes) -> array[int]:
    """The token ids that `packed` has written."""
    found = array("I")
    found.frombytes(ids)
    return found


@dataclass(frozen=True)
class Stretch:
    """The tokens of one turn in its stream.

    Attributes:
        node: the turn's end.
        end: how many tokens the stream has there.
        ids: `Record.ids`.
    """

    node: str
    end: int
    ids: bytes

    @property
    def start(self) -> int:
        """The place in the stream of its first token."""
        return self.end - len(self.ids) // 4


@dataclass(frozen=True)
class Session:
    """A conversation of an owner's.

    Attributes:
        id: its name, among the owner's.
        head: its newest turn.
        nodes: all its turns that are kept, the oldest first.
        created: when its first turn that is kept ended, in seconds since 1970.
    """

    id: str
    head: Record
    nodes: tuple[str, ...]
    created: float


class Store(Shelf, Protocol):
    """A shelf that knows whose its nodes are. Called from any thread.

    A turn is saved in two steps: `put` makes its state safe, and then `add` its record; nobody is
    told that it ended before both are. A node without a record is nobody's and may be dropped when
    a store is opened. `drop` drops a node's record as well, and a session goes with its last node.
    What a store has no room for it drops by itself, what was used longest ago first.
    """

    def add(self, record: Record) -> None:
        """Keep the record of a node that is on the shelf; it becomes the head of its session.

        Raises:
            WeirError: it cannot be kept, or its node is not on the shelf any more.
        """

    def at(self, owner: str, chain: str) -> Record | None:
        """The owner's newest turn that ends a conversation of this hash, if its node is kept."""

    def find(self, owner: str, node: str) -> Record | None:
        """A turn of the owner's, if its node is kept."""

    def line(self, owner: str, node: str) -> list[Stretch]:
        """The tokens that led to a turn of the owner's, the oldest first: back to the beginning of
        the stream, or to the last turn whose tokens are not known or that is not kept.
        """

    def session(self, owner: str, session: str) -> Session | None:
        """A session of the owner's."""

    def sessions(self, owner: str) -> list[Session]:
        """All of the owner's, those used longest ago first."""


class MemoryStore:
    """A store in memory, at most so many nodes; all is gone when the process ends.

    Args:
        most: nodes that are kept.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._shelf = MemoryShelf(most + 64)  # beside them, those whose records are to come
        self._records: dict[str, Record] = {}  # by node, the one used longest ago first
        self._chains: dict[tuple[str, str], list[str]] = {}

    def get(self, name: str) -> Node:
        """A node.

        Raises:
            WeirError: there is none of that name.
        """
        with self._lock:
            node = self._shelf.get(name)
            if name in self._records:
                self._records[name] = self._records.pop(name)
            return node

    def put(self, name: str, node: Node, done: Done) -> None:
        """Keep a node."""
        with self._lock:
            self._shelf.put(name, node, lambda error: None)
        done(None)

    def drop(self, name: str) -> None:
        """Forget a node and its record."""
        with self._lock:
            self._shelf.drop(name)
            record = self._records.pop(name, None)
            if record is not None:
                place = (record.owner, record.chain)
                self._chains[place].remove(name)
                if not self._chains[place]:
                    del self._chains[place]

    def add(self, record: Record) -> None:
        """Keep the record of a node.

        Raises:
            WeirError: its node is not kept any more.
        """
        with self._lock:
            try:
                self._shelf.get(record.node)
            except WeirError:
                raise WeirError("there is no room to keep this turn") from None
            self._records[record.node] = record
            self._chains.setdefault((record.owner, record.chain), []).append(record.node)
            while len(self._records) > self._most:
                self.drop(next(iter(self._records)))

    def at(self, owner: str, chain: str) -> Record | None:
        """The owner's newest turn that ends a conversation of this hash."""
        with self._lock:
            nodes = self._chains.get((owner, chain))
            return self._records[nodes[-1]] if nodes else None

    def find(self, owner: str, node: str) -> Record | None:
        """A turn of the owner's."""
        with self._lock:
            record = self._records.get(node)
            return record if record is not None and record.owner == owner else None

    def line(self, owner: str, node: str) -> list[Stretch]:
        """The tokens that led to a turn of the owner's, as far back as its turns are kept."""
        found: list[Stretch] = []
        with self._lock:
            record = self.find(owner, node)
            while record is not None:
                here = Stretch(record.node, record.seen, record.ids)
                found.append(here)
                parent = None if record.parent is None else self.find(owner, record.parent)
                goes_on = parent is not None and parent.seen == here.start < here.end
                record = parent if goes_on else None
        return found[::-1]

    def session(self, owner: str, session: str) -> Session | None:
        """A session of the owner's."""
        return next((one for one in self.sessions(owner) if one.id == session), None)

    def sessions(self, owner: str) -> list[Session]:
        """All of the owner's, those used longest ago first."""
        with self._lock:
            own = [record for record in self._records.values() if record.owner == owner]
        by_session: dict[str, list[Record]] = {}
        for record in own:
            # A session stands where its node stands that was used last.
            by_session[record.session] = [*by_session.pop(record.session, []), record]
        found = []
        for name, records in by_session.items():
            records.sort(key=lambda record: record.created)
            nodes = tuple(record.node for record in records)
            found.append(Session(name, records[-1], nodes, records[0].created))
        return found
