"""Session store in memory, lost when the process ends."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory

from weir.errors import WeirError
from weir.serve.sessions.records import (
    NOT_KEPT,
    Checkpoint,
    NameTaken,
    OnSaved,
    SessionSummary,
    TurnRecord,
    TurnTokens,
    find_path,
)


class MemoryStore:
    """Sessions in memory (`SessionStore`).

    Args:
        most: maximum number of turns; the least recently used are deleted for new ones.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._lock = threading.RLock()
        # By node, the least recently used first.
        self._turns: dict[str, tuple[Checkpoint, TurnRecord]] = {}
        # Nodes in the order they came, by owner and hash, and by owner and session.
        self._chains: dict[tuple[str, str], list[str]] = {}
        self._sessions: dict[tuple[str, str], list[str]] = {}

    def load(self, node: str) -> Checkpoint:
        """A checkpoint."""
        with self._lock:
            if node not in self._turns:
                raise WeirError(NOT_KEPT)
            checkpoint, _ = self._turns[node] = self._turns.pop(node)
            return checkpoint

    def holds(self, node: str) -> bool:
        """Whether a turn is kept."""
        with self._lock:
            return node in self._turns

    def turns(self) -> list[tuple[Checkpoint, TurnRecord]]:
        """All turns, the oldest first."""
        with self._lock:
            return sorted(self._turns.values(), key=lambda turn: turn[1].created)

    def save(
        self, checkpoint: Checkpoint, record: TurnRecord, done: OnSaved = lambda error: None
    ) -> None:
        """Save a turn, and call `done` at once."""
        with self._lock:
            self.drop(record.node)
            self._turns[record.node] = checkpoint, record
            self._chains.setdefault((record.owner, record.chain), []).append(record.node)
            self._sessions.setdefault((record.owner, record.session), []).append(record.node)
            while len(self._turns) > self._most:
                self.drop(next(iter(self._turns)))
        done(None)

    def check_room(self, turns: int) -> None:
        """Accept any number of turns: old ones make room."""

    def is_full(self) -> bool:
        """Whether there is no room, which never happens."""
        return False

    def drop(self, node: str) -> None:
        """Delete a turn, if there is one of that name."""
        with self._lock:
            if node not in self._turns:
                return
            _, record = self._turns[node]
            _remove(self._chains, (record.owner, record.chain), node)
            for place in self._sessions_of(record):
                _remove(self._sessions, place, node)
            del self._turns[node]

    def _sessions_of(self, record: TurnRecord) -> list[tuple[str, str]]:
        """The sessions that contain a turn, with the session of the record first."""
        home = (record.owner, record.session)
        others = [
            place
            for place, nodes in self._sessions.items()
            if place != home and place[0] == record.owner and record.node in nodes
        ]
        return [home, *others]

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        """The owner's newest turn that ends a conversation of this hash."""
        with self._lock:
            nodes = self._chains.get((owner, chain))
            return self._turns[nodes[-1]][1] if nodes else None

    def find_turn(self, owner: str, node: str) -> TurnRecord | None:
        """A turn of the owner's."""
        with self._lock:
            _, record = self._turns.get(node, (None, None))
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
                adjoins = parent is not None and parent.seen == here.start < here.end
                record = parent if adjoins else None
        return found[::-1]

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        """A session of the owner's."""
        with self._lock:
            turns = self.list_turns(owner, session)
            if not turns:
                return None
            head = turns[-1]
            return SessionSummary(
                session,
                head.node,
                len(turns),
                created=turns[0].created,
                used=head.created,
                seen=head.seen,
                usage=head.usage,
                topic=head.topic,
            )

    def list_sessions(self, owner: str) -> list[SessionSummary]:
        """All sessions of the owner, the least recently used first."""
        with self._lock:
            order = {node: n for n, node in enumerate(self._turns)}
            # A session was last used when its most recently used turn was.
            used = {
                session: max(order[node] for node in nodes)
                for (its_owner, session), nodes in self._sessions.items()
                if its_owner == owner
            }
            found = [
                self.get_session(owner, session) for session in sorted(used, key=used.__getitem__)
            ]
            return [session for session in found if session is not None]

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """The turns of a session that are kept, in the order they came."""
        with self._lock:
            return [self._turns[node][1] for node in self._sessions.get((owner, session), ())]

    def fork(self, owner: str, node: str, session: str) -> SessionSummary:
        """Begin a session that ends with a turn of another: that one and its ancestors."""
        with self._lock:
            records = [record for _, record in self._turns.values() if record.owner == owner]
            path = find_path(node, {record.node: record.parent for record in records})
            if not path:
                raise WeirError("there is no such turn")
            if (owner, session) in self._sessions:
                raise NameTaken("there is a session of this name already")
            self._sessions[owner, session] = path
            found = self.get_session(owner, session)
            assert found is not None
            return found

    def remove_turns(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        """Take turns out of a session; those that are in no other are deleted and returned."""
        gone = []
        with self._lock:
            for node in set(nodes) & set(self._sessions.get((owner, session), ())):
                checkpoint, record = self._turns[node]
                others = [p for p in self._sessions_of(record) if p != (owner, session)]
                if not others:
                    gone.append(node)
                    self.drop(node)
                    continue
                _remove(self._sessions, (owner, session), node)
                self._turns[node] = checkpoint, replace(record, session=others[0][1])
        return gone

    def import_session(
        self, records: Sequence[TurnRecord], checkpoints: Sequence[Checkpoint]
    ) -> SessionSummary:
        """Save the turns of one new session, parents first."""
        if len(records) > self._most:
            raise WeirError(f"it has {len(records)} turns, and {self._most} of all are kept here")
        with self._lock:
            for record, checkpoint in zip(records, checkpoints, strict=True):
                self.save(checkpoint, record)
            found = self.get_session(records[0].owner, records[0].session)
            assert found is not None
            return found

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file in transit."""
        return TemporaryDirectory(prefix="weir-")


def _remove(lists: dict[tuple[str, str], list[str]], key: tuple[str, str], node: str) -> None:
    """Remove a node from a list, and an empty list from its dictionary."""
    lists[key].remove(node)
    if not lists[key]:
        del lists[key]
