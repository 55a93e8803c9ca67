"""A shelf on disk: a snapshot a node, and a row in the tables that says which file it is in.

A node is safe in this order: its file is written and synced, takes its name, the folder is synced,
its row is committed, and then who put it is told. So a file without a row is of a node that nobody
was told of, and is removed at the next start; a row without its file never comes from a crash.
Knows nothing about whose the nodes are.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from transformers import PreTrainedModel

from weir.errors import WeirError, quote
from weir.policies import Policy
from weir.serve.engine import Checkpoint, OnSaved
from weir.serve.sessions.checkpoints import LazyCheckpoint
from weir.serve.sessions.database import Database, fetch_all, fetch_one
from weir.serve.sessions.snapshot import RowFormat, decode_checkpoint, encode_checkpoint
from weir.serve.sessions.snapshot_folder import DiskReserve, SnapshotFolder, lock, new_name
from weir.serve.sessions.writer import CheckpointWriter, WriteJob

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SQLiteCheckpoints:
    """Nodes on disk, written by a thread of their own; those used longest ago go at a limit.

    Args:
        folder: where they are; made if there is none. One process at a time has it.
        model: whose rows they are.
        policy: of the rows.
        chunk: of the rows; None for what the policy was measured with, or 64.
        limit: bytes of snapshots that are kept; None for as many as the disk takes. While one is
            written, there is one more.
        pending: nodes that may wait to be written; who puts one more waits.

    Raises:
        WeirError: the folder cannot be used, another process has it, or what is in it is of another
            model or policy.
    """

    def __init__(
        self,
        folder: str | Path,
        model: PreTrainedModel,
        policy: str | Policy,
        *,
        chunk: int | None = None,
        limit: int | None = None,
        pending: int = 2,
    ) -> None:
        if limit is not None and limit < 1:
            raise WeirError(f"a store may have one byte or more, not {limit}")
        self.folder = Path(folder)
        self._form = RowFormat.of(model, policy, chunk)
        self._limit = limit
        with contextlib.ExitStack() as undo:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = lock(self.folder / "lock")
                undo.callback(os.close, self._lock)
                self._files = SnapshotFolder(self.folder / "nodes")
            except BlockingIOError:
                raise WeirError(f"{folder} is in use by another server") from None
            except FileExistsError:
                raise WeirError(f"{folder} is no folder") from None
            except OSError as error:
                raise WeirError(f"{folder} cannot be used: {error.strerror}") from None
            undo.callback(self._files.close)
            self._reserve = DiskReserve(self.folder / "reserve")
            with self._reserve.given_up():
                # Files of tables that are gone are somebody's, and not to be taken for leftovers.
                self._tables = Database(self.folder / "weir.db", begin=not self._files.files())
                undo.callback(self._tables.close)
                self._open()
            undo.pop_all()
        self._writer = CheckpointWriter(self._save, pending)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what was put and let go of the folder; nothing can be asked of it any more."""
        if self._lock < 0:
            return
        self._writer.close()
        with contextlib.suppress(sqlite3.Error), self._changing():
            pass  # when nodes were used last
        self._tables.close()
        self._files.close()
        os.close(self._lock)
        self._lock = -1

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return self._held

    # --- what a shelf does

    def get(self, name: str) -> Checkpoint:
        """A node; its state is read from disk when it is asked for.

        Raises:
            WeirError: there is none of that name. The node's state raises one where it is damaged;
                then it is dropped.
        """
        node = self._writer.find(name)
        if node is None:
            with self._tables.reading() as db:
                found = fetch_one(
                    db, "SELECT file, bytes, sha256, pending FROM nodes WHERE name = ?", name
                )
            if found is None:
                raise _unknown()
            row = dict(found)
            node = LazyCheckpoint(tuple(json.loads(row["pending"])), lambda: self._read(name, row))
        self._touch(name)
        return node

    def put(self, name: str, node: Checkpoint, done: OnSaved) -> None:
        """Keep a node; `done` is called in the thread that writes, when it is safe or cannot be."""
        self._writer.put(name, node, done)

    def drop(self, name: str) -> None:
        """Forget a node, if there is one of that name.

        Raises:
            WeirError: the disk does not let go of it.
        """
        self._drop([name])

    # --- opening

    def _open(self) -> None:
        """Check whose store it is, and set right what a killed process left."""
        said = json.dumps(self._form.said)
        self._alone = threading.RLock()  # whoever changes what is held
        self._touching = threading.Lock()
        self._touched: dict[str, int] = {}  # uses that no table knows yet, by node
        try:
            with self._tables.writing() as db:
                db.execute("INSERT OR IGNORE INTO facts VALUES ('form', ?)", (said,))
                theirs = fetch_one(db, "SELECT value FROM facts WHERE name = 'form'")
                assert theirs is not None
                self._form.check(json.loads(theirs["value"]))
                self._mend(db)
                ((self._clock, self._held),) = db.execute(
                    "SELECT coalesce(max(used), 0), coalesce(sum(bytes), 0) FROM nodes"
                )
        except (sqlite3.Error, OSError, ValueError, RecursionError) as error:
            raise WeirError(f"{self.folder} cannot be used: {error}") from None
        except WeirError as error:
            raise WeirError(
                f"{self.folder} cannot be used here: {error}; give it its own model and policy, or "
                "another folder"
            ) from None

    def _mend(self, db: sqlite3.Connection) -> None:
        """Rows without their files and files without a row go."""
        kept = set()
        for row in fetch_all(db, "SELECT name, file, bytes FROM nodes"):
            size = self._files.size(str(row["file"]))
            if size == row["bytes"]:
                kept.add(row["file"])
                continue
            why = "is missing" if size is None else f"has {size:,} bytes, not {row['bytes']:,}"
            _log.warning("turn %s is dropped: its file %s", quote(row["name"]), why)
            db.execute("DELETE FROM nodes WHERE name = ?", (row["name"],))
        self._files.clear_parts()
        self._remove([name for name in self._files.files() if name not in kept])

    # --- changing

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Change the tables; uses that none knows yet are written with it.

        Raises:
            WeirError: they cannot be changed.
        """
        with self._tables.writing() as db:
            with self._touching:
                touched = dict(self._touched)
            db.executemany(
                "UPDATE nodes SET used = ? WHERE name = ?",
                [(used, name) for name, used in touched.items()],
            )
            yield db
        with self._touching:
            for name, used in touched.items():
                if self._touched.get(name) == used:
                    del self._touched[name]

    def _touch(self, name: str) -> int:
        """A node was used."""
        with self._touching:
            self._clock += 1
            self._touched[name] = self._clock
            return self._clock

    def _save(self, job: WriteJob) -> None:
        """Write a node, in the writer's thread.

        Raises:
            WeirError: it cannot be written; then it was never there, and all others are.
        """
        data = encode_checkpoint(self._form, job.node)
        if self._limit is not None and len(data) > self._limit:
            raise WeirError(
                f"one turn takes {len(data):,} bytes and the store has {self._limit:,} for all"
            )
        try:
            file = self._write(data)
            try:
                gone = self._enter(job, file, data)
            except Exception:
                self._files.delete(file)
                raise
        except (OSError, sqlite3.Error) as error:
            raise self._refused(error) from None
        self._remove(gone)

    def _write(self, data: bytes) -> str:
        """Write a snapshot; returns the file it is safe in."""
        file = new_name()
        self._files.write(file, data)
        return file

    def _enter(self, job: WriteJob, file: str, data: bytes) -> list[str]:
        """Commit the row of a node whose file is safe.

        Returns:
            Files that no row names any more.
        """
        with self._alone:
            with self._changing() as db:
                if job.dropped:
                    return [file]
                before = _node(db, job.name)
                self._insert(db, job.name, file, data, job.node.pending)
                held = self._held + len(data) - sum(row["bytes"] for row in before)
                evicted = self._evict(db, held, {job.name})
            self._held = held - sum(row["bytes"] for row in evicted)
        return [row["file"] for row in (*before, *evicted)]

    def _insert(
        self, db: sqlite3.Connection, name: str, file: str, data: bytes, pending: tuple[int, ...]
    ) -> None:
        """Make the row of a node, or change it to another file."""
        digest, used = hashlib.sha256(data).hexdigest(), self._touch(name)
        db.execute(
            "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "file = excluded.file, bytes = excluded.bytes, sha256 = excluded.sha256, "
            "pending = excluded.pending, used = excluded.used",
            (name, file, len(data), digest, json.dumps(pending), used),
        )

    def _evict(self, db: sqlite3.Connection, held: int, new: set[str]) -> list[sqlite3.Row]:
        """Delete the rows used longest ago until the rest is within the limit; new ones stay."""
        evicted: list[sqlite3.Row] = []
        while self._limit is not None and held > self._limit:
            oldest = fetch_all(
                db, "SELECT name, file, bytes FROM nodes ORDER BY used LIMIT ?", len(new) + 1
            )
            row = next(row for row in oldest if row["name"] not in new)
            db.execute("DELETE FROM nodes WHERE name = ?", (row["name"],))
            evicted.append(row)
            held -= row["bytes"]
        return evicted

    def _drop(self, names: list[str]) -> None:
        """Forget nodes, all of them or none.

        Raises:
            WeirError: the disk does not let go of them.
        """
        try:
            try:
                gone = self._leave(names)
            except sqlite3.OperationalError as error:
                if not _is_full(error):
                    raise
                with self._tables.reading() as db:
                    files = [row["file"] for name in names for row in _node(db, name)]
                with self._reserve.given_up():
                    self._remove(files)
                    self._tables.shorten()
                    gone = self._leave(names)
        except sqlite3.Error as error:
            raise self._refused(error) from None
        self._remove(gone)

    def _leave(self, names: Iterable[str]) -> list[str]:
        """Delete the rows of nodes; returns the files they had."""
        gone: list[sqlite3.Row] = []
        with self._alone:
            with self._changing() as db:
                for name in names:
                    self._writer.drop(name)  # which is looked at once more before a row is made
                    gone += _node(db, name)
                    db.execute("DELETE FROM nodes WHERE name = ?", (name,))
            self._held -= sum(row["bytes"] for row in gone)
        return [row["file"] for row in gone]

    def _remove(self, files: list[str]) -> None:
        """Remove files that no row names; what cannot be removed goes at the next start."""
        for file in files:
            try:
                self._files.delete(file)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", file, error)

    def _refused(self, error: Exception) -> WeirError:
        """A sentence for what the disk says."""
        if _is_full(error):
            return WeirError(
                f"the disk of {self.folder} is full, so the turn is not kept; delete sessions or "
                "make room"
            )
        reason = getattr(error, "strerror", None) or error
        return WeirError(f"the turn cannot be kept in {self.folder}: {reason}")

    # --- reading

    def _read(self, name: str, row: dict[str, Any]) -> Checkpoint:
        """The node of a row.

        Raises:
            WeirError: it is not there any more, or cannot be read. One that is damaged is dropped.
        """
        try:
            node = decode_checkpoint(self._form, self._bytes(row))
            if json.dumps(node.pending) != row["pending"]:
                raise WeirError("it is the end of another turn")
            return node
        except FileNotFoundError:
            with contextlib.suppress(WeirError):
                self._drop_damaged(name, row["file"])
            raise _unknown() from None
        except OSError as error:
            raise WeirError(f"turn {quote(name)} cannot be read: {error.strerror}") from None
        except WeirError as error:
            _log.warning("turn %s cannot be read and is dropped: %s", quote(name), error)
            with contextlib.suppress(WeirError):
                self._drop_damaged(name, row["file"])
            raise WeirError(
                f"turn {quote(name)} cannot be gone on from, and is dropped: {error}"
            ) from None

    def _bytes(self, row: dict[str, Any]) -> bytes:
        """The file of a row, the bytes that were written."""
        data = self._files.read(row["file"], row["bytes"])
        if hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise WeirError("its file is damaged: its checksum is not that of what was written")
        return data

    def _drop_damaged(self, name: str, file: str) -> None:
        """Drop a node if its row still names this file."""
        with self._tables.reading() as db:
            same = [row for row in _node(db, name) if row["file"] == file]
        if same:
            self._drop([name])


def _is_full(error: Exception) -> bool:
    return getattr(error, "errno", None) in _FULL or "is full" in str(error)


def _unknown() -> WeirError:
    return WeirError("what this turn goes on from is not kept any more")


def _node(db: sqlite3.Connection, name: str) -> list[sqlite3.Row]:
    return fetch_all(db, "SELECT file, bytes FROM nodes WHERE name = ?", name)
