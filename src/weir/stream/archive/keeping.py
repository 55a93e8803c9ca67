"""`Archive`: stores the text of a conversation or stream in a file, and finds it again."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from weir.errors import WeirError
from weir.stream.archive.questions import find_inquiries
from weir.stream.archive.ranking import ArchiveSearch, Excerpt, IsHeld
from weir.stream.archive.tables import (
    ARCHIVE_VERSION,
    ArchivedTurn,
    ArchiveEnd,
    ArchiveProblem,
    ArchiveTables,
)

PATIENCE = 2.0
"""Seconds to wait for another process that writes to the file."""
MOST = 8
"""Largest number of excerpts that a search returns by default."""
_NOT_HELD: IsHeld = lambda start, stop: False  # noqa: E731 (a value of a type alias)


class Archive:
    """The text of a conversation or a stream, stored in an SQLite file and found again by words.

    Pass it to `weir.stream.Conversation(archive=...)` or `Stream(archive=...)`, which fill it and
    search it. A file can hold several sessions; an archive object sees one of them.

    Args:
        path: the file, created if missing; None for memory.
        session: the session in the file.
        limit: bytes that all text and its indexes can take, None for no limit. Beyond the limit,
            the oldest turns are deleted.

    Attributes:
        dropped: turns that were deleted to make room since the file was opened.

    Raises:
        ArchiveProblem: the file is damaged, locked, of another version, or cannot be written.
    """

    def __init__(
        self, path: str | Path | None = None, session: str = "main", *, limit: int | None = None
    ) -> None:
        self.path = None if path is None else Path(path)
        self.session = session
        self.dropped = 0
        self._tables = ArchiveTables(limit)
        self._lock = threading.RLock()
        self._owner = ""
        with self._refusing():
            if self.path is not None:
                flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
                os.close(os.open(self.path, flags, 0o600))  # only the user may read what was said
            self._db = sqlite3.connect(
                ":memory:" if self.path is None else self.path,
                timeout=PATIENCE,
                isolation_level=None,
                check_same_thread=False,
            )
            self._db.row_factory = sqlite3.Row
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        """Check the file, and make the tables of a new one."""
        self._db.execute("PRAGMA trusted_schema = OFF")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (there,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not version and not there:
            self._db.execute("PRAGMA journal_mode = WAL")
            with self._writing() as db:
                self._tables.create(db)
                db.execute(f"PRAGMA user_version = {ARCHIVE_VERSION}")
        elif version != ARCHIVE_VERSION or not self._has_tables():
            raise ArchiveProblem(
                f"{self.path} is not an archive of this version of weir, which reads files of "
                f"version {ARCHIVE_VERSION} that have the tables of an archive (this file has "
                f"version {version}). Use another path, or remove the file."
            )
        self._db.execute("PRAGMA synchronous = NORMAL")

    def _has_tables(self) -> bool:
        found = self._db.execute(
            "SELECT count(*) FROM sqlite_master WHERE name IN "
            "('archived_passages', 'archived_english', 'archived_plain')"
        ).fetchone()
        return bool(found[0] == 3)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<weir.Archive {self.path or 'in memory'}, session {self.session!r}>"

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        with self._lock:
            self._db.close()

    # --- writing

    def add(
        self,
        role: str,
        text: str,
        *,
        start: int = -1,
        stop: int = -1,
        name: str = "",
        at: float | None = None,
    ) -> None:
        """Add a turn, or a piece of a stream.

        Args:
            role: who said it: "user", "assistant", "tool" or "system"; "text" for a stream's text.
            text: what was said.
            start, stop: the first position of the text in the stream, and the one after its last;
                -1 if it is not in a stream, so that no cache can hold it.
            name: the name of the author or of the tool; empty if there is none.
            at: when it was said, in seconds since 1970; None for now.
        """
        turn = ArchivedTurn(role, text, start, stop, name, time.time() if at is None else at)
        with self._refusing(), self._writing() as db:
            end = self._find_end()
            self.dropped += self._tables.add(db, self._owner, self.session, end, [turn])

    def add_all(self, turns: Iterable[tuple[str, str]]) -> None:
        """Add turns (role and text) that are in no stream, all at once, which is faster than one by
        one.
        """
        some = [ArchivedTurn(role, text) for role, text in turns]
        with self._refusing(), self._writing() as db:
            end = self._find_end()
            self.dropped += self._tables.add(db, self._owner, self.session, end, some)

    def resume(self, seen: int) -> None:
        """Record that a stream of `seen` tokens continues this session.

        Text that is archived at position `seen` or later was read by an earlier stream, so it is no
        longer in a cache.
        """
        with self._refusing(), self._writing() as db:
            if (end := self._find_end()) is not None:
                self._tables.unplace(db, self._owner, end, seen)

    def rewind(self, seen: int) -> None:
        """Remove the session's first turn with a passage that begins at position `seen` of the
        stream or later, and all turns of the session after it.

        Turns that other sessions see stay in the file.
        """
        with self._refusing(), self._writing() as db:
            if (end := self._find_end()) is not None:
                self._tables.rewind(db, self._owner, self.session, end, seen)

    def fork(self, session: str) -> Archive:
        """Begin another session that sees everything up to here. Neither session sees what the
        other adds from now on.
        """
        with self._refusing(), self._writing() as db:
            if self._tables.find_end(self._query, self._owner, session) is not None:
                raise WeirError(
                    f"a session {session!r} already exists in this archive. Use another name."
                )
            self._tables.fork(db, self._owner, self.session, session)
        if self.path is None:
            return self._beside(session)
        return Archive(self.path, session, limit=self._tables.limit)

    def _beside(self, session: str) -> Archive:
        """Return another session of the same in-memory archive."""
        other = object.__new__(Archive)
        vars(other).update(vars(self))
        other.session, other.dropped = session, 0
        return other

    def delete(self) -> None:
        """Delete the session's text, except what other sessions share with it."""
        with self._refusing(), self._writing() as db:
            self._tables.forget(db, self._owner, [self.session])

    # --- reading

    def search(self, text: str, *, is_held: IsHeld = _NOT_HELD, most: int = MOST) -> list[Excerpt]:
        """Find excerpts that answer the questions in a text, the best first; none if nothing
        matches well enough.

        Args:
            text: any text; operators of SQLite's full-text search in it have no effect.
            is_held: tells whether a cache still holds the text at positions `start` to `stop` of
                the stream. Held text is left out.
            most: largest number of excerpts.
        """
        questions = find_inquiries(text)
        if not questions:
            return []
        with self._refusing(), self._lock:
            end = self._find_end()
            if end is None:
                return []
            search = ArchiveSearch(self._query, self._owner, end)
            return search.search(questions, is_held, most)

    @property
    def turns(self) -> int:
        """Number of turns in the file, including those of other sessions."""
        with self._refusing():
            return int(self._query("SELECT count(*) FROM archived_turns")[0][0])

    @property
    def characters(self) -> int:
        """Characters of all text in the file, including that of other sessions."""
        with self._refusing():
            found = self._query("SELECT coalesce(sum(length(text)), 0) FROM archived_passages")
            return int(found[0][0])

    @property
    def nbytes(self) -> int:
        """Bytes of the file or memory that the archive takes."""
        with self._refusing():
            (pages,) = self._query("PRAGMA page_count")[0]
            (size,) = self._query("PRAGMA page_size")[0]
            return int(pages * size)

    def _find_end(self) -> ArchiveEnd | None:
        return self._tables.find_end(self._query, self._owner, self.session)

    def _query(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction: either all of it is written, or nothing."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise errors of SQLite and of the disk as `ArchiveProblem`."""
        where = "in memory" if self.path is None else str(self.path)
        try:
            yield
        except sqlite3.Error as error:
            raise ArchiveProblem(f"the archive {where} {describe_error(error)}") from None
        except OSError as error:
            raise ArchiveProblem(
                f"the archive {where} cannot be opened ({error.strerror}). Give the path of a file "
                "that can be written."
            ) from None


def describe_error(error: sqlite3.Error) -> str:
    """Return the part of an error after an archive's name: what is wrong, and what to do."""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return f"is damaged ({error}). Restore it from a copy, or remove it to begin an empty one."
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"is locked by another process ({error}). Close the program that has it open."
    if code == sqlite3.SQLITE_FULL:
        return f"cannot grow: the disk is full ({error}). Make room on it."
    return f"cannot be used ({error}). Check its permissions, or give another path."
