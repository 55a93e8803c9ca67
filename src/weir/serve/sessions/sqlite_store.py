"""A store on disk: a shelf that knows whose its nodes are, and where in a conversation they stand.

Everything is asked for together with its owner, and what is another's is as what never was. Knows
nothing about HTTP; names that come from clients are values in tables, never parts of a path.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Collection, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from weir.errors import WeirError
from weir.serve.engine import Checkpoint
from weir.serve.messages import Message
from weir.serve.sessions.database import fetch_all, fetch_one
from weir.serve.sessions.records import NameTaken, SessionSummary, TurnRecord, TurnTokens
from weir.serve.sessions.snapshot import encode_checkpoint
from weir.serve.sessions.sqlite_checkpoints import SQLiteCheckpoints

MOVING = "moving"
_KEPT = "node, owner, parent, chain, messages, last, seen, usage, created, ids"
_COLUMNS = f"""{_KEPT}, (
    SELECT session FROM members WHERE members.node = records.node ORDER BY members.number LIMIT 1
) AS session"""


class SQLiteStore(SQLiteCheckpoints):
    """A store on disk (`SessionStore`).

    Opened like `SQLiteCheckpoints`. Opening it deletes checkpoints without a record.
    """

    # --- what a store does

    def add(self, record: TurnRecord) -> None:
        """Keep the record of a node that is on the shelf; it becomes the head of its session.

        Raises:
            WeirError: it cannot be kept, or its node is not on the shelf any more.
        """
        try:
            with self._changing() as db:
                if fetch_one(db, "SELECT 1 FROM nodes WHERE name = ?", record.node) is None:
                    raise WeirError("there is no room to keep this turn")
                _insert(db, record)
        except sqlite3.Error as error:
            raise self._refused(error) from None
        except UnicodeEncodeError:
            raise WeirError("the name of this session is no text") from None
        self._touch(record.node)

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        """The owner's newest turn that ends a conversation of this hash, if its node is kept."""
        return self._record("owner = ? AND chain = ?", owner, chain)

    def find_turn(self, owner: str, node: str) -> TurnRecord | None:
        """A turn of the owner's, if its node is kept."""
        return self._record("owner = ? AND node = ?", owner, node)

    def ancestry(self, owner: str, node: str) -> list[TurnTokens]:
        """The tokens that led to a turn of the owner's, as far back as its turns are kept."""
        if not _texts([owner, node]):
            return []
        with self._tables.reading() as db:
            found = fetch_all(
                db,
                "WITH RECURSIVE line (node, parent, seen, ids) AS (SELECT node, parent, seen, ids "
                "FROM records WHERE node = ?1 AND owner = ?2 UNION ALL SELECT records.node, "
                "records.parent, records.seen, records.ids FROM records JOIN line "
                "ON records.node = line.parent AND records.owner = ?2 "
                "AND records.seen = line.seen - length(line.ids) / 4 AND records.seen < line.seen) "
                "SELECT node, seen, ids FROM line ORDER BY seen",
                node,
                owner,
            )
        return [TurnTokens(row["node"], row["seen"], row["ids"]) for row in found]

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        """A session of the owner's."""
        found = self._list_sessions("owner = ? AND session = ?", owner, session)
        return found[0] if found else None

    def list_sessions(self, owner: str) -> list[SessionSummary]:
        """All of the owner's, those used longest ago first."""
        return self._list_sessions("owner = ?", owner)

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """The turns of a session that are kept, in the order they came."""
        if not _texts([owner, session]):
            return []
        with self._tables.reading() as db:
            found = fetch_all(
                db,
                f"SELECT {_COLUMNS} FROM records JOIN (SELECT node AS its, number AS place FROM "
                "members WHERE owner = ? AND session = ?) ON its = node ORDER BY place",
                owner,
                session,
            )
        return [_read(row) for row in found]

    def fork(self, owner: str, node: str, session: str) -> SessionSummary:
        """Begin a session that ends with a turn: with that and those it goes on from.

        Raises:
            NameTaken: the owner has a session of this name.
            WeirError: the owner has no such turn, or the disk is full.
        """
        if not _texts([owner, node, session]):
            raise WeirError("the name of this session is no text")
        try:
            with self._alone, self._changing() as db:
                path = fetch_all(
                    db,
                    "WITH RECURSIVE above (its) AS (VALUES (?) UNION SELECT parent FROM records "
                    "JOIN above ON node = its WHERE owner = ?) SELECT node FROM records "
                    "JOIN above ON node = its WHERE owner = ? ORDER BY number",
                    node,
                    owner,
                    owner,
                )
                if not path:
                    raise WeirError("there is no such turn")
                taken = "SELECT 1 FROM members WHERE owner = ? AND session = ?"
                if fetch_one(db, taken, owner, session) is not None:
                    raise NameTaken("there is a session of this name already")
                for row in path:
                    _join(db, owner, session, row["node"])
        except sqlite3.Error as error:
            raise self._refused(error) from None
        found = self.get_session(owner, session)
        if found is None:
            raise WeirError("there is no such turn")  # it went at this moment
        return found

    def remove_turns(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        """Take turns out of a session; those that were in no other are dropped.

        Raises:
            WeirError: the disk does not let go of them.
        """
        if not _texts([owner, session, *nodes]):
            return []
        with self._alone:
            own = json.dumps(sorted(nodes))
            with self._tables.reading() as db:
                found = fetch_all(
                    db,
                    "SELECT node, (SELECT count(*) FROM members AS m WHERE m.node = members.node) "
                    "AS places FROM members WHERE owner = ? AND session = ? AND node IN "
                    "(SELECT value FROM json_each(?))",
                    owner,
                    session,
                    own,
                )
            gone = [row["node"] for row in found if row["places"] == 1]
            stay = json.dumps([row["node"] for row in found if row["places"] > 1])
            self._drop(gone)
            try:
                with self._changing() as db:
                    db.execute(
                        "DELETE FROM members WHERE owner = ? AND session = ? AND node IN "
                        "(SELECT value FROM json_each(?))",
                        (owner, session, stay),
                    )
            except sqlite3.Error as error:
                raise self._refused(error) from None
        return gone

    def import_session(
        self, records: Sequence[TurnRecord], nodes: Sequence[Checkpoint]
    ) -> SessionSummary:
        """Keep turns of one new session, those that go on from others behind them; all or none.

        Raises:
            WeirError: the disk is full, or the store too small for them.
        """
        files: list[str] = []
        entries = []
        size = 0
        try:
            for record, node in zip(records, nodes, strict=True):
                data = encode_checkpoint(self._form, node)
                size += len(data)
                if self._limit is not None and size > self._limit:
                    raise WeirError(
                        f"it takes {size:,} bytes and more, and the store has {self._limit:,} for "
                        "all sessions"
                    )
                files.append(self._write(data))
                entries.append((record, data, files[-1]))
            with self._alone:
                with self._changing() as db:
                    for record, data, file in entries:
                        self._insert(db, record.node, file, data, (record.last,))
                        _insert(db, record)
                    held = self._held + size
                    evicted = self._evict(db, held, {record.node for record in records})
                self._held = held - sum(row["bytes"] for row in evicted)
        except (OSError, sqlite3.Error) as error:
            self._remove(files)
            raise self._refused(error) from None
        except BaseException:
            self._remove(files)
            raise
        self._remove([row["file"] for row in evicted])
        found = self.get_session(records[0].owner, records[0].session)
        if found is None:
            raise WeirError("the session was imported, but others took its room at once")
        return found

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file on its way; what a killed process left goes at the start."""
        moving = self.folder / MOVING
        moving.mkdir(mode=0o700, exist_ok=True)
        return TemporaryDirectory(dir=moving)

    # --- opening and reading

    def _mend(self, db: sqlite3.Connection) -> None:
        """What a killed process left goes, and nodes that it told nobody of."""
        db.execute(
            "DELETE FROM nodes WHERE name NOT IN (SELECT node FROM records) OR "
            "name NOT IN (SELECT node FROM members)"
        )
        shutil.rmtree(self.folder / MOVING, ignore_errors=True)
        super()._mend(db)

    def _record(self, where: str, *values: str) -> TurnRecord | None:
        """The newest record of which something is true."""
        if not _texts(values):
            return None
        with self._tables.reading() as db:
            row = fetch_one(
                db,
                f"SELECT {_COLUMNS} FROM records WHERE {where} ORDER BY number DESC LIMIT 1",
                *values,
            )
        return None if row is None else _read(row)

    def _list_sessions(self, where: str, *values: str) -> list[SessionSummary]:
        """SessionManager of which something is true; what was said in them is not read."""
        if not _texts(values):
            return []
        with self._touching:
            touched = json.dumps(self._touched)
        with self._tables.reading() as db:
            found = fetch_all(
                db,
                "WITH own AS (SELECT session, count(*) AS turns, max(members.number) AS newest, "
                "min(members.number) AS oldest, max(max(used, coalesce(uses.value, 0))) AS used "
                "FROM members JOIN nodes ON name = node LEFT JOIN json_each(?) AS uses ON "
                f"uses.key = node WHERE {where} GROUP BY session) "
                "SELECT own.session, turns, head.node AS head, head.seen, head.usage, "
                "head.topic, head.created AS used, begin.created AS created FROM own "
                "JOIN members AS late ON late.number = newest "
                "JOIN records AS head ON head.node = late.node "
                "JOIN members AS early ON early.number = oldest "
                "JOIN records AS begin ON begin.node = early.node ORDER BY own.used",
                touched,
                *values,
            )
        return [
            SessionSummary(
                row["session"],
                row["head"],
                row["turns"],
                created=row["created"],
                used=row["used"],
                seen=row["seen"],
                usage=json.loads(row["usage"]),
                topic=row["topic"],
            )
            for row in found
        ]


def _insert(db: sqlite3.Connection, record: TurnRecord) -> None:
    """Put a record in the place of the one its node has."""
    for table in ("records", "members"):
        db.execute(f"DELETE FROM {table} WHERE node = ?", (record.node,))
    messages = [each.to_json() for each in record.messages]
    db.execute(
        f"INSERT INTO records ({_KEPT}, topic) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.node,
            record.owner,
            record.parent,
            record.chain,
            json.dumps(messages),
            record.last,
            record.seen,
            json.dumps(record.usage),
            record.created,
            record.ids,
            record.topic,
        ),
    )
    _join(db, record.owner, record.session, record.node)


def _join(db: sqlite3.Connection, owner: str, session: str, node: str) -> None:
    """Put a turn into a session, as its newest."""
    db.execute(
        "INSERT INTO members (owner, session, node) VALUES (?, ?, ?)", (owner, session, node)
    )


def _read(row: sqlite3.Row) -> TurnRecord:
    said: dict[str, Any] = dict(row)
    said["messages"] = tuple(Message.from_json(each) for each in json.loads(said["messages"]))
    said["usage"] = json.loads(said["usage"])
    return TurnRecord(**said)


def _texts(values: Sequence[str]) -> bool:
    """Whether tables can hold these; halves of characters they cannot."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True
