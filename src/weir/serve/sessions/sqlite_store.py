"""SQLite-backed session store of checkpoints and turn records.

Every query names the owner, so that another owner's sessions look absent. Names that come from
clients are values in tables, never parts of a path. Knows nothing about HTTP.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.policies import Policy
from weir.serve.messages import Message
from weir.serve.sessions.memory_store import MemoryStore
from weir.serve.sessions.records import (
    DISK_FULL,
    Checkpoint,
    NameTaken,
    OnSaved,
    SessionSummary,
    StorageFull,
    TurnRecord,
    TurnTokens,
)
from weir.serve.sessions.snapshot import RowFormat
from weir.serve.sessions.sqlite_checkpoints import SQLiteCheckpoints
from weir.serve.sessions.writer import BackgroundWriter

_log = logging.getLogger(__name__)
SCRATCH = "moving"
NO_TEXT = "the name of this session is no text"
_KEPT = "node, owner, parent, chain, messages, last, seen, usage, created, ids"
_COLUMNS = f"""{_KEPT}, (
    SELECT session FROM members WHERE members.node = records.node ORDER BY members.number LIMIT 1
) AS session"""


class SQLiteStore:
    """Sessions on disk (`SessionStore`), written by a thread of their own.

    Args:
        chunk: chunk of the rows; None for the one that the policy was measured with, or 64.
        limit: bytes of all snapshots; past it, or where the disk is full before, the least
            recently used turns are deleted. None for no limit: nothing is ever deleted.
        keep: turns that are not deleted for a full disk, and as many that it is full for go on in
            memory until there is room.
        queue: turns that may wait to be written; `save` of one more waits.

    Raises:
        WeirError: the folder cannot be used, another process uses it, or what is in it is of
            another model or policy.
    """

    def __init__(
        self,
        folder: str | Path,
        model: PreTrainedModel,
        policy: str | Policy,
        *,
        chunk: int | None = None,
        limit: int | None = None,
        keep: int = 0,
        queue: int = 2,
    ) -> None:
        row_format = RowFormat.of(model, policy, chunk)
        self._turn_bytes = row_format.turn_bytes
        self._keep = keep
        self._memory = MemoryStore(keep)  # turns that the disk had no room for
        self._was_full = False
        self.checkpoints = SQLiteCheckpoints(Path(folder), row_format, limit)
        self._scratch = self.checkpoints.folder / SCRATCH
        shutil.rmtree(self._scratch, ignore_errors=True)  # leftovers of a killed process
        self._writer = BackgroundWriter(self._write, queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Write all pending turns, and release the folder."""
        self._writer.close()
        with contextlib.suppress(WeirError):
            self._write_remembered()
        self.checkpoints.close()

    # --- saving

    def load(self, node: str) -> Checkpoint:
        """A checkpoint; its state is read from disk when it is first needed."""
        if self._memory.holds(node):
            return self._memory.load(node)
        return self.checkpoints.load(node)

    def check_room(self, turns: int) -> None:
        """Refuse turns that could not be kept, before they are answered; may drop old ones."""
        full = not self.checkpoints.make_room(turns * self._turn_bytes, self._keep)
        if full and not self._was_full:
            more = f"; up to {self._keep} turns go on in memory" if self._keep else ""
            _log.warning("%s: %s%s", self.checkpoints.folder, DISK_FULL, more)
        self._was_full = full
        if full and not self._keep:
            raise StorageFull(DISK_FULL)

    def is_full(self) -> bool:
        """Whether the disk has no room for one more turn."""
        return not self.checkpoints.has_room(self._turn_bytes)

    def save(self, checkpoint: Checkpoint, record: TurnRecord, done: OnSaved) -> None:
        """Save a turn in the writer's thread, which calls `done`."""
        self._writer.submit(checkpoint, record, done)

    def _write(self, checkpoint: Checkpoint, record: TurnRecord) -> None:
        _check_names(record)
        try:
            try:
                self._write_remembered((checkpoint, record))
            except StorageFull:
                if not self.checkpoints.make_room(self._turn_bytes, self._keep):
                    raise
                self._write_remembered((checkpoint, record))
        except StorageFull:
            if not self._keep:
                raise
            self._memory.save(checkpoint, record)

    def _write_remembered(self, *more: tuple[Checkpoint, TurnRecord]) -> None:
        """Write the turns that went on in memory, the oldest first, and then more."""
        with self.checkpoints.exclusive:
            for checkpoint, record in [*self._memory.turns(), *more]:
                added = [(record.node, checkpoint)]
                with self.checkpoints.adding(added, "one turn") as db:
                    _insert(db, record)
                self._memory.drop(record.node)

    def import_session(
        self, records: Sequence[TurnRecord], checkpoints: Sequence[Checkpoint]
    ) -> SessionSummary:
        """Save the turns of one new session, parents first; all or none."""
        added = [(r.node, checkpoint) for r, checkpoint in zip(records, checkpoints, strict=True)]
        _check_names(records[0])
        with self.checkpoints.adding(added, "the session") as db:
            for record in records:
                _insert(db, record)
        found = self.get_session(records[0].owner, records[0].session)
        if found is None:
            raise WeirError("the session was imported, but others took its room at once")
        return found

    def drop(self, node: str) -> None:
        """Delete a turn, if there is one of that name."""
        with self.checkpoints.exclusive:
            self._memory.drop(node)
            self.checkpoints.delete([node])

    # --- finding

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        """The owner's newest turn that ends a conversation of this hash."""
        found = self._memory.find_history(owner, chain)
        return found or self._record("owner = ? AND chain = ?", owner, chain)

    def find_turn(self, owner: str, node: str) -> TurnRecord | None:
        """A turn of the owner's."""
        found = self._memory.find_turn(owner, node)
        return found or self._record("owner = ? AND node = ?", owner, node)

    def ancestry(self, owner: str, node: str) -> list[TurnTokens]:
        """The tokens that led to a turn of the owner's, as far back as its turns are kept."""
        near = self._memory.ancestry(owner, node)
        if near:
            first = self._memory.find_turn(owner, near[0].node)
            before = [] if not (first and first.parent) else self.ancestry(owner, first.parent)
            return [*before, *near] if before and before[-1].end == near[0].start else near
        if not _is_text(owner, node):
            return []
        found = self.checkpoints.db.query(
            "WITH RECURSIVE line (node, parent, seen, ids) AS (SELECT node, parent, seen, ids "
            "FROM records WHERE node = ?1 AND owner = ?2 UNION ALL SELECT records.node, "
            "records.parent, records.seen, records.ids FROM records JOIN line "
            "ON records.node = line.parent AND records.owner = ?2 "
            "AND records.seen = line.seen - length(line.ids) / 4 AND records.seen < line.seen) "
            "SELECT node, seen, ids FROM line ORDER BY seen",
            node,
            owner,
        )
        return [TurnTokens(*row) for row in found]

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        """A session of the owner's."""
        found = self._summaries("owner = ? AND session = ?", owner, session)
        near = self._memory.get_session(owner, session)
        return _join_summaries(found[0] if found else None, near)

    def list_sessions(self, owner: str) -> list[SessionSummary]:
        """All sessions of the owner, the least recently used first."""
        near = {one.id: one for one in self._memory.list_sessions(owner)}
        found = {one.id: one for one in self._summaries("owner = ?", owner)}
        # Those in memory were used last.
        order = [name for name in found if name not in near]
        joined = (_join_summaries(found.get(name), near.get(name)) for name in [*order, *near])
        return [one for one in joined if one is not None]

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """The turns of a session that are kept, in the order they came."""
        if not _is_text(owner, session):
            return []
        found = self.checkpoints.db.query(
            f"SELECT {_COLUMNS} FROM records JOIN (SELECT node AS member, number AS place FROM "
            "members WHERE owner = ? AND session = ?) ON member = node ORDER BY place",
            owner,
            session,
        )
        return [*map(_read, found), *self._memory.list_turns(owner, session)]

    def _record(self, where: str, *values: str) -> TurnRecord | None:
        """The newest record that satisfies an SQL condition."""
        if not _is_text(*values):
            return None
        rows = self.checkpoints.db.query(
            f"SELECT {_COLUMNS} FROM records WHERE {where} ORDER BY number DESC LIMIT 1", *values
        )
        return _read(rows[0]) if rows else None

    def _summaries(self, where: str, *values: str) -> list[SessionSummary]:
        """Sessions that satisfy an SQL condition; their messages are not read."""
        if not _is_text(*values):
            return []
        uses = json.dumps(self.checkpoints.unwritten_uses())
        found = self.checkpoints.db.query(
            "WITH own AS (SELECT session, count(*) AS turns, max(members.number) AS newest, "
            "min(members.number) AS oldest, max(max(used, coalesce(uses.value, 0))) AS used "
            "FROM members JOIN nodes ON name = node LEFT JOIN json_each(?) AS uses ON "
            f"uses.key = node WHERE {where} GROUP BY session) "
            "SELECT own.session AS id, head.node AS head, turns, begin.created AS created, "
            "head.created AS used, head.seen, head.usage, head.topic FROM own "
            "JOIN members AS late ON late.number = newest "
            "JOIN records AS head ON head.node = late.node "
            "JOIN members AS early ON early.number = oldest "
            "JOIN records AS begin ON begin.node = early.node ORDER BY own.used",
            uses,
            *values,
        )
        return [SessionSummary(**{**row, "usage": json.loads(row["usage"])}) for row in found]

    # --- sessions that exist

    def fork(self, owner: str, node: str, session: str) -> SessionSummary:
        """Begin a session that ends with a turn of another: that one and its ancestors."""
        if not _is_text(owner, node, session):
            raise WeirError(NO_TEXT)
        self._write_remembered()
        try:
            with self.checkpoints.changing() as db:
                path = db.execute(
                    "WITH RECURSIVE above (ancestor) AS (VALUES (?) UNION SELECT parent FROM "
                    "records JOIN above ON node = ancestor WHERE owner = ?) SELECT node FROM "
                    "records JOIN above ON node = ancestor WHERE owner = ? ORDER BY number",
                    (node, owner, owner),
                ).fetchall()
                if not path:
                    raise WeirError("there is no such turn")
                taken = "SELECT 1 FROM members WHERE owner = ? AND session = ?"
                if db.execute(taken, (owner, session)).fetchone() is not None:
                    raise NameTaken("there is a session of this name already")
                for row in path:
                    _join(db, owner, session, row["node"])
        except sqlite3.Error as error:
            raise self.checkpoints.refusal(error) from None
        found = self.get_session(owner, session)
        if found is None:
            raise WeirError("there is no such turn")  # it was deleted this moment
        return found

    def remove_turns(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        """Take turns out of a session; those that are in no other are deleted and returned."""
        if not _is_text(owner, session, *nodes):
            return []
        with self.checkpoints.exclusive:
            found = self.checkpoints.db.query(
                "SELECT node, (SELECT count(*) FROM members AS m WHERE m.node = members.node) "
                "AS places FROM members WHERE owner = ? AND session = ? AND node IN "
                "(SELECT value FROM json_each(?))",
                owner,
                session,
                json.dumps(sorted(nodes)),
            )
            gone = [row["node"] for row in found if row["places"] == 1]
            shared = json.dumps([row["node"] for row in found if row["places"] > 1])
            gone += self._memory.remove_turns(owner, session, nodes)
            self.checkpoints.delete(gone)
            try:
                with self.checkpoints.changing() as db:
                    db.execute(
                        "DELETE FROM members WHERE owner = ? AND session = ? AND node IN "
                        "(SELECT value FROM json_each(?))",
                        (owner, session, shared),
                    )
            except sqlite3.Error as error:
                raise self.checkpoints.refusal(error) from None
        return gone

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file in transit; the next start deletes what a crash leaves."""
        with contextlib.suppress(FileExistsError):
            self._scratch.mkdir(mode=0o700)
        return TemporaryDirectory(dir=self._scratch)


def _join_summaries(
    disk: SessionSummary | None, memory: SessionSummary | None
) -> SessionSummary | None:
    """A session of which the older turns are on disk and the newer ones in memory."""
    if disk is None or memory is None:
        return disk or memory
    return replace(memory, turns=disk.turns + memory.turns, created=disk.created)


def _insert(db: sqlite3.Connection, record: TurnRecord) -> None:
    """Insert a record, or replace the one of its checkpoint."""
    for table in ("records", "members"):
        db.execute(f"DELETE FROM {table} WHERE node = ?", (record.node,))
    db.execute(
        f"INSERT INTO records ({_KEPT}, topic) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
    _join(db, record.owner, record.session, record.node)


def _join(db: sqlite3.Connection, owner: str, session: str, node: str) -> None:
    """Put a turn into a session, as its newest."""
    db.execute(
        "INSERT INTO members (owner, session, node) VALUES (?, ?, ?)", (owner, session, node)
    )


def _read(row: sqlite3.Row) -> TurnRecord:
    values: dict[str, Any] = dict(row)
    values["messages"] = tuple(Message.from_json(kept) for kept in json.loads(values["messages"]))
    values["usage"] = json.loads(values["usage"])
    return TurnRecord(**values)


def _check_names(record: TurnRecord) -> None:
    """Refuse names that SQLite cannot store."""
    if not _is_text(record.owner, record.session, record.node, record.parent or ""):
        raise WeirError(NO_TEXT)


def _is_text(*values: str) -> bool:
    """Whether SQLite can store these strings, which have no lone surrogates."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True
