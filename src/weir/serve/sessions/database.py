"""SQLite database, in a file or in memory.

A database in a file has two connections. One writes, and its commits survive a power cut. The other
reads without waiting for commits. A database in memory has one connection for both.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.serve.sessions.snapshot_folder import refusal


class DamagedDatabase(WeirError):
    """A database can no longer be read. The message is for the operator."""

    def __init__(self, name: str, error: sqlite3.Error) -> None:
        super().__init__(
            f"{name} is damaged or cannot be read ({error}). Stop the server and restore the file "
            "from a copy, or start with another folder."
        )


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether an error says that the file itself is damaged."""
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """A database, open until `close`.

    Args:
        path: path of the file; None for memory.
        tables: SQL that creates the tables of a new database.
        version: version of the tables (`PRAGMA user_version`).
        create: whether the file may be missing or empty.

    Attributes:
        lost: why an attached database was given up, by the name of that database.
    """

    def __init__(
        self, path: Path | None, tables: str, version: int, *, create: bool = True
    ) -> None:
        self._name = "the database in memory" if path is None else str(path)
        self._writing = threading.RLock()
        self._attached: set[str] = set()
        self.lost: dict[str, str] = {}
        self._reading: Any = self._writing if path is None else threading.Lock()
        if path is None:
            self._writer = self._reader = _connected(":memory:")
            self._make(tables, version)
            return
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise WeirError(f"{path} is not an ordinary file. Remove it, or use another folder.")
        if not create and not (path.exists() and path.stat().st_size):
            raise WeirError(
                f"{path.parent} has snapshots, but not the tables that describe them. Restore its "
                f"{path.name}, or use another folder."
            )
        with contextlib.ExitStack() as undo:
            try:
                # Only the user who runs the server may read the file. SQLite gives its logs the
                # same rights.
                flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
                os.close(os.open(path, flags, 0o600))
                self._writer = _connected(path)
                undo.callback(self._writer.close)
                # A new database has the version 0 and no tables.
                found = self._writer.execute("PRAGMA user_version").fetchone()[0]
                there = self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                if create and found == 0 and there == 0:
                    self._writer.execute("PRAGMA journal_mode = WAL")
                    self._make(tables, version)
                elif found != version:
                    raise WeirError(
                        f"{path} has version {found}, but this version of weir reads {version}. "
                        "Use another folder."
                    )
                elif self._writer.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                    raise WeirError(
                        f"{path} is damaged. Restore it from a copy, or use another folder."
                    )
                self._reader = _connected(path)
            except (OSError, sqlite3.Error) as error:
                raise WeirError(f"{path} is damaged or cannot be opened: {error}") from None
            undo.pop_all()

    def _make(self, tables: str, version: int) -> None:
        with self.writing() as db:
            for statement in tables.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {version}")

    def attach(self, path: Path | None, name: str) -> None:
        """Attach another database, in a file or in memory, that is written in the same
        transactions.

        Its tables must have names that do not occur in this database. Raises `sqlite3.Error` or
        OSError if it cannot be opened.
        """
        if path is not None:
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(path, flags, 0o600))
        connections = {id(one): one for one in (self._writer, self._reader)}
        self._attached.add(name)
        with self._writing:
            for one in connections.values():
                where = ":memory:" if path is None else str(path)
                one.execute(f"ATTACH DATABASE ? AS {name}", (where,))
                if path is not None:
                    one.execute(f"PRAGMA {name}.journal_mode = WAL")

    def detach(self, name: str) -> None:
        """Detach an attached database, even if only one of the connections has attached it."""
        self._attached.discard(name)
        for one in {id(one): one for one in (self._writer, self._reader)}.values():
            with contextlib.suppress(sqlite3.Error):
                one.execute(f"DETACH DATABASE {name}")

    def close(self) -> None:
        """Close the file."""
        with self._reading:
            self._reader.close()
        with self._writing:
            self._writer.close()

    def shorten(self) -> None:
        """Move the write-ahead log into the database file, as far as the disk has room for it."""
        with self._writing, contextlib.suppress(sqlite3.Error):
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, for one thread at a time. Either all of it is written, or nothing."""
        with self._writing:
            try:
                self._begin()
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):  # it may have been rolled back already
                    self._writer.execute("ROLLBACK")
                if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
                    raise DamagedDatabase(self._name, error) from None
                if isinstance(error, sqlite3.Error | UnicodeEncodeError):
                    raise refusal(error) from None
                raise

    def _begin(self) -> None:
        """Begin a transaction. An attached database that another process has locked is given up."""
        try:
            self._writer.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not self._attached or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            for name in tuple(self._attached):
                self.lost[name] = "it is locked by another process"
                self.detach(name)
            self._writer.execute("BEGIN IMMEDIATE")

    def query(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Return the rows of a query, by column name, from the latest commit."""
        try:
            with self._reading:
                return self._reader.execute(query, values).fetchall()
        except UnicodeEncodeError:
            return []  # a lone surrogate is not a text, so no row has it
        except sqlite3.DatabaseError as error:
            raise DamagedDatabase(self._name, error) from None

    def first(self, query: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a query, or None if there is none."""
        return next(iter(self.query(query, *values)), None)


def insert(db: sqlite3.Connection, table: str, **values: Any) -> None:
    """Insert a row, given by the names of its columns."""
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))


def _connected(path: Path | str) -> sqlite3.Connection:
    found = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    found.row_factory = sqlite3.Row
    for setting in ("synchronous = FULL", "foreign_keys = ON", "trusted_schema = OFF"):
        found.execute(f"PRAGMA {setting}")
    return found
