"""Operations on saved sessions: fork, rewind, delete, export and import.

Another owner's session looks as if it did not exist.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from weir.errors import WeirError, in_words
from weir.serve.engine.engine import Engine
from weir.serve.engine.scheduler import Busy
from weir.serve.limits import Limits
from weir.serve.sessions.export import FEWER, check_facts, read_export, write_export
from weir.serve.sessions.records import Checkpoint, SessionSummary, Turn, TurnRecord, find_path
from weir.serve.sessions.responses import ResponseStore
from weir.serve.sessions.store_format import StoreFormat
from weir.serve.worker import Worker


class UnknownSession(WeirError):
    """The owner has no such session or turn.

    Attributes:
        what: "session" or "turn".
    """

    def __init__(self, what: str = "session") -> None:
        super().__init__(f"{what} not found")
        self.what = what


class HeldByConversation(WeirError):
    """The session belongs to a conversation, and is deleted with it."""


class SessionManager:
    """The sessions of all owners.

    Unless their docstrings say otherwise, methods raise `UnknownSession` if the owner has no such
    session or turn, `HeldByConversation` if the session belongs to a conversation and so cannot be
    changed separately, and a WeirError if the disk cannot be written.
    """

    def __init__(
        self, engine: Engine, responses: ResponseStore, limits: Limits, worker: Worker
    ) -> None:
        self._engine = engine
        self._store = engine.store
        self._responses = responses
        self._limits = limits
        self._worker = worker
        self._transfer = threading.Lock()

    @cached_property
    def store_format(self) -> StoreFormat:
        """The format of the engine's rows."""
        cache = self._engine.cache
        return StoreFormat.of(self._engine.model, cache.policy, cache.chunk)

    def list_turns(self, owner: str, session: str) -> tuple[list[TurnRecord], set[str]]:
        """List the turns of a session in order, and the ids of the newest turn and of its
        ancestors.
        """
        records = self._records(owner, session)
        return records, _path(records, records[-1].node)

    def fork(self, owner: str, session: str, node: str | None, name: str | None) -> SessionSummary:
        """Begin a session that has a turn of another session, and the ancestors of this turn.

        Args:
            owner: the owner of both sessions.
            session: the other session.
            node: the turn; None for the newest.
            name: the name of the new session; None for a random one.
        """
        records = self._records(owner, session)
        at = _find(records, node or records[-1].node)
        found = self._store.fork(owner, at, name or f"sess_{secrets.token_hex(16)}")
        self.trim(owner)
        return found

    def rewind(self, owner: str, session: str, node: str) -> SessionSummary:
        """Make a turn the newest of its session by removing all turns except this turn and its
        ancestors.
        """
        records = self._records(owner, session)
        stay = _path(records, _find(records, node))
        self._require_free(owner, session)
        self._remove(owner, session, [r.node for r in records if r.node not in stay])
        found = self._store.get_session(owner, session)
        if found is None:
            raise UnknownSession  # it was just deleted
        return found

    def delete(self, owner: str, session: str) -> bool:
        """Delete an owner's session. Returns False if there is none."""
        records = self._store.list_turns(owner, session)
        if records:
            self._require_free(owner, session)
        self._remove(owner, session, [record.node for record in records])
        # Turns that were deleted earlier, to make room, still have responses. Delete these
        # responses, too, but keep the responses of turns that a fork still has.
        names = self._responses.list_responses(owner, session)
        turns = {name: self._store.find_turn(owner, name.removeprefix("resp_")) for name in names}
        self._responses.delete_responses(owner, [n for n, turn in turns.items() if turn is None])
        return bool(records)

    def delete_conversation(self, owner: str, conversation: str) -> None:
        """Delete a conversation of an owner and its session."""
        self._responses.delete_conversation(owner, conversation)
        self.delete(owner, conversation)

    def trim(self, owner: str) -> None:
        """Delete the least recently used sessions of an owner who has too many. The text of their
        responses is kept.
        """
        sessions = self._store.list_sessions(owner)
        for session in sessions[: max(0, len(sessions) - self._limits.sessions)]:
            nodes = [record.node for record in self._store.list_turns(owner, session.id)]
            self._forget(owner, session.id, nodes)

    def export_file(self, owner: str, session: str, most: int | None, path: Path) -> None:
        """Export an owner's session, or its newest `most` turns, to a file. Raises Busy during
        another export or import.
        """
        records = self._records(owner, session)
        records = records if most is None else records[-most:]
        cache = self._engine.cache
        size = len(records) * (cache.nbytes // (cache.batch or 1))
        if size > self._limits.parcel:
            raise WeirError(
                f"{in_words(len(records), 'turn')} {'takes' if len(records) == 1 else 'take'} "
                f"{size:,} bytes, and a file can have at most "
                f"{self._limits.parcel:,}. To make it smaller, {FEWER}."
            )
        with _one_at_a_time(self._transfer):
            turns: list[Turn] = []
            for record in records:
                try:
                    found = self._store.load(record.node)
                    turns.append((Checkpoint(found.state, found.pending), record))
                except WeirError:
                    if self._store.find_turn(owner, record.node) is not None:
                        raise
                    # Otherwise it was just deleted, and is left out.
            if not turns:
                raise UnknownSession
            write_export(path, turns, self.store_format)

    def import_file(self, owner: str, path: Path) -> SessionSummary:
        """Import a session from a file as a new session of the owner. Raises Busy during another
        export or import.
        """
        with _one_at_a_time(self._transfer):
            most = self._limits.parcel
            self._worker.vet(check_facts, path, most)
            turns = read_export(path, self.store_format, most, owner)
            found = self._store.import_session(turns)
        self.trim(owner)
        return found

    def _records(self, owner: str, session: str) -> list[TurnRecord]:
        records = self._store.list_turns(owner, session)
        if not records:
            raise UnknownSession
        return records

    def _remove(self, owner: str, session: str, nodes: Collection[str]) -> None:
        gone = self._forget(owner, session, nodes)
        self._responses.delete_responses(owner, [f"resp_{node}" for node in gone])

    def _forget(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        gone = self._store.remove_turns(owner, session, nodes)
        for node in gone:
            self._engine.forget(node)
        return gone

    def _require_free(self, owner: str, session: str) -> None:
        if self._responses.get_conversation(owner, session) is not None:
            raise HeldByConversation(
                "this session is a conversation. Delete the conversation, or items of it."
            )


@contextmanager
def _one_at_a_time(lock: threading.Lock) -> Iterator[None]:
    """Allow one export or import at a time, because the whole file is in memory."""
    if not lock.acquire(blocking=False):
        raise Busy("another session is being exported or imported. Try again later.")
    try:
        yield
    finally:
        lock.release()


def _find(records: list[TurnRecord], node: str) -> str:
    """Return the turn's id if the session has the turn."""
    if all(record.node != node for record in records):
        raise UnknownSession("turn")
    return node


def _path(records: list[TurnRecord], node: str) -> set[str]:
    """Return the ids of a turn and of its ancestors in a session."""
    return set(find_path(node, {record.node: record.parent for record in records}))
