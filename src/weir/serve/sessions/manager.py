"""Operations on saved sessions: fork, rewind, delete, export and import.

Another owner's session looks as if it did not exist. Knows nothing about HTTP or text.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from weir.errors import WeirError
from weir.serve.engine import Busy, Engine
from weir.serve.limits import Limits
from weir.serve.sessions.archive import SessionArchive
from weir.serve.sessions.records import SessionSummary, TurnRecord, find_path
from weir.serve.sessions.responses import ResponseStore
from weir.serve.sessions.snapshot import RowFormat


class UnknownSession(WeirError):
    """The owner has no such session or turn."""


class HeldByConversation(WeirError):
    """The session belongs to a conversation, and is deleted with it."""


class SessionManager:
    """The sessions of all owners.

    Methods raise `UnknownSession` where the owner has no such session or turn in it,
    `HeldByConversation` where it cannot be changed alone, and a WeirError where the disk refuses.
    """

    def __init__(self, engine: Engine, responses: ResponseStore, limits: Limits) -> None:
        self._engine = engine
        self._store = engine.store
        self._responses = responses
        self._limits = limits
        self._transfer = threading.Lock()

    @cached_property
    def row_format(self) -> RowFormat:
        """The format of the engine's rows."""
        cache = self._engine.cache
        return RowFormat.of(self._engine.model, cache.policy, cache.chunk)

    def list_turns(self, owner: str, session: str) -> tuple[list[TurnRecord], set[str]]:
        """List the turns of a session in order, and the nodes of the path to the newest.

        Raises:
            UnknownSession: there is no such session.
        """
        records = self._records(owner, session)
        return records, set(find_path(records[-1].node, {r.node: r.parent for r in records}))

    def fork(self, owner: str, session: str, node: str | None, name: str | None) -> SessionSummary:
        """Begin a session with a turn of another and its ancestors; the other stays as it is.

        Args:
            node: name of the turn; None for the newest.
            name: name of the new session; None for a random one.
        """
        at = self._turn(owner, session, node).node
        found = self._store.fork(owner, at, name or f"sess_{secrets.token_hex(16)}")
        self.trim(owner)
        return found

    def rewind(self, owner: str, session: str, node: str) -> SessionSummary:
        """Make a turn the newest of its session: all turns but its ancestors are removed."""
        self._turn(owner, session, node)
        self._require_free(owner, session)
        records = self._store.list_turns(owner, session)
        stay = set(find_path(node, {record.node: record.parent for record in records}))
        self._leave(owner, session, [r.node for r in records if r.node not in stay])
        found = self._store.get_session(owner, session)
        if found is None:
            raise _unknown("session")  # it was just deleted
        return found

    def delete(self, owner: str, session: str) -> bool:
        """Delete an owner's session; return False if there is none."""
        records = self._store.list_turns(owner, session)
        if records:
            self._require_free(owner, session)
        self._leave(owner, session, [record.node for record in records])
        # Responses whose checkpoints were deleted to save room; a fork may still have some.
        gone = [
            name
            for name in self._responses.list_responses(owner, session)
            if not self._is_kept(owner, name)
        ]
        self._responses.delete_responses(owner, gone)
        return bool(records)

    def _is_kept(self, owner: str, response: str) -> bool:
        return self._store.find_turn(owner, response.removeprefix("resp_")) is not None

    def delete_conversation(self, owner: str, conversation: str) -> None:
        """Delete a conversation of an owner's, and its session."""
        self._responses.delete_conversation(owner, conversation)
        self.delete(owner, conversation)

    def trim(self, owner: str) -> None:
        """Delete the least recently used sessions of an owner who has more than allowed.

        Responses remain as text, and can be read again.
        """
        sessions = self._store.list_sessions(owner)
        for session in sessions[: max(0, len(sessions) - self._limits.sessions)]:
            nodes = [record.node for record in self._store.list_turns(owner, session.id)]
            for node in self._store.remove_turns(owner, session.id, nodes):
                self._engine.forget(node)

    def export_file(self, owner: str, session: str, most: int | None, path: Path) -> None:
        """Export an owner's session to a file.

        Args:
            most: maximum number of newest turns; None for all.

        Raises:
            UnknownSession: there is no such session.
            Busy: another export or import is running.
            WeirError: it is too large for a file, or damaged, or the file cannot be written.
        """
        found = self._store.get_session(owner, session)
        if found is None:
            raise _unknown("session")
        cache = self._engine.cache
        turns = found.turns if most is None else min(most, found.turns)
        size = turns * (cache.nbytes // (cache.batch or 1))
        if size > self._limits.parcel:
            raise WeirError(
                f"{turns} turns take {size:,} bytes, and a file may have {self._limits.parcel:,}; "
                "ask for fewer of the newest turns"
            )
        with _one_at_a_time(self._transfer):
            SessionArchive.of(self._store, owner, session, turns).write(path, self.row_format)

    def import_file(self, owner: str, path: Path) -> SessionSummary:
        """Import a session from a file, as a new one of the owner's.

        Raises:
            Busy: another export or import is running.
            WeirError: it is no export of weir, or damaged, or of another model or policy, or there
                is no room for it; nothing of it is kept.
        """
        with _one_at_a_time(self._transfer):
            archive = SessionArchive.read(path, self.row_format, self._limits.parcel).renamed(owner)
            found = self._store.import_session(archive.records, archive.checkpoints)
        self.trim(owner)
        return found

    def _records(self, owner: str, session: str) -> list[TurnRecord]:
        records = self._store.list_turns(owner, session)
        if not records:
            raise _unknown("session")
        return records

    def _turn(self, owner: str, session: str, node: str | None) -> TurnRecord:
        records = self._records(owner, session)
        if node is None:
            return records[-1]
        found = next((record for record in records if record.node == node), None)
        if found is None:
            raise _unknown("turn")
        return found

    def _leave(self, owner: str, session: str, nodes: Collection[str]) -> None:
        gone = self._store.remove_turns(owner, session, nodes)
        for node in gone:
            self._engine.forget(node)
        self._responses.delete_responses(owner, [f"resp_{node}" for node in gone])

    def _require_free(self, owner: str, session: str) -> None:
        if self._responses.get_conversation(owner, session) is not None:
            raise HeldByConversation("this session is a conversation: delete that, or items of it")


@contextmanager
def _one_at_a_time(lock: threading.Lock) -> Iterator[None]:
    """Allow one export or import at a time: the whole file is in memory."""
    if not lock.acquire(blocking=False):
        raise Busy("another session is being exported or imported")
    try:
        yield
    finally:
        lock.release()


def _unknown(what: str) -> UnknownSession:
    return UnknownSession(f"there is no such {what}")
