"""A store on disk: a shelf that knows whose its nodes are, and where in a conversation they stand.

Everything is asked for together with its owner, and what is another's is as what never was. Knows
nothing about HTTP; names that come from clients are values in tables, never parts of a path.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.serve.messages import Message
from weir.serve.records import Record, Session, Stretch
from weir.serve.store.parcel import Parcel
from weir.serve.store.shelved import DiskShelf
from weir.serve.store.tables import one, rows

_COLUMNS = "node, owner, session, parent, chain, messages, last, seen, usage, created, ids"


class DiskStore(DiskShelf):
    """A store on disk (`Store`).

    It is opened as a `DiskShelf` is. Nodes without a record are nobody's and go when it is opened.
    """

    # --- what a store does

    def add(self, record: Record) -> None:
        """Keep the record of a node that is on the shelf; it becomes the head of its session.

        Raises:
            WeirError: it cannot be kept, or its node is not on the shelf any more.
        """
        try:
            with self._changing() as db:
                if one(db, "SELECT 1 FROM nodes WHERE name = ?", record.node) is None:
                    raise WeirError("there is no room to keep this turn")
                _insert(db, record)
        except sqlite3.Error as error:
            raise self._refused(error) from None
        except UnicodeEncodeError:
            raise WeirError("the name of this session is no text") from None
        self._touch(record.node)

    def at(self, owner: str, chain: str) -> Record | None:
        """The owner's newest turn that ends a conversation of this hash, if its node is kept."""
        return self._record("owner = ? AND chain = ?", owner, chain)

    def find(self, owner: str, node: str) -> Record | None:
        """A turn of the owner's, if its node is kept."""
        return self._record("owner = ? AND node = ?", owner, node)

    def line(self, owner: str, node: str) -> list[Stretch]:
        """The tokens that led to a turn of the owner's, as far back as its turns are kept."""
        if not _texts([owner, node]):
            return []
        with self._tables.reading() as db:
            found = rows(
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
        return [Stretch(row["node"], row["seen"], row["ids"]) for row in found]

    def session(self, owner: str, session: str) -> Session | None:
        """A session of the owner's."""
        found = self._sessions("owner = ? AND session = ?", owner, session)
        return found[0] if found else None

    def sessions(self, owner: str) -> list[Session]:
        """All of the owner's, those used longest ago first."""
        return self._sessions("owner = ?", owner)

    # --- and what people do with it

    def delete(self, owner: str, node: str) -> list[str]:
        """Delete a turn of the owner's and all that go on from it.

        Returns:
            The nodes that were deleted; none where the owner has no such turn.

        Raises:
            WeirError: the disk does not let go of them.
        """
        if self.find(owner, node) is None:
            return []
        with self._tables.reading() as db:
            found = rows(
                db,
                "WITH RECURSIVE below (node) AS (VALUES (?) UNION SELECT records.node FROM records "
                "JOIN below ON records.parent = below.node WHERE records.owner = ?) "
                "SELECT node FROM below",
                node,
                owner,
            )
        nodes = [row["node"] for row in found]
        self._drop(nodes)
        return nodes

    def export_session(self, owner: str, session: str, path: str | Path) -> int:
        """Write all turns of a session of the owner's that are kept into one safetensors file.

        Returns:
            How many those are.

        Raises:
            WeirError: the owner has no such session, a turn of it is damaged, or the file cannot be
                written.
        """
        found = self.session(owner, session)
        if found is None:
            raise WeirError("there is no such session")
        parcel = Parcel()
        for node in found.nodes:
            record = self.find(owner, node)
            with self._tables.reading() as db:
                row = one(db, "SELECT * FROM nodes WHERE name = ?", node)
            if record is not None and row is not None:  # it may have gone meanwhile
                self._read(node, dict(row))
                parcel.add(record, self._bytes(dict(row)))
        parcel.write(Path(path))
        return len(parcel.records)

    def import_session(self, owner: str, path: str | Path) -> Session:
        """Take in a session that was exported, as a new one of the owner's, under new names.

        Raises:
            WeirError: the file is no export of weir, is damaged, too large or of another model or
                policy, or the disk is full; nothing of it is kept.
        """
        parcel = Parcel.read(Path(path), self._form, self._limit).renamed(owner)
        files: list[str] = []
        entries = []
        try:
            for record, data in zip(parcel.records, parcel.snapshots, strict=True):
                files.append(self._write(data))
                entries.append((record, data, files[-1]))
            with self._alone:
                with self._changing() as db:
                    for record, data, file in entries:
                        self._insert(db, record.node, file, data, (record.last,))
                        _insert(db, record)
                    held = self._held + sum(map(len, parcel.snapshots))
                    names = {record.node for record in parcel.records}
                    evicted = self._evict(db, held, names)
                self._held = held - sum(row["bytes"] for row in evicted)
        except (OSError, sqlite3.Error) as error:
            self._remove(files)
            raise self._refused(error) from None
        self._remove([row["file"] for row in evicted])
        found = self.session(owner, parcel.records[0].session)
        if found is None:
            raise WeirError("the session was imported, but others took its room at once")
        return found

    # --- opening and reading

    def _mend(self, db: sqlite3.Connection) -> None:
        """What a killed process left goes, and nodes that it told nobody of."""
        db.execute("DELETE FROM nodes WHERE name NOT IN (SELECT node FROM records)")
        super()._mend(db)

    def _record(self, where: str, *values: str) -> Record | None:
        """The newest record of which something is true."""
        if not _texts(values):
            return None
        with self._tables.reading() as db:
            row = one(
                db,
                f"SELECT {_COLUMNS} FROM records WHERE {where} ORDER BY number DESC LIMIT 1",
                *values,
            )
        return None if row is None else _read(row)

    def _sessions(self, where: str, *values: str) -> list[Session]:
        """Sessions whose records are those of which something is true."""
        if not _texts(values):
            return []
        with self._touching:
            touched = dict(self._touched)
        with self._tables.reading() as db:
            found = rows(
                db,
                "SELECT node, session, created, used FROM records JOIN nodes ON name = node "
                f"WHERE {where} ORDER BY number",
                *values,
            )
            nodes: dict[str, list[str]] = {}
            created: dict[str, float] = {}
            used: dict[str, int] = {}
            for row in found:
                name = row["session"]
                nodes.setdefault(name, []).append(row["node"])
                created.setdefault(name, row["created"])
                used[name] = max(used.get(name, 0), row["used"], touched.get(row["node"], 0))
            heads = {
                name: one(db, f"SELECT {_COLUMNS} FROM records WHERE node = ?", its[-1])
                for name, its in nodes.items()
            }
        return [
            Session(name, _read(head), tuple(nodes[name]), created[name])
            for name in sorted(nodes, key=lambda each: used[each])
            if (head := heads[name]) is not None
        ]


def _insert(db: sqlite3.Connection, record: Record) -> None:
    """Put a record in the place of the one its node has."""
    db.execute("DELETE FROM records WHERE node = ?", (record.node,))
    messages = [[each.role, each.content, each.name] for each in record.messages]
    db.execute(
        f"INSERT INTO records ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            record.node,
            record.owner,
            record.session,
            record.parent,
            record.chain,
            json.dumps(messages),
            record.last,
            record.seen,
            json.dumps(record.usage),
            record.created,
            record.ids,
        ),
    )


def _read(row: sqlite3.Row) -> Record:
    said: dict[str, Any] = dict(row)
    said["messages"] = tuple(Message(*each) for each in json.loads(said["messages"]))
    said["usage"] = json.loads(said["usage"])
    return Record(**said)


def _texts(values: Sequence[str]) -> bool:
    """Whether tables can hold these; halves of characters they cannot."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True
