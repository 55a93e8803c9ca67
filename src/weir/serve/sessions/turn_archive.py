"""The archive of saved turns, which finds their text again after it has left the cache.

Its tables are in a separate database, `archive.db`, which is attached to the database of the turns;
both are written in one transaction. If a turn is deleted to make room, the archive keeps its text
as long as a later turn of the conversation is kept. If the archive cannot be read or written, turns
are saved without it, and the log says so once.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weir.cache import RowState
from weir.errors import WeirError
from weir.serve.messages import THINKING, Message
from weir.serve.sessions.database import Database
from weir.serve.sessions.records import Checkpoint, TurnRecord, unpack_ids
from weir.stream import HeldRanges
from weir.stream.archive import (
    ARCHIVE_VERSION,
    ArchivedTurn,
    ArchiveProblem,
    ArchiveSearch,
    ArchiveTables,
    Encode,
    Excerpt,
    find_inquiries,
    find_texts,
)

_log = logging.getLogger(__name__)
SCHEMA = "archive"
ANCESTORS = 4096
"""How many ancestors of a new turn are looked up, to find the newest one that is in the archive."""
MOST = 8
"""The most excerpts that a search finds."""


class TurnArchive:
    """The archive of the turns in one place. Can be called from any thread.

    Args:
        db: the database of the turns.
        path: the archive's file; None for memory.
        limit: the most bytes that the archive may take; None for no limit.

    Attributes:
        find_held: finds the places of a stream that a row holds; set by `EngineClient`.
        encode: tokenizes a message; set by `EngineClient`. Before that, places are estimated.
        problem: why the archive is no longer used; None as long as it is used.
    """

    def __init__(self, db: Database, path: Path | None, limit: int | None) -> None:
        self._db = db
        self._tables = ArchiveTables(limit)
        self._name = "the archive in memory" if path is None else f"the archive {path}"
        self._lock = threading.Lock()
        self._told_dropped = False
        self.problem: str | None = None
        self.find_held: Callable[[RowState], bytes] = lambda state: b""
        self.encode: Encode = lambda text: []
        try:
            db.attach(path, SCHEMA)
            with db.writing() as connection:
                (version,) = connection.execute(f"PRAGMA {SCHEMA}.user_version").fetchone()
                (there,) = connection.execute(
                    f"SELECT count(*) FROM {SCHEMA}.sqlite_master"
                ).fetchone()
                if not version and not there:
                    self._tables.create(connection, f"{SCHEMA}.")
                    connection.execute(f"PRAGMA {SCHEMA}.user_version = {ARCHIVE_VERSION}")
                elif version != ARCHIVE_VERSION:
                    raise ArchiveProblem(
                        f"it has version {version}, but this version of weir reads "
                        f"{ARCHIVE_VERSION}"
                    )
        except (sqlite3.Error, OSError, WeirError) as error:
            self._give_up(error)
            db.detach(SCHEMA)

    # --- writing, in the transactions of the turns

    def add(self, db: sqlite3.Connection, record: TurnRecord, checkpoint: Checkpoint) -> None:
        """Add a turn that is being saved."""
        if self.problem is not None:
            return
        with self._guarding(db):
            after = None
            query = _query_of(db)
            node, before = record.parent, 0
            while node is not None and before < ANCESTORS:
                # A turn that was saved while there was no archive is skipped.
                after = self._tables.find_end(query, record.owner, node)
                if after is not None:
                    break
                row = db.execute(
                    "SELECT parent FROM records WHERE node = ? AND owner = ?", (node, record.owner)
                ).fetchone()
                node, before = None if row is None else row[0], before + 1
            held = self._held_of(checkpoint)
            turns = list(_turns_of(record, self.encode))
            dropped = self._tables.add(db, record.owner, record.node, after, turns, held)
            if dropped and not self._told_dropped:
                self._told_dropped = True
                _log.warning(
                    "%s is full: from now on, it deletes the oldest turns of the owner with the "
                    "most text. A larger --archive keeps more.",
                    self._name,
                )

    def _held_of(self, checkpoint: Checkpoint) -> bytes:
        """Return how many tokens the row had read at the end of the turn (in eight bytes), followed
        by the places of the stream that it still held (`find_held`).
        """
        state = checkpoint.state
        seen = int(state.facts["seen"])
        return seen.to_bytes(8, "little") + self.find_held(state)

    def forget(self, db: sqlite3.Connection, gone: Iterable[tuple[str, str]]) -> None:
        """Delete the text of turns that are being deleted, given by owner and node.

        If a turn that stays is a descendant of a deleted turn, the text of the deleted turn stays,
        too.
        """
        nodes: dict[str, list[str]] = {}
        for owner, node in gone:
            nodes.setdefault(owner, []).append(node)
        if nodes and self.problem is None:
            with self._guarding(db):
                for owner, names in nodes.items():
                    self._tables.forget(db, owner, names)

    # --- reading

    def search(
        self, owner: str, node: str, text: str, dropped: Sequence[tuple[int, int]]
    ) -> list[Excerpt]:
        """Find answers to the questions in `text` in the archived text of a turn and its ancestors.

        Only text that has left the cache is found. Empty if the archive cannot be read. Text at the
        places `dropped` is not found: these are the outputs of tools that were dropped, which the
        model must not read again.
        """
        if self.problem is not None or not (asked := find_inquiries(text)):
            return []
        try:
            end = self._tables.find_end(self._read, owner, node)
            if end is None:
                return []
            known = int.from_bytes(end.held[:8], "little")
            held = HeldRanges(end.held[8:], known)

            def is_left_out(start: int, stop: int) -> bool:
                return held(start, stop) or any(a < stop and start < b for a, b in dropped)

            return ArchiveSearch(self._read, owner, end).search(asked, is_left_out, MOST)
        except Exception as error:
            self._give_up(error)
            return []

    def count_turns(self, owner: str, node: str) -> int:
        """Return the number of archived turns that a search from this turn would read."""
        if self.problem is not None:
            return 0
        try:
            end = self._tables.find_end(self._read, owner, node)
            return 0 if end is None else ArchiveSearch(self._read, owner, end).count_turns()
        except Exception as error:
            self._give_up(error)
            return 0

    def _read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.query(query, *values)

    # --- failures

    @contextmanager
    def _guarding(self, db: sqlite3.Connection) -> Iterator[None]:
        """If the archive fails in this block, undo what the block has written, and go on without
        the archive.
        """
        db.execute("SAVEPOINT archive")
        try:
            yield
        except Exception as error:
            self._give_up(error)
            # SQLite may have undone the whole transaction, for example because the disk is full.
            if not db.in_transaction:
                raise
            db.execute("ROLLBACK TO archive")
        db.execute("RELEASE archive")

    def _give_up(self, error: Exception) -> None:
        """Go on without the archive, and report that once."""
        with self._lock:
            if self.problem is not None:
                return
            why = self._db.lost.get(SCHEMA, str(error))
            self.problem = f"{self._name} cannot be used: {why}"
        _log.warning(
            "%s. Turns are saved without it, and nothing is recalled, until the server is "
            "restarted.",
            self.problem,
        )


def _query_of(db: sqlite3.Connection) -> Callable[..., list[sqlite3.Row]]:
    return lambda query, *values: db.execute(query, values).fetchall()


def _turns_of(record: TurnRecord, encode: Encode) -> Iterator[ArchivedTurn]:
    """Yield the texts of a turn's messages with their places in the stream. System messages and
    messages without text are left out.
    """
    ids = unpack_ids(record.ids)
    texts = [_text_of(message) for message in record.messages]
    start = record.seen - len(ids)
    places = find_texts(ids, texts, encode)
    for message, text, (first, last) in zip(record.messages, texts, places, strict=True):
        if message.role != "system" and text.strip():
            name = message.name or ""
            place = start + first, start + last
            yield ArchivedTurn(message.role, text, *place, name, record.created)


def _text_of(message: Message) -> str:
    """Return the text of a message without thoughts."""
    return THINKING.sub("", message.content) if message.role == "assistant" else message.content
