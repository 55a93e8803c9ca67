"""Turns in SQLite tables: the state of each as a snapshot in memory or in a file, and its record.

Past a limit the least recently used turns are deleted. Every query names the owner, so that another
owner's turns look absent. Names that come from clients are values in tables, never parts of a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weir.errors import WeirError, quote
from weir.serve.messages import Message
from weir.serve.sessions.database import Database
from weir.serve.sessions.records import (
    NOT_KEPT,
    Checkpoint,
    LazyCheckpoint,
    NameTaken,
    SessionSummary,
    StorageFull,
    Turn,
    TurnRecord,
    TurnTokens,
)
from weir.serve.sessions.snapshot import RowFormat, decode_checkpoint, encode_checkpoint
from weir.serve.sessions.snapshot_folder import (
    DiskReserve,
    SnapshotFolder,
    lock_file,
    new_name,
    refusal,
)

_log = logging.getLogger(__name__)

VERSION = 2
"""Version of the tables (`PRAGMA user_version`)."""

TABLES = """
CREATE TABLE facts (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE nodes (
    name TEXT PRIMARY KEY,
    file TEXT NOT NULL UNIQUE,
    bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    pending TEXT NOT NULL,  -- JSON: tokens
    used INTEGER NOT NULL   -- rises from use to use: clocks jump
);
CREATE INDEX nodes_used ON nodes (used);
CREATE TABLE records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order they came
    node TEXT NOT NULL UNIQUE REFERENCES nodes (name) ON DELETE CASCADE,
    owner TEXT NOT NULL,
    parent TEXT,
    chain TEXT NOT NULL,
    messages TEXT NOT NULL,  -- JSON: [role, content, name] each
    last INTEGER NOT NULL,
    seen INTEGER NOT NULL,
    usage TEXT NOT NULL,  -- JSON: numbers by name
    created REAL NOT NULL,
    ids BLOB NOT NULL,  -- tokens, four bytes each
    topic TEXT NOT NULL
);
CREATE INDEX records_chain ON records (owner, chain);
CREATE INDEX records_parent ON records (parent);
CREATE TABLE members (  -- which turns are in which sessions
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    session TEXT NOT NULL,
    node TEXT NOT NULL REFERENCES nodes (name) ON DELETE CASCADE,
    UNIQUE (owner, session, node)
);
CREATE INDEX members_node ON members (node);
"""

_RECORD = "node, owner, parent, chain, messages, last, seen, usage, created, ids"
_COLUMNS = f"""{_RECORD}, (
    SELECT session FROM members WHERE members.node = records.node ORDER BY members.number LIMIT 1
) AS session"""

_SUMMARIES = """
WITH own AS (
    SELECT session, count(*) AS turns, max(members.number) AS newest,
        min(members.number) AS oldest, max(max(used, coalesce(uses.value, 0))) AS used
    FROM members JOIN nodes ON name = node LEFT JOIN json_each(?1) AS uses ON uses.key = node
    WHERE owner = ?2 AND (?3 IS NULL OR session = ?3) GROUP BY session
)
SELECT own.session AS id, head.node AS head, turns, begin.created AS created,
    head.created AS used, head.seen, head.usage, head.topic
FROM own
JOIN members AS late ON late.number = newest JOIN records AS head ON head.node = late.node
JOIN members AS early ON early.number = oldest JOIN records AS begin ON begin.node = early.node
ORDER BY own.used"""

_ANCESTRY = """
WITH RECURSIVE line (node, parent, seen, ids) AS (
    SELECT node, parent, seen, ids FROM records WHERE node = ?1 AND owner = ?2
    UNION ALL SELECT records.node, records.parent, records.seen, records.ids
    FROM records JOIN line ON records.node = line.parent AND records.owner = ?2
    AND records.seen = line.seen - length(line.ids) / 4 AND records.seen < line.seen
)
SELECT node, seen, ids, parent FROM line ORDER BY seen"""

_PATH = """
WITH RECURSIVE above (ancestor) AS (
    VALUES (?1) UNION SELECT parent FROM records JOIN above ON node = ancestor WHERE owner = ?2
)
SELECT node FROM records JOIN above ON node = ancestor WHERE owner = ?2 ORDER BY number"""

_LEAVING = """
SELECT name, file, bytes, NOT EXISTS (
    SELECT 1 FROM members WHERE node = name AND (owner, session) != (?2, ?3)
) AS alone FROM nodes WHERE name IN (SELECT value FROM json_each(?1)) AND (?2 IS NULL OR EXISTS (
    SELECT 1 FROM members WHERE node = name AND (owner, session) = (?2, ?3)
))"""
"""The turns of a list that are in a session, and whether in no other; NULL is all sessions."""

_JOIN = "INSERT INTO members (owner, session, node) VALUES (?, ?, ?)"


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is safe, as its row describes it.

    Attributes:
        bytes: that count for the limit.
    """

    name: str
    file: str
    bytes: int
    sha256: str
    pending: tuple[int, ...]


class TurnTables:
    """Turns of which both record and state are in memory; base of other places.

    Args:
        limit: number of turns.

    Attributes:
        nbytes: bytes of all snapshots; in memory, their number.
        exclusive: excludes other changes inside a `with` block.
    """

    def __init__(self, limit: int) -> None:
        self._states: dict[str, Checkpoint] = {}  # by `Snapshot.file`
        self._begin(Database(None, TABLES, VERSION), limit)

    def _begin(self, db: Database, limit: int | None) -> None:
        self.db = db
        self.exclusive = threading.RLock()  # guards `nbytes`
        self._limit = limit
        self._uses_lock = threading.Lock()
        self._uses: dict[str, int] = {}  # uses that are not in the database yet, by turn
        ((self._clock, self.nbytes),) = db.query(
            "SELECT coalesce(max(used), 0), coalesce(sum(bytes), 0) FROM nodes"
        )

    # --- snapshots; other places than memory have methods of their own

    def _keep(self, name: str, checkpoint: Checkpoint) -> Snapshot:
        """Keep the snapshot of a turn."""
        file = new_name()
        self._states[file] = checkpoint
        return Snapshot(name, file, 1, "", checkpoint.pending)

    def _checkpoint(self, snapshot: Snapshot) -> Checkpoint:
        """The checkpoint of a snapshot that was kept."""
        try:
            return self._states[snapshot.file]
        except KeyError:
            raise WeirError(NOT_KEPT) from None

    def _discard(self, files: Collection[str]) -> None:
        """Delete snapshots that no row names."""
        for file in files:
            self._states.pop(file, None)

    def _too_large(self, what: str, size: int, turns: int) -> WeirError:
        """The error of turns that exceed the limit."""
        return WeirError(f"it has {turns} turns, and {self._limit} of all are kept here")

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file in transit, on the disk that snapshots are on."""
        return TemporaryDirectory(prefix="weir-")

    def has_room(self, turns: int = 1) -> bool:
        """Whether there is room for so many turns."""
        return True

    def make_room(self, turns: int, keep: int) -> bool:
        """Make room for so many turns, and say whether there is any."""
        return self.has_room(turns)

    def close(self) -> None:
        """Release the place; closing twice does nothing."""

    # --- reading

    def load(self, node: str) -> Checkpoint | None:
        """The checkpoint of a turn; None if there is none of that name."""
        rows = self.db.query(
            "SELECT name, file, bytes, sha256, pending FROM nodes WHERE name = ?", node
        )
        if not rows:
            return None
        self._touch(node)
        facts = {**rows[0], "pending": tuple(json.loads(rows[0]["pending"]))}
        return self._checkpoint(Snapshot(**facts))

    def newest(self, owner: str, column: str, value: str) -> TurnRecord | None:
        """The owner's newest turn with a value in a column of its record."""
        rows = self.db.query(
            f"SELECT {_COLUMNS} FROM records WHERE owner = ? AND {column} = ? "
            "ORDER BY number DESC LIMIT 1",
            owner,
            value,
        )
        return _record_of(rows[0]) if rows else None

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """The turns of a session, in the order they came."""
        found = self.db.query(
            f"SELECT {_COLUMNS} FROM records JOIN (SELECT node AS member, number AS place FROM "
            "members WHERE owner = ? AND session = ?) ON member = node ORDER BY place",
            owner,
            session,
        )
        return [_record_of(row) for row in found]

    def list_all(self) -> list[TurnRecord]:
        """All turns, in the order they came."""
        return [*map(_record_of, self.db.query(f"SELECT {_COLUMNS} FROM records ORDER BY number"))]

    def summaries(self, owner: str, session: str | None = None) -> list[SessionSummary]:
        """The owner's sessions, or one of them, the least recently used first."""
        with self._uses_lock:
            uses = json.dumps(self._uses)
        found = self.db.query(_SUMMARIES, uses, owner, session)
        return [SessionSummary(**{**row, "usage": json.loads(row["usage"])}) for row in found]

    def ancestry(self, owner: str, node: str) -> tuple[list[TurnTokens], str | None]:
        """The tokens that led to a turn, as far back as its turns are here; the parent of those."""
        rows = self.db.query(_ANCESTRY, node, owner)
        found = [TurnTokens(row["node"], row["seen"], row["ids"]) for row in rows]
        return found, rows[0]["parent"] if rows else node

    def _touch(self, node: str) -> int:
        """Note that a turn was used; the number rises from use to use."""
        with self._uses_lock:
            self._clock += 1
            self._uses[node] = self._clock
            return self._clock

    # --- writing

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which also writes when turns were used.

        Raises:
            WeirError: it cannot be committed; nothing has changed.
        """
        with self.exclusive, self.db.writing() as db:
            with self._uses_lock:
                uses = dict(self._uses)
            db.executemany(
                "UPDATE nodes SET used = ? WHERE name = ?",
                [(used, name) for name, used in uses.items()],
            )
            yield db
        with self._uses_lock:
            for name, used in uses.items():
                if self._uses.get(name) == used:
                    del self._uses[name]

    def add(self, turns: Sequence[Turn], what: str = "one turn") -> None:
        """Add turns, all or none; one of the same name is replaced.

        Args:
            what: name of the turns, for errors.

        Raises:
            WeirError: they exceed the limit, or the disk refuses them; nothing has changed.
        """
        new: list[Snapshot] = []
        try:
            for checkpoint, record in turns:
                new.append(self._keep(record.node, checkpoint))
                size = sum(snapshot.bytes for snapshot in new)
                if self._limit is not None and size > self._limit:
                    raise self._too_large(what, size, len(turns))
            names = json.dumps([snapshot.name for snapshot in new])
            with self.exclusive:
                with self.changing() as db:
                    gone = db.execute(
                        "SELECT name, file, bytes FROM nodes WHERE name IN "
                        "(SELECT value FROM json_each(?))",
                        (names,),
                    ).fetchall()
                    for snapshot, (_, record) in zip(new, turns, strict=True):
                        self._insert(db, snapshot, record)
                    held = self.nbytes + size - sum(row["bytes"] for row in gone)
                    while self._limit is not None and held > self._limit:
                        oldest = db.execute(
                            "SELECT name, file, bytes FROM nodes WHERE name NOT IN "
                            "(SELECT value FROM json_each(?)) ORDER BY used LIMIT 1",
                            (names,),
                        ).fetchone()
                        db.execute("DELETE FROM nodes WHERE name = ?", (oldest["name"],))
                        gone.append(oldest)
                        held -= oldest["bytes"]
                self.nbytes = held
        except BaseException:
            self._discard([snapshot.file for snapshot in new])
            raise
        self._discard([row["file"] for row in gone])

    def _insert(self, db: sqlite3.Connection, snapshot: Snapshot, record: TurnRecord) -> None:
        """Insert the rows of a turn, and delete those of an earlier one of its name."""
        db.execute("DELETE FROM nodes WHERE name = ?", (snapshot.name,))  # the others go with it
        db.execute(
            "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?)",
            (
                snapshot.name,
                snapshot.file,
                snapshot.bytes,
                snapshot.sha256,
                json.dumps(snapshot.pending),
                self._touch(snapshot.name),
            ),
        )
        db.execute(
            f"INSERT INTO records ({_RECORD}, topic) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                record.node,
                record.owner,
                record.parent,
                record.chain,
                json.dumps([message.to_json() for message in record.messages]),
                record.last,
                record.seen,
                json.dumps(record.usage),
                record.created,
                record.ids,
                record.topic,
            ),
        )
        db.execute(_JOIN, (record.owner, record.session, record.node))

    def remove(
        self, nodes: Collection[str], owner: str | None = None, session: str | None = None
    ) -> list[str]:
        """Take turns out of a session, or out of all.

        Returns:
            Those that are in no session any more, which are deleted.
        """
        with self.exclusive:
            rows = self.db.query(_LEAVING, json.dumps(sorted(nodes)), owner, session)
            gone = [row for row in rows if row["alone"]]
            if not rows:
                return []
            with self.changing() as db:
                db.executemany("DELETE FROM nodes WHERE name = ?", [(r["name"],) for r in gone])
                db.executemany(
                    "DELETE FROM members WHERE node = ? AND owner = ? AND session = ?",
                    [(row["name"], owner, session) for row in rows],
                )
            self.nbytes -= sum(row["bytes"] for row in gone)
        self._discard([row["file"] for row in gone])
        return [row["name"] for row in gone]

    def fork(self, owner: str, node: str, session: str) -> None:
        """Begin a session that ends with a turn of another: that one and its ancestors."""
        with self.changing() as db:
            path = db.execute(_PATH, (node, owner)).fetchall()
            if not path:
                raise WeirError("there is no such turn")
            taken = "SELECT 1 FROM members WHERE owner = ? AND session = ?"
            if db.execute(taken, (owner, session)).fetchone() is not None:
                raise NameTaken("there is a session of this name already")
            db.executemany(_JOIN, [(owner, session, row["node"]) for row in path])


class DiskTurns(TurnTables):
    """Turns in a folder: tables in `weir.db`, and a snapshot file for each turn.

    The order of writes makes a crash safe at any point: the snapshot file is written and synced,
    takes its name, and the folder is synced; only then the row that names it is committed. A file
    without a row belongs to a turn that no client saw end, and is deleted at the next start. A
    crash never leaves a row without its file.

    Args:
        folder: created if missing. One process at a time may use it.
        limit: bytes of all snapshots, and one more while one is written; past it, or where the disk
            is full before, the least recently used turns are deleted. None for no limit: nothing is
            ever deleted.

    Raises:
        WeirError: the folder cannot be used, another process uses it, or its rows are of another
            model or policy.
    """

    def __init__(self, folder: Path, row_format: RowFormat, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise WeirError(f"a store may have one byte or more, not {limit}")
        self.folder = folder
        self.row_format = row_format
        self._scratch = folder / "moving"
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
            shutil.rmtree(self._scratch, ignore_errors=True)  # leftovers of a killed process
            self._reserve = DiskReserve(folder / "reserve")
            with self._reserve.released():
                # Snapshots whose database is gone may be valuable: never treat them as leftovers.
                create = not self._files.list_names()
                db = Database(folder / "weir.db", TABLES, VERSION, create=create)
                undo.callback(db.close)
                self._open(db)
                self._begin(db, limit)
            undo.pop_all()

    def close(self) -> None:
        """Write when turns were used and release the folder; closing twice does nothing."""
        if self._lock < 0:
            return
        with contextlib.suppress(WeirError), self.changing():
            pass
        self.db.close()
        self._files.close()
        os.close(self._lock)
        self._lock = -1

    def _open(self, database: Database) -> None:
        """Check that the rows are of this format, and delete what a killed process left."""
        try:
            with database.writing() as db:
                written = json.dumps(self.row_format.to_json())
                db.execute("INSERT OR IGNORE INTO facts VALUES ('form', ?)", (written,))
                ((found,),) = db.execute("SELECT value FROM facts WHERE name = 'form'")
                self.row_format.check_place(str(self.folder), found)
                self._delete_leftovers(db)
        except OSError as error:
            raise WeirError(f"{self.folder} cannot be used: {error}") from None

    def _delete_leftovers(self, db: sqlite3.Connection) -> None:
        """Delete turns without a record, rows without their file, and files without a row."""
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

    # --- snapshots

    def _keep(self, name: str, checkpoint: Checkpoint) -> Snapshot:
        data = encode_checkpoint(self.row_format, checkpoint)
        file = new_name()
        try:
            self._files.write(file, data)
        except OSError as error:
            raise refusal(error) from None
        checksum = hashlib.sha256(data).hexdigest()
        return Snapshot(name, file, len(data), checksum, checkpoint.pending)

    def _checkpoint(self, snapshot: Snapshot) -> Checkpoint:
        return LazyCheckpoint(snapshot.pending, lambda: self._read(snapshot))

    def _too_large(self, what: str, size: int, turns: int) -> WeirError:
        more = " or more" if turns > 1 else ""
        return WeirError(
            f"{what} takes {size:,} bytes{more}, and the store has {self._limit:,} for all sessions"
        )

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file in transit; the next start deletes what a crash leaves."""
        with contextlib.suppress(FileExistsError):
            self._scratch.mkdir(mode=0o700)
        return TemporaryDirectory(dir=self._scratch)

    def _read(self, snapshot: Snapshot) -> Checkpoint:
        """Read a snapshot file; a damaged one is deleted with its turn."""
        name = quote(snapshot.name)
        try:
            data = self._files.read(snapshot.file, snapshot.bytes)
            if hashlib.sha256(data).hexdigest() != snapshot.sha256:
                raise WeirError("its file is damaged: its checksum is not that of what was written")
            found = decode_checkpoint(self.row_format, data)
            if found.pending != snapshot.pending:
                raise WeirError("it is the end of another turn")
            return found
        except FileNotFoundError:
            self._delete_damaged(snapshot)
            raise WeirError(NOT_KEPT) from None
        except OSError as error:
            raise WeirError(f"turn {name} cannot be read: {error.strerror}") from None
        except WeirError as error:
            _log.warning("turn %s cannot be read and is dropped: %s", name, error)
            self._delete_damaged(snapshot)
            raise WeirError(
                f"turn {name} cannot be gone on from, and is dropped: {error}"
            ) from None

    def _delete_damaged(self, snapshot: Snapshot) -> None:
        """Delete a turn unless its row now names another file."""
        if self.db.query("SELECT 1 FROM nodes WHERE file = ?", snapshot.file):
            with contextlib.suppress(WeirError):
                self.remove([snapshot.name])

    def _discard(self, files: Collection[str]) -> None:
        for file in files:
            try:
                self._files.delete(file)
            except OSError as error:  # left to the next start
                _log.warning("%s cannot be removed: %s", file, error)

    # --- room

    def has_room(self, turns: int = 1) -> bool:
        """Whether the disk has room for so many turns."""
        return self._files.has_room(turns * self.row_format.turn_bytes)

    def make_room(self, turns: int, keep: int) -> bool:
        """Delete the least recently used turns until the disk has room for so many others.

        Nothing is deleted without a limit, which says that old turns may go, and nothing where that
        would not help: there are too few, or the disk refuses bytes that are free.

        Args:
            keep: number of turns that stay, the most recently used ones.

        Returns:
            Whether there is room.
        """
        if self.has_room(turns) or self._limit is None:
            return self.has_room(turns)
        size = turns * self.row_format.turn_bytes
        with self.exclusive, contextlib.suppress(WeirError):
            with self.changing() as db:
                rows = db.execute("SELECT name, bytes FROM nodes ORDER BY used").fetchall()
            rows = rows[: max(0, len(rows) - keep)]
            if self._files.free_bytes() + sum(row["bytes"] for row in rows) < size:
                return False
            for row in rows:
                if self._files.free_bytes() >= size:
                    break
                self.remove([row["name"]])
        return self.has_room(turns)

    def remove(
        self, nodes: Collection[str], owner: str | None = None, session: str | None = None
    ) -> list[str]:
        """Take turns out of a session, or out of all, also where the disk is full."""
        with self.exclusive:
            try:
                return super().remove(nodes, owner, session)
            except StorageFull:
                # Deleting takes room too: free the files and the reserve, then try once more.
                rows = self.db.query(_LEAVING, json.dumps(sorted(nodes)), owner, session)
                with self._reserve.released():
                    self._discard([row["file"] for row in rows if row["alone"]])
                    self.db.shorten()
                    return super().remove(nodes, owner, session)


def _record_of(row: sqlite3.Row) -> TurnRecord:
    values: dict[str, Any] = dict(row)
    values["messages"] = tuple(Message.from_json(kept) for kept in json.loads(values["messages"]))
    values["usage"] = json.loads(values["usage"])
    return TurnRecord(**values)
