"""Turns in a folder: SQLite tables in `weir.db`, and a snapshot file for each turn.

The order of writes makes a crash safe at any point. The snapshot file is written and synced, gets
its name, and the folder is synced. Only then is the table row that names it committed. A file
without a table row belongs to a turn that was deleted, or that was never reported to a client as
finished. It is deleted at the next start. Turns are deleted in the opposite order, first the table
row and then the file. So a crash never leaves a table row without its file, except while turns are
deleted on a full disk: then the files are deleted first, and the next start deletes the rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Collection
from pathlib import Path

from weir.cache import RowState
from weir.errors import WeirError, quote
from weir.serve.sessions.database import Database
from weir.serve.sessions.records import NOT_KEPT, Checkpoint, StorageFull
from weir.serve.sessions.snapshot_folder import (
    DiskReserve,
    SnapshotFolder,
    lock_file,
    new_name,
    refusal,
)
from weir.serve.sessions.store_format import StoreFormat
from weir.serve.sessions.turn_tables import LEAVING, TABLES, VERSION, TurnTables

_log = logging.getLogger(__name__)


def claim_folder(folder: Path) -> int:
    """Make a folder, if it is missing, and lock it for this process.

    Returns the file descriptor of the lock. Closing it releases the lock. Raises WeirError if the
    folder cannot be used, or if another server uses it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return lock_file(folder / "lock")
    except BlockingIOError:
        raise WeirError(
            f"{folder} is in use by another server. Stop that server, or use another folder."
        ) from None
    except FileExistsError:
        raise WeirError(f"{folder} is not a folder. Use another path.") from None
    except OSError as error:
        raise WeirError(f"cannot use {error.filename or folder}: {error.strerror}") from None


class DiskTurns(TurnTables):
    """Turns in a folder that one process at a time may use.

    Args:
        folder: created if missing.
        limit: bytes of all snapshots. New snapshots are written before old ones are deleted, so
            there can be more for a short time. Above the limit, or when the disk is full before
            that, the least recently used turns are deleted. None for no limit, in which case no
            turn is deleted to make room.
    """

    unit = "bytes"

    def __init__(self, folder: Path, store_format: StoreFormat, limit: int | None = None) -> None:
        self.folder = folder
        self.store_format = store_format
        self.scratch = folder / "moving"
        with contextlib.ExitStack() as undo:
            self._lock = claim_folder(folder)
            undo.callback(os.close, self._lock)
            try:
                self._files = SnapshotFolder(folder / "nodes")
            except OSError as error:
                raise WeirError(
                    f"cannot use {error.filename or folder}: {error.strerror}"
                ) from None
            undo.callback(self._files.close)
            shutil.rmtree(self.scratch, ignore_errors=True)  # left by a killed process
            self._reserve = DiskReserve(folder / "reserve")
            with self._reserve.released():
                # Snapshots whose database is gone may be valuable, so they are never deleted.
                create = not self._files.list_names()
                db = Database(folder / "weir.db", TABLES, VERSION, create=create)
                undo.callback(db.close)
                self._open(db)
                self._begin(db, limit)
            undo.pop_all()

    def close(self) -> None:
        """Save the times at which turns were last used, and release the folder. Closing twice does
        nothing.
        """
        if self._lock < 0:
            return
        with contextlib.suppress(WeirError), self.changing():
            pass
        self.db.close()
        self._files.close()
        os.close(self._lock)
        self._lock = -1

    def _open(self, database: Database) -> None:
        """Check that the saved turns have this format, and delete what a killed process left."""
        try:
            with database.writing() as db:
                written = json.dumps(self.store_format.to_json())
                db.execute("INSERT OR IGNORE INTO facts VALUES ('form', ?)", (written,))
                ((found,),) = db.execute("SELECT value FROM facts WHERE name = 'form'")
                self.store_format.check_place(str(self.folder), found)
                self._delete_leftovers(db)
        except OSError as error:
            raise WeirError(
                f"cannot use {self.folder}: {error.strerror or error}. Use another folder."
            ) from None

    def _delete_leftovers(self, db: sqlite3.Connection) -> None:
        """Delete turns that have no record, are in no session, or have no complete file, and files
        that belong to no turn.
        """
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
        self._discard([name for name in self._files.list_names() if name not in kept])

    def _archive_path(self) -> Path:
        return self.folder / "archive.db"

    # --- snapshots

    def _keep(self, checkpoint: Checkpoint) -> tuple[str, int, str]:
        data, file = checkpoint.to_bytes(), new_name()
        try:
            self._files.write(file, data)
        except OSError as error:
            raise refusal(error) from None
        return file, len(data), hashlib.sha256(data).hexdigest()

    def _checkpoint(self, row: sqlite3.Row) -> Checkpoint:
        return Checkpoint(lambda: self._read(row), tuple(json.loads(row["pending"])))

    def _read(self, row: sqlite3.Row) -> RowState:
        """Read a snapshot file. A damaged file is deleted with its turn."""
        name = quote(row["name"])
        try:
            data = self._files.read(row["file"], row["bytes"])
            if hashlib.sha256(data).hexdigest() != row["sha256"]:
                raise WeirError(
                    "its file is damaged: its checksum does not match the file that was written"
                )
            pending = tuple(json.loads(row["pending"]))
            return Checkpoint.from_bytes(data, self.store_format.rows, pending).state
        except FileNotFoundError:
            self._delete_damaged(row)
            raise WeirError(NOT_KEPT) from None
        except OSError as error:
            raise WeirError(f"turn {name} cannot be read: {error.strerror}") from None
        except WeirError as error:
            _log.warning("turn %s cannot be read and is dropped: %s", name, error)
            self._delete_damaged(row)
            raise WeirError(f"turn {name} cannot be continued and was deleted: {error}") from None

    def _delete_damaged(self, row: sqlite3.Row) -> None:
        """Delete a turn, unless its table row now names another file."""
        if self.db.query("SELECT 1 FROM nodes WHERE file = ?", row["file"]):
            with contextlib.suppress(WeirError):
                self.remove([row["name"]])

    def _discard(self, files: Collection[str]) -> None:
        for file in files:
            try:
                self._files.delete(file)
            except OSError as error:  # retried at the next start
                _log.warning("%s cannot be removed: %s", file, error)

    # --- room

    def turn_bytes(self, tokens: int | None = None) -> int:
        """See `TurnTables.turn_bytes`."""
        return self.store_format.turn_bytes(tokens)

    def free_bytes(self) -> int:
        """Return the free bytes that the disk reports."""
        return self._files.free_bytes()

    def has_room(self, size: int) -> bool:
        """Return whether the disk has room for turns of this many bytes together."""
        return self._files.has_room(size)

    def make_room(self, size: int, keep: int) -> bool:
        """Delete old turns until the disk has room for this many bytes. Returns whether it has room
        now.

        The `keep` most recently used turns stay. Nothing is deleted if the folder has no limit,
        because only a limit allows deletion. Nothing is deleted either if deleting all other turns
        would not free enough bytes, or if the disk already reports enough free bytes, but refuses
        to provide them.
        """
        if self.has_room(size) or self._limit is None:
            return self.has_room(size)
        with self.exclusive, contextlib.suppress(WeirError):
            uses = self._unwritten_uses()  # no room to write them
            rows = self.db.query("SELECT name, bytes, used FROM nodes")
            rows.sort(key=lambda row: uses.get(row["name"], row["used"]))
            rows = rows[: max(0, len(rows) - keep)]
            if self._files.free_bytes() + sum(row["bytes"] for row in rows) < size:
                return False
            for row in rows:
                if self._files.free_bytes() >= size:
                    break
                self.remove([row["name"]])
        return self.has_room(size)

    def remove(
        self, nodes: Collection[str], owner: str | None = None, session: str | None = None
    ) -> list[str]:
        """Remove turns from a session, or from all, even if the disk is full."""
        with self.exclusive:
            try:
                return super().remove(nodes, owner, session)
            except StorageFull:
                # Deleting takes room, too. Free the files and the reserve, then try once more.
                rows = self.db.query(LEAVING, json.dumps(sorted(nodes)), owner, session)
                with self._reserve.released():
                    self._discard([row["file"] for row in rows if row["alone"]])
                    self.db.shorten()
                    return super().remove(nodes, owner, session)
