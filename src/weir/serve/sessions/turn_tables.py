"""Turns in SQLite tables: a record of each, and its state as a snapshot in memory or in a file.

Above a limit, the least recently used turns are deleted. Turns are found by owner, so that another
owner's turns look absent; `load` takes only the id of a turn that was found before. Names that come
from clients are values in tables, never parts of a path.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.serve.messages import Message, ResultPlace
from weir.serve.sessions.database import Database, insert
from weir.serve.sessions.records import (
    NOT_KEPT,
    Checkpoint,
    NameTaken,
    SessionSummary,
    Turn,
    TurnRecord,
    TurnTokens,
    find_path,
)
from weir.serve.sessions.snapshot_folder import new_name
from weir.serve.sessions.turn_archive import TurnArchive

_log = logging.getLogger(__name__)

MAX_DROPPED = 4096
"""Largest number of dropped results of tools of one owner, and also of pinned results."""
DROPPED, PINNED = "dropped", "pinned"
"""The tables of dropped results, which the model must not read again, and of pinned results, which
must be kept.
"""
VERSION = 3
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
    pending TEXT NOT NULL,  -- tokens, as JSON
    used INTEGER NOT NULL   -- a number that rises with each use, because a clock can be set back
);
CREATE INDEX nodes_used ON nodes (used);
CREATE TABLE records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order in which they came
    node TEXT NOT NULL UNIQUE REFERENCES nodes (name) ON DELETE CASCADE,
    owner TEXT NOT NULL,
    parent TEXT,
    chain TEXT NOT NULL,
    messages TEXT NOT NULL,  -- JSON, as `Message.to_json` makes it
    last INTEGER NOT NULL,  -- the last token of the answer
    seen INTEGER NOT NULL,
    usage TEXT NOT NULL,  -- numbers by name, as JSON
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
CREATE TABLE results (  -- results of tools that turns have read
    node TEXT NOT NULL REFERENCES nodes (name) ON DELETE CASCADE,
    owner TEXT NOT NULL,
    call TEXT NOT NULL,
    chain TEXT NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL
);
CREATE INDEX results_node ON results (node);
CREATE INDEX results_chain ON results (owner, chain);
CREATE TABLE dropped (  -- histories that end with a result that must not be read again
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    chain TEXT NOT NULL,
    UNIQUE (owner, chain)
);
CREATE TABLE pinned (  -- histories that end with a result that must be kept
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    chain TEXT NOT NULL,
    UNIQUE (owner, chain)
);
CREATE TABLE kept (  -- results that the states of turns keep permanently
    node TEXT NOT NULL REFERENCES nodes (name) ON DELETE CASCADE,
    owner TEXT NOT NULL,
    chain TEXT NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL
);
CREATE INDEX kept_node ON kept (node);
"""

_LINE = """
WITH RECURSIVE line (node, parent) AS (
    SELECT node, parent FROM records WHERE node = ?1 AND owner = ?2
    UNION SELECT records.node, records.parent FROM records JOIN line
    ON records.node = line.parent AND records.owner = ?2
)"""

_RECORD = "node, owner, parent, chain, messages, last, seen, usage, created, ids"
_COLUMNS = f"""{_RECORD}, (
    SELECT session FROM members WHERE members.node = records.node ORDER BY members.number LIMIT 1
) AS session, (
    SELECT json_group_array(json_array(start, stop, chain)) FROM kept WHERE kept.node = records.node
) AS kept"""

_SUMMARIES = """
WITH own AS (
    SELECT session, count(*) AS turns, max(members.number) AS newest,
        min(members.number) AS oldest, max(max(used, coalesce(uses.value, 0))) AS used
    FROM members JOIN nodes ON name = node LEFT JOIN json_each(?1) AS uses ON uses.key = node
    WHERE owner = ?2 AND (?3 IS NULL OR session = ?3) GROUP BY session
)
SELECT own.session AS id, head.node AS head, turns, begin.created AS created,
    head.created AS used, head.seen, head.usage, coalesce((
        SELECT topic FROM members JOIN records ON records.node = members.node
        WHERE members.owner = ?2 AND session = own.session AND topic != ''
        ORDER BY members.number DESC LIMIT 1
    ), '') AS topic
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

_OWNER = "(SELECT owner FROM records WHERE node = name) AS owner"

LEAVING = """
SELECT name, file, bytes, (SELECT owner FROM records WHERE node = name) AS owner, NOT EXISTS (
    SELECT 1 FROM members WHERE node = name AND (owner, session) != (?2, ?3)
) AS alone FROM nodes WHERE name IN (SELECT value FROM json_each(?1)) AND (?2 IS NULL OR EXISTS (
    SELECT 1 FROM members WHERE node = name AND (owner, session) = (?2, ?3)
))"""
"""The turns of a list (?1) that are in a session (its owner ?2 and its name ?3), and for each turn,
whether it is in no other session.

If ?2 is NULL, these are all turns of the list, and each counts as if no other session had it.
"""

_JOIN = "INSERT INTO members (owner, session, node) VALUES (?, ?, ?)"


class TurnTables:
    """Turns whose records and states are in memory; the base class of other places.

    Attributes:
        db: the database of the tables.
        unit: the unit of the limit and of `nbytes`, for error messages.
        nbytes: bytes of all snapshots; in memory, the number of turns.
        archive: the archive of the turns' text; None if their text is not archived.
        exclusive: a lock; while a thread holds it, no other thread changes the turns.
        scratch: a folder on the disk of the snapshots; None for the system's temporary folder.
    """

    unit = "turns"
    archive: TurnArchive | None = None
    scratch: Path | None = None

    def __init__(self, limit: int) -> None:
        self._states: dict[str, Checkpoint] = {}  # by file
        self._begin(Database(None, TABLES, VERSION), limit)

    def _begin(self, db: Database, limit: int | None) -> None:
        self.db = db
        # What `marked_chains` returns, by table and owner; filled on demand.
        self._chains: dict[tuple[str, str], frozenset[str]] = {}
        self.exclusive = threading.RLock()  # `nbytes` is changed only by its holder
        self._limit = limit
        self._uses_lock = threading.Lock()
        self._uses: dict[str, int] = {}  # uses that are not in the database yet, by turn
        ((self._clock, self.nbytes),) = db.query(
            "SELECT coalesce(max(used), 0), coalesce(sum(bytes), 0) FROM nodes"
        )

    # --- methods that places other than memory override

    def open_archive(self, limit: int | None) -> TurnArchive:
        """Archive the text of turns from now on, in at most this many bytes."""
        self.archive = TurnArchive(self.db, self._archive_path(), limit)
        return self.archive

    def _archive_path(self) -> Path | None:
        """Return the file of the archive. None for memory."""
        return None

    def _keep(self, checkpoint: Checkpoint) -> tuple[str, int, str]:
        """Store a snapshot. Returns the name of its file, its size in `unit`, and the SHA-256 of
        its bytes; in memory, a name that no other snapshot has, 1, and an empty text.
        """
        file = new_name()
        self._states[file] = checkpoint
        return file, 1, ""

    def _checkpoint(self, row: sqlite3.Row) -> Checkpoint:
        """Return the checkpoint that a row of `nodes` describes."""
        try:
            return self._states[row["file"]]
        except KeyError:
            raise WeirError(NOT_KEPT) from None

    def _discard(self, files: Collection[str]) -> None:
        """Delete snapshots that no row names."""
        for file in files:
            self._states.pop(file, None)

    def turn_bytes(self, tokens: int | None = None) -> int:
        """Return the bytes that a turn may take if its stream has this many tokens, or if the row
        is full (None).
        """
        return 0

    def free_bytes(self) -> int | None:
        """Return the free bytes that the place reports. None if it does not report them."""
        return None

    def has_room(self, size: int) -> bool:
        """Return whether the place reports room for turns of this many bytes together."""
        free = self.free_bytes()
        return free is None or free >= size

    def make_room(self, size: int, keep: int) -> bool:
        """Make room for this many bytes, without deleting the `keep` most recently used turns.
        Returns whether there is room now.
        """
        return self.has_room(size)

    def close(self) -> None:
        """Release the place. Closing twice does nothing."""

    # --- reading

    def load(self, node: str) -> Checkpoint | None:
        """Return the checkpoint of a turn. None if there is none with that name."""
        row = self.db.first("SELECT * FROM nodes WHERE name = ?", node)
        if row is None:
            return None
        self._touch(node)
        return self._checkpoint(row)

    def newest(self, owner: str, column: str, value: str) -> TurnRecord | None:
        """Return the owner's newest turn with a value in a column of its record."""
        row = self.db.first(
            f"SELECT {_COLUMNS} FROM records WHERE owner = ? AND {column} = ? "
            "ORDER BY number DESC LIMIT 1",
            owner,
            value,
        )
        return _record_of(row) if row else None

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """Return the turns of a session in order."""
        found = self.db.query(
            f"SELECT {_COLUMNS} FROM records JOIN (SELECT node AS member, number AS place FROM "
            "members WHERE owner = ? AND session = ?) ON member = node ORDER BY place",
            owner,
            session,
        )
        return [_record_of(row) for row in found]

    def list_all(self) -> list[TurnRecord]:
        """Return all turns in order."""
        return [*map(_record_of, self.db.query(f"SELECT {_COLUMNS} FROM records ORDER BY number"))]

    def summaries(self, owner: str, session: str | None = None) -> list[SessionSummary]:
        """Return the owner's sessions, or one of them, the least recently used first."""
        uses = json.dumps(self._unwritten_uses())
        found = self.db.query(_SUMMARIES, uses, owner, session)
        return [SessionSummary(**{**row, "usage": json.loads(row["usage"])}) for row in found]

    def ancestry(self, owner: str, node: str) -> tuple[list[TurnTokens], str | None]:
        """Return the tokens of a turn and its ancestors, as far back as they are stored, the oldest
        first, and the parent of the oldest turn. If not even `node` is stored, return no tokens,
        and `node`.
        """
        rows = self.db.query(_ANCESTRY, node, owner)
        found = [TurnTokens(row["node"], row["seen"], row["ids"]) for row in rows]
        return found, rows[0]["parent"] if rows else node

    def find_parent(self, owner: str, node: str) -> str | None:
        """Return the parent of the oldest turn that is stored of a turn and its ancestors. If not
        even `node` is stored, return `node`.
        """
        rows = self.db.query(f"{_LINE} SELECT node, parent FROM line", node, owner)
        parents = {row["node"]: row["parent"] for row in rows}
        path = find_path(node, parents)
        return parents[path[0]] if path else node

    def _unwritten_uses(self) -> dict[str, int]:
        with self._uses_lock:
            return dict(self._uses)

    def _touch(self, node: str) -> int:
        """Note that a turn was used. Returns a number that rises with each use."""
        with self._uses_lock:
            self._clock += 1
            self._uses[node] = self._clock
            return self._clock

    # --- writing

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which also writes the latest uses of turns. Either all of it is
        written, or nothing.
        """
        with self.exclusive, self.db.writing() as db:
            uses = self._unwritten_uses()
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
        """Add turns, either all or none. A turn with the same name is replaced. Error messages call
        the turns `what`.
        """
        kept: list[tuple[str, int, str]] = []
        names = json.dumps([record.node for _, record in turns])
        try:
            for checkpoint, _ in turns:
                kept.append(self._keep(checkpoint))
                size = sum(nbytes for _, nbytes, _ in kept)
                if self._limit is not None and size > self._limit:
                    more = " or more" if len(turns) > 1 else ""
                    raise WeirError(
                        f"{what} takes {size:,} {self.unit}{more}, and the store has "
                        f"{self._limit:,} for all sessions. Use a larger --disk or --keep."
                    )
            with self.exclusive:
                with self.changing() as db:
                    gone = db.execute(
                        f"SELECT name, file, bytes, {_OWNER} FROM nodes WHERE name IN "
                        "(SELECT value FROM json_each(?))",
                        (names,),
                    ).fetchall()
                    if self.archive is not None:
                        self.archive.forget(db, [(row["owner"], row["name"]) for row in gone])
                    for snapshot, (checkpoint, record) in zip(kept, turns, strict=True):
                        self._insert(db, record, snapshot, json.dumps(checkpoint.pending))
                        if self.archive is not None:
                            self.archive.add(db, record, checkpoint)
                    held = self.nbytes + size - sum(row["bytes"] for row in gone)
                    while self._limit is not None and held > self._limit:
                        oldest = db.execute(
                            f"SELECT name, file, bytes, {_OWNER} FROM nodes WHERE name NOT IN "
                            "(SELECT value FROM json_each(?)) ORDER BY used LIMIT 1",
                            (names,),
                        ).fetchone()
                        if self.archive is not None:
                            self.archive.forget(db, [(oldest["owner"], oldest["name"])])
                        db.execute("DELETE FROM nodes WHERE name = ?", (oldest["name"],))
                        gone.append(oldest)
                        held -= oldest["bytes"]
                self.nbytes = held
        except BaseException:
            self._discard([file for file, *_ in kept])
            raise
        self._discard([row["file"] for row in gone])

    def _insert(
        self,
        db: sqlite3.Connection,
        record: TurnRecord,
        snapshot: tuple[str, int, str],
        pending: str,
    ) -> None:
        """Insert the rows of a turn, and delete those of an earlier turn with its name."""
        node = record.node
        # The foreign keys also delete the turn's rows in the other tables.
        db.execute("DELETE FROM nodes WHERE name = ?", (node,))
        db.execute(
            "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?)",
            (node, *snapshot, pending, self._touch(node)),
        )
        facts = {name: getattr(record, name) for name in _RECORD.split(", ")}
        facts["messages"] = json.dumps([message.to_json() for message in record.messages])
        facts["usage"] = json.dumps(record.usage)
        insert(db, "records", **facts, topic=record.topic)
        db.execute(_JOIN, (record.owner, record.session, node))
        for message in record.messages:
            if message.where is not None:
                facts = {"node": node, "owner": record.owner, "call": message.result}
                insert(db, "results", **facts, **message.where._asdict())
        for place in record.kept:
            insert(db, "kept", node=node, owner=record.owner, **place._asdict())

    # --- results of tools that are dropped or pinned

    def list_results(
        self, owner: str, node: str, call: str | None, most: int
    ) -> list[tuple[str, ResultPlace]]:
        """Return the newest results of tools that a turn and its ancestors have read: the results
        of one call, or of all calls (None).

        Each comes with the id of its call, and with its place in the stream.
        """
        rows = self.db.query(
            f"{_LINE} SELECT call, start, stop, results.chain FROM line JOIN results "
            "ON results.node = line.node WHERE ?3 IS NULL OR call = ?3 "
            "ORDER BY start DESC LIMIT ?4",
            node,
            owner,
            call,
            most,
        )
        return [(row["call"], ResultPlace(row["start"], row["stop"], row["chain"])) for row in rows]

    def read_places(self, owner: str, node: str) -> list[ResultPlace]:
        """Return all places where a turn and its ancestors have read results of tools."""
        rows = self.db.query(
            f"{_LINE} "
            "SELECT start, stop, results.chain FROM line JOIN results ON results.node = line.node "
            "UNION SELECT start, stop, kept.chain FROM line JOIN kept ON kept.node = line.node",
            node,
            owner,
        )
        return [ResultPlace(row["start"], row["stop"], row["chain"]) for row in rows]

    def marked_chains(self, table: str, owner: str) -> frozenset[str]:
        """Return the hashes of the owner's histories that end with a result in the table `dropped`
        or `pinned`.
        """
        found = self._chains.get((table, owner))
        if found is None:
            rows = self.db.query(f"SELECT chain FROM {table} WHERE owner = ?", owner)
            found = self._chains[table, owner] = frozenset(row["chain"] for row in rows)
        return found

    def mark_result(self, table: str, owner: str, chain: str) -> None:
        """Add a result to the table `dropped` or `pinned`. A dropped result is no longer pinned.

        Raises WeirError if the table already has `MAX_DROPPED` results of this owner, and the kept
        turns have read all of them.
        """
        with self.exclusive, self.changing() as db:
            count = f"SELECT count(*) FROM {table} WHERE owner = ?"
            if db.execute(count, (owner,)).fetchone()[0] >= MAX_DROPPED:
                db.execute(
                    f"DELETE FROM {table} WHERE number = (SELECT number FROM {table} AS old "
                    "WHERE owner = ?1 AND NOT EXISTS (SELECT 1 FROM results WHERE "
                    "results.owner = old.owner AND results.chain = old.chain) "
                    "ORDER BY number LIMIT 1)",
                    (owner,),
                )
            if db.execute(count, (owner,)).fetchone()[0] >= MAX_DROPPED:
                raise WeirError(
                    f"{MAX_DROPPED:,} outputs of this key's sessions are {table}, which is the "
                    "limit. Delete sessions that you no longer need."
                )
            row = owner, chain
            db.execute(f"INSERT OR IGNORE INTO {table} (owner, chain) VALUES (?, ?)", row)
            if table == DROPPED:
                db.execute("DELETE FROM pinned WHERE owner = ? AND chain = ?", row)
        self._chains.pop((table, owner), None)
        self._chains.pop((PINNED, owner), None)

    def unpin_result(self, owner: str, chain: str) -> None:
        """Note that a result does not have to be kept any longer."""
        with self.exclusive, self.changing() as db:
            db.execute("DELETE FROM pinned WHERE owner = ? AND chain = ?", (owner, chain))
        self._chains.pop((PINNED, owner), None)

    def read_result(self, owner: str, node: str, chain: str) -> Message | None:
        """Return the message of a result that a turn or one of its ancestors has read; None if it
        is not kept.
        """
        row = self.db.first(
            f"{_LINE} SELECT line.node FROM line JOIN results ON results.node = line.node "
            "WHERE results.chain = ?3 LIMIT 1",
            node,
            owner,
            chain,
        )
        record = None if row is None else self.newest(owner, "node", row["node"])
        found = () if record is None else record.messages
        return next((one for one in found if one.where and one.where.chain == chain), None)

    def remove(
        self, nodes: Collection[str], owner: str | None = None, session: str | None = None
    ) -> list[str]:
        """Remove turns from a session, or from all sessions (None).

        Turns that are then in no session are deleted. Returns their ids.
        """
        with self.exclusive:
            rows = self.db.query(LEAVING, json.dumps(sorted(nodes)), owner, session)
            gone = [row for row in rows if row["alone"]]
            if not rows:
                return []
            with self.changing() as db:
                if self.archive is not None:
                    self.archive.forget(db, [(row["owner"], row["name"]) for row in gone])
                db.executemany("DELETE FROM nodes WHERE name = ?", [(r["name"],) for r in gone])
                db.executemany(
                    "DELETE FROM members WHERE node = ? AND owner = ? AND session = ?",
                    [(row["name"], owner, session) for row in rows],
                )
            self.nbytes -= sum(row["bytes"] for row in gone)
        self._discard([row["file"] for row in gone])
        return [row["name"] for row in gone]

    def fork(self, owner: str, node: str, session: str) -> None:
        """Begin a session that has an existing turn and its ancestors."""
        with self.changing() as db:
            path = db.execute(_PATH, (node, owner)).fetchall()
            if not path:
                raise WeirError("the turn does not exist")
            taken = "SELECT 1 FROM members WHERE owner = ? AND session = ?"
            if db.execute(taken, (owner, session)).fetchone() is not None:
                raise NameTaken("a session with this name already exists. Use another name")
            db.executemany(_JOIN, [(owner, session, row["node"]) for row in path])


def _record_of(row: sqlite3.Row) -> TurnRecord:
    values: dict[str, Any] = dict(row)
    values["messages"] = tuple(Message.from_json(kept) for kept in json.loads(values["messages"]))
    values["usage"] = json.loads(values["usage"])
    values["kept"] = tuple(ResultPlace(*place) for place in json.loads(values["kept"]))
    return TurnRecord(**values)
