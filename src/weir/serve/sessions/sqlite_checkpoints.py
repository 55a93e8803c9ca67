"""Checkpoints in a folder: one snapshot file per checkpoint, named by a row in SQLite.

The order of writes makes a crash safe at any point: the snapshot file is written and synced, takes
its name, and the folder is synced; only then the row that names it is committed. A file without a
row belongs to a turn that no client saw end, and is deleted at the next start. A crash never leaves
a row without its file. Knows nothing about owners or sessions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weir.errors import WeirError, quote
from weir.serve.sessions.database import Database
from weir.serve.sessions.records import NOT_KEPT, Checkpoint, LazyCheckpoint, StorageFull
from weir.serve.sessions.snapshot import RowFormat, decode_checkpoint, encode_checkpoint
from weir.serve.sessions.snapshot_folder import (
    DiskReserve,
    SnapshotFolder,
    is_full,
    lock_file,
    new_name,
)

_log = logging.getLogger(__name__)
ROWS_OF = "SELECT file, bytes FROM nodes WHERE name = ?"


@dataclass(frozen=True)
class WrittenSnapshot:
    """A snapshot file that is safe on disk, as its row describes it."""

    name: str
    file: str
    bytes: int
    sha256: str
    pending: tuple[int, ...]


class SQLiteCheckpoints:
    """Snapshot files and their rows; past the limit the least recently used are deleted.

    Args:
        folder: where they are kept; created if missing. One process at a time may use it.
        row_format: of the rows; a folder with rows of another format is refused.
        limit: bytes of all snapshots; None for no limit. While one is written there is one more.

    Attributes:
        nbytes: bytes of all snapshots.
        exclusive: excludes other changes inside a `with` block.

    Raises:
        WeirError: the folder cannot be used, another process uses it, or its rows are of another
            model or policy.
    """

    def __init__(self, folder: Path, row_format: RowFormat, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise WeirError(f"a store may have one byte or more, not {limit}")
        self.folder = folder
        self.row_format = row_format
        self._limit = limit
        with contextlib.ExitStack() as undo:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = lock_file(folder / "lock")
                undo.callback(os.close, self._lock)
                self._files = SnapshotFolder(folder / "nodes")
            except BlockingIOError:
                raise WeirError(f"{folder} is in use by another server") from None
            except FileExistsError:
                raise WeirError(f"{folder} is no folder") from None
            except OSError as error:
                raise WeirError(f"{folder} cannot be used: {error.strerror}") from None
            undo.callback(self._files.close)
            self._reserve = DiskReserve(folder / "reserve")
            with self._reserve.released():
                # Snapshots whose database is gone may be valuable: never treat them as leftovers.
                self.db = Database(folder / "weir.db", begin=not self._files.list_names())
                undo.callback(self.db.close)
                self._open()
            undo.pop_all()

    def close(self) -> None:
        """Write the times of use and release the folder; closing twice does nothing."""
        if self._lock < 0:
            return
        with contextlib.suppress(sqlite3.Error), self.changing():
            pass
        self.db.close()
        self._files.close()
        os.close(self._lock)
        self._lock = -1

    # --- opening

    def _open(self) -> None:
        """Check that the rows are of this format, and delete what a killed process left."""
        self.exclusive = threading.RLock()  # guards `nbytes`
        self._uses_lock = threading.Lock()
        self._uses: dict[str, int] = {}  # uses that are not in the database yet, by checkpoint
        try:
            with self.db.writing() as db:
                written = json.dumps(self.row_format.to_json())
                db.execute("INSERT OR IGNORE INTO facts VALUES ('form', ?)", (written,))
                ((found,),) = db.execute("SELECT value FROM facts WHERE name = 'form'")
                self.row_format.check(json.loads(found))
                self._delete_leftovers(db)
                ((self._clock, self.nbytes),) = db.execute(
                    "SELECT coalesce(max(used), 0), coalesce(sum(bytes), 0) FROM nodes"
                )
        except (sqlite3.Error, OSError, ValueError, RecursionError) as error:
            raise WeirError(f"{self.folder} cannot be used: {error}") from None
        except WeirError as error:
            raise WeirError(
                f"{self.folder} cannot be used here: {error}; give it its own model and policy, or "
                "another folder"
            ) from None

    def _delete_leftovers(self, db: sqlite3.Connection) -> None:
        """Delete checkpoints without a record, rows without their file, and files without a row."""
        db.execute(
            "DELETE FROM nodes WHERE name NOT IN (SELECT node FROM records) OR "
            "name NOT IN (SELECT node FROM members)"
        )
        kept = set()
        for row in db.execute("SELECT name, file, bytes FROM nodes").fetchall():
            size = self._files.size(str(row["file"]))
            if size == row["bytes"]:
                kept.add(row["file"])
                continue
            why = "is missing" if size is None else f"has {size:,} bytes, not {row['bytes']:,}"
            _log.warning("turn %s is dropped: its file %s", quote(row["name"]), why)
            db.execute("DELETE FROM nodes WHERE name = ?", (row["name"],))
        self._files.delete_parts()
        self.delete_files([name for name in self._files.list_names() if name not in kept])

    # --- reading

    def load(self, name: str) -> Checkpoint:
        """A checkpoint whose state is read from disk when it is first needed.

        Raises:
            WeirError: there is none of that name. Reading the state of a damaged one raises too,
                and deletes it.
        """
        rows = self.db.query("SELECT file, bytes, sha256, pending FROM nodes WHERE name = ?", name)
        if not rows:
            raise WeirError(NOT_KEPT)
        row = rows[0]
        self.touch(name)
        pending = tuple(json.loads(row["pending"]))
        written = WrittenSnapshot(name, row["file"], row["bytes"], row["sha256"], pending)
        return LazyCheckpoint(pending, lambda: self._read(written))

    def _read(self, written: WrittenSnapshot) -> Checkpoint:
        """Read a snapshot file."""
        name, file = written.name, written.file
        try:
            data = self._files.read(file, written.bytes)
            if hashlib.sha256(data).hexdigest() != written.sha256:
                raise WeirError("its file is damaged: its checksum is not that of what was written")
            found = decode_checkpoint(self.row_format, data)
            if found.pending != written.pending:
                raise WeirError("it is the end of another turn")
            return found
        except FileNotFoundError:
            with contextlib.suppress(WeirError):
                self._delete_damaged(name, file)
            raise WeirError(NOT_KEPT) from None
        except OSError as error:
            raise WeirError(f"turn {quote(name)} cannot be read: {error.strerror}") from None
        except WeirError as error:
            _log.warning("turn %s cannot be read and is dropped: %s", quote(name), error)
            with contextlib.suppress(WeirError):
                self._delete_damaged(name, file)
            raise WeirError(
                f"turn {quote(name)} cannot be gone on from, and is dropped: {error}"
            ) from None

    def _delete_damaged(self, name: str, file: str) -> None:
        """Delete a checkpoint unless its row now names another file."""
        if any(row["file"] == file for row in self.db.query(ROWS_OF, name)):
            self.delete([name])

    def touch(self, name: str) -> int:
        """Note that a checkpoint was used; the number rises from use to use."""
        with self._uses_lock:
            self._clock += 1
            self._uses[name] = self._clock
            return self._clock

    def unwritten_uses(self) -> dict[str, int]:
        """Uses not yet written to the database, by checkpoint."""
        with self._uses_lock:
            return dict(self._uses)

    # --- room

    def has_room(self, size: int) -> bool:
        """Whether the disk has room for so many bytes."""
        return self._files.has_room(size)

    def make_room(self, size: int, keep: int) -> bool:
        """Delete the least recently used checkpoints until the disk has room for `size` bytes.

        Nothing is deleted without a limit, which says that old checkpoints may go, and nothing
        where that would not help: there are too few, or the disk refuses bytes that are free.

        Args:
            keep: number of checkpoints that stay, the most recently used ones.

        Returns:
            Whether there is room.
        """
        if self.has_room(size) or self._limit is None:
            return self.has_room(size)
        with self.exclusive:
            uses = self.unwritten_uses()
            rows = self.db.query("SELECT name, bytes, used FROM nodes")
            rows.sort(key=lambda row: max(row["used"], uses.get(row["name"], 0)))
            rows = rows[: max(0, len(rows) - keep)]
            missing = size - self._files.free_bytes()
            if sum(row["bytes"] for row in rows) < missing:
                return False
            while rows and missing > 0:
                gone = []
                while rows and missing > 0:
                    gone.append(rows.pop(0))
                    missing -= gone[-1]["bytes"]
                with contextlib.suppress(WeirError):
                    self.delete([row["name"] for row in gone])
                missing = size - self._files.free_bytes()
            return self.has_room(size)

    # --- writing

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which also writes pending uses.

        Raises:
            sqlite3.Error: it cannot be committed; nothing has changed.
        """
        with self.exclusive, self.db.writing() as db:
            uses = self.unwritten_uses()
            db.executemany(
                "UPDATE nodes SET used = ? WHERE name = ?",
                [(used, name) for name, used in uses.items()],
            )
            yield db
        with self._uses_lock:
            for name, used in uses.items():
                if self._uses.get(name) == used:
                    del self._uses[name]

    @contextmanager
    def adding(
        self, checkpoints: Sequence[tuple[str, Checkpoint]], what: str
    ) -> Iterator[sqlite3.Connection]:
        """Add checkpoints, all or none, in one transaction with what is written meanwhile.

        Args:
            checkpoints: and their names; one of the same name is replaced.
            what: name of the checkpoints, for errors.

        Raises:
            WeirError: they exceed the limit, or the disk refuses them; nothing has changed.
        """
        written: list[WrittenSnapshot] = []
        try:
            for name, checkpoint in checkpoints:
                data = encode_checkpoint(self.row_format, checkpoint)
                size = sum(snapshot.bytes for snapshot in written) + len(data)
                if self._limit is not None and size > self._limit:
                    more = " or more" if len(checkpoints) > 1 else ""
                    raise WeirError(
                        f"{what} takes {size:,} bytes{more}, and the store has {self._limit:,} for "
                        "all sessions"
                    )
                file, checksum = new_name(), hashlib.sha256(data).hexdigest()
                self._files.write(file, data)
                written.append(WrittenSnapshot(name, file, len(data), checksum, checkpoint.pending))
            with self.exclusive:
                with self.changing() as db:
                    gone = [
                        row
                        for snapshot in written
                        for row in db.execute(ROWS_OF, (snapshot.name,)).fetchall()
                    ]
                    for snapshot in written:
                        self._insert(db, snapshot)
                    yield db
                    held = self.nbytes + size - sum(row["bytes"] for row in gone)
                    gone += self._evict(db, held, {snapshot.name for snapshot in written})
                self.nbytes += size - sum(row["bytes"] for row in gone)
        except (OSError, sqlite3.Error) as error:
            self.delete_files([snapshot.file for snapshot in written])
            raise self.refusal(error) from None
        except BaseException:
            self.delete_files([snapshot.file for snapshot in written])
            raise
        self.delete_files([row["file"] for row in gone])

    def _insert(self, db: sqlite3.Connection, written: WrittenSnapshot) -> None:
        """Insert the row of a snapshot, or update the row of that checkpoint."""
        db.execute(
            "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "file = excluded.file, bytes = excluded.bytes, sha256 = excluded.sha256, "
            "pending = excluded.pending, used = excluded.used",
            (
                written.name,
                written.file,
                written.bytes,
                written.sha256,
                json.dumps(written.pending),
                self.touch(written.name),
            ),
        )

    def _evict(self, db: sqlite3.Connection, held: int, new: set[str]) -> list[sqlite3.Row]:
        """Delete the least recently used rows until the rest is within the limit; keep new ones."""
        evicted: list[sqlite3.Row] = []
        while self._limit is not None and held > self._limit:
            oldest = db.execute(
                "SELECT name, file, bytes FROM nodes ORDER BY used LIMIT ?", (len(new) + 1,)
            ).fetchall()
            row = next(row for row in oldest if row["name"] not in new)
            db.execute("DELETE FROM nodes WHERE name = ?", (row["name"],))
            evicted.append(row)
            held -= row["bytes"]
        return evicted

    def delete(self, names: Iterable[str]) -> None:
        """Delete checkpoints with their records, all or none; unknown names are ignored."""
        names = list(names)
        try:
            try:
                files = self._delete_rows(names)
            except sqlite3.OperationalError as error:
                if not is_full(error):
                    raise
                # Deleting takes room too: free the files and the reserve, then try once more.
                rows = (row for name in names for row in self.db.query(ROWS_OF, name))
                files = [row["file"] for row in rows]
                with self._reserve.released():
                    self.delete_files(files)
                    self.db.shorten()
                    files = self._delete_rows(names)
        except sqlite3.Error as error:
            raise self.refusal(error) from None
        self.delete_files(files)

    def _delete_rows(self, names: list[str]) -> list[str]:
        """Delete rows; returns the files they named."""
        gone: list[sqlite3.Row] = []
        with self.exclusive:
            with self.changing() as db:
                for name in names:
                    gone += db.execute(ROWS_OF, (name,)).fetchall()
                    db.execute("DELETE FROM nodes WHERE name = ?", (name,))
            self.nbytes -= sum(row["bytes"] for row in gone)
        return [row["file"] for row in gone]

    def delete_files(self, files: list[str]) -> None:
        """Delete files that no row names; failures are left to the next start."""
        for file in files:
            try:
                self._files.delete(file)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", file, error)

    def refusal(self, error: Exception) -> WeirError:
        """Turn an error of the disk or the database into a WeirError."""
        if is_full(error):
            return StorageFull(
                f"the disk of {self.folder} is full, so the turn is not kept; delete sessions or "
                "make room"
            )
        reason = getattr(error, "strerror", None) or error
        return WeirError(f"the turn cannot be kept in {self.folder}: {reason}")
