"""Turns and whose they are, in memory: the simplest store.

Knows nothing about HTTP or models.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory

from weir.errors import WeirError
from weir.serve.engine import Checkpoint, OnSaved
from weir.serve.sessions.checkpoints import MemoryCheckpoints
from weir.serve.sessions.records import NameTaken, SessionSummary, TurnRecord, TurnTokens, find_path


class MemoryStore:
    """A store in memory, at most so many nodes; all is gone when the process ends.

    Args:
        most: nodes that are kept.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._shelf = MemoryCheckpoints(most + 64)  # beside them, those whose records are to come
        self._records: dict[str, TurnRecord] = {}  # by node, the one used longest ago first
        self._chains: dict[tuple[str, str], list[str]] = {}
        self._sessions: dict[tuple[str, str], list[str]] = {}  # nodes, by owner and session

    def get(self, name: str) -> Checkpoint:
        """A node.

        Raises:
            WeirError: there is none of that name.
        """
        with self._lock:
            node = self._shelf.get(name)
            if name in self._records:
                self._records[name] = self._records.pop(name)
            return node

    def put(self, name: str, node: Checkpoint, done: OnSaved) -> None:
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
                _take_out(self._chains, (record.owner, record.chain), name)
                for place in self._places(record):
                    _take_out(self._sessions, place, name)

    def _places(self, record: TurnRecord) -> list[tuple[str, str]]:
        """The sessions a turn is in, the one it has been in for longest first."""
        home = (record.owner, record.session)
        others = [
            place
            for place, nodes in self._sessions.items()
            if place != home and place[0] == record.owner and record.node in nodes
        ]
        return [home, *others]

    def add(self, record: TurnRecord) -> None:
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
            self._sessions.setdefault((record.owner, record.session), []).append(record.node)
            while len(self._records) > self._most:
                self.drop(next(iter(self._records)))

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        """The owner's newest turn that ends a conversation of this hash."""
        with self._lock:
            nodes = self._chains.get((owner, chain))
            return self._records[nodes[-1]] if nodes else None

    def find_turn(self, owner: str, node: str) -> TurnRecord | None:
        """A turn of the owner's."""
        with self._lock:
            record = self._records.get(node)
            return record if record is not None and record.owner == owner else None

    def ancestry(self, owner: str, node: str) -> list[TurnTokens]:
        """The tokens that led to a turn of the owner's, as far back as its turns are kept."""
        found: list[TurnTokens] = []
        with self._lock:
            record = self.find_turn(owner, node)
            while record is not None:
                here = TurnTokens(record.node, record.seen, record.ids)
                found.append(here)
                parent = None if record.parent is None else self.find_turn(owner, record.parent)
                goes_on = parent is not None and parent.seen == here.start < here.end
                record = parent if goes_on else None
        return found[::-1]

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        """A session of the owner's."""
        with self._lock:
            nodes = self._sessions.get((owner, session))
            if nodes is None:
                return None
            first, head = self._records[nodes[0]], self._records[nodes[-1]]
            return SessionSummary(
                session,
                head.node,
                len(nodes),
                created=first.created,
                used=head.created,
                seen=head.seen,
                usage=head.usage,
                topic=head.topic,
            )

    def list_sessions(self, owner: str) -> list[SessionSummary]:
        """All of the owner's, those used longest ago first."""
        with self._lock:
            place = {name: n for n, name in enumerate(self._records)}
            # A session stands where its node stands that was used last.
            used = {
                session: max(place[node] for node in nodes)
                for (whose, session), nodes in self._sessions.items()
                if whose == owner
            }
            found = [self.get_session(owner, name) for name in sorted(used, key=lambda n: used[n])]
            return [session for session in found if session is not None]

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """The turns of a session that are kept, in the order they came."""
        with self._lock:
            return [self._records[node] for node in self._sessions.get((owner, session), ())]

    def fork(self, owner: str, node: str, session: str) -> SessionSummary:
        """Begin a session that ends with a turn.

        Raises:
            NameTaken: the owner has a session of this name.
            WeirError: the owner has no such turn.
        """
        with self._lock:
            own = {n: each.parent for n, each in self._records.items() if each.owner == owner}
            path = find_path(node, own)
            if not path:
                raise WeirError("there is no such turn")
            if (owner, session) in self._sessions:
                raise NameTaken("there is a session of this name already")
            self._sessions[owner, session] = path
            found = self.get_session(owner, session)
            assert found is not None
            return found

    def remove_turns(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        """Take turns out of a session; those that were in no other are dropped."""
        gone = []
        with self._lock:
            for node in set(nodes) & set(self._sessions.get((owner, session), ())):
                record = self._records[node]
                places = [place for place in self._places(record) if place != (owner, session)]
                if not places:
                    gone.append(node)
                    self.drop(node)
                    continue
                _take_out(self._sessions, (owner, session), node)
                self._records[node] = replace(record, session=places[0][1])
        return gone

    def import_session(
        self, records: Sequence[TurnRecord], nodes: Sequence[Checkpoint]
    ) -> SessionSummary:
        """Keep turns of one new session.

        Raises:
            WeirError: there are more of them than are kept.
        """
        if len(records) > self._most:
            raise WeirError(f"it has {len(records)} turns, and {self._most} of all are kept here")
        with self._lock:
            for record, node in zip(records, nodes, strict=True):
                self.put(record.node, node, lambda error: None)
                self.add(record)
            found = self.get_session(records[0].owner, records[0].session)
            assert found is not None
            return found

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file on its way."""
        return TemporaryDirectory(prefix="weir-")


def _take_out(lists: dict[tuple[str, str], list[str]], place: tuple[str, str], name: str) -> None:
    """Take a name out of a list, and the list out of its dictionary when it was the last."""
    lists[place].remove(name)
    if not lists[place]:
        del lists[place]
