"""Turns that replicas share: each is two files that never change.

A turn is in a session once its record exists. Its snapshot is written before the record, and the
entries by which others find it are written after. If two replicas answer one session at once, both
add to it, as two requests to one server do, so nothing is locked and no turn is lost. A replica
keeps in memory the turns of sessions that it has used, and reads others on demand. Names and owners
that come from clients are hashed, and never part of a path.

The files:
    form.json                                the model and policy of all rows
    sessions/HASH/NODE.safetensors, .json    a turn: its snapshot, and its record
    chains/HASH, nodes/HASH                  the session of a history, and of a turn
    owners/HASH/SESSION-TIME-HEAD.json       a session as lists show it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace

from weir.cache import RowState
from weir.errors import WeirError
from weir.serve.cluster.storage import Storage
from weir.serve.messages import Message, ResultPlace
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
from weir.serve.sessions.store_format import StoreFormat
from weir.serve.sessions.turn_tables import TurnTables

KEPT = 8
"""The number of newest turns of a session that are kept."""
ABANDONED = 3600.0
"""Seconds after which a file without a record is taken as left by a turn that was never finished.
"""


class SharedTurns(TurnTables):
    """One replica's view of the shared turns: `most` in memory, and `kept` of each session."""

    def __init__(
        self, storage: Storage, store_format: StoreFormat, *, most: int = 256, kept: int = KEPT
    ) -> None:
        super().__init__(most)
        self._storage = storage
        self._store_format = store_format
        self._kept = kept
        self._listed: dict[str, dict[str, SessionSummary]] = {}  # by owner and file
        if storage.read("form.json") is None:
            storage.write("form.json", json.dumps(store_format.to_json()).encode())
        store_format.check_place("the shared folder", storage.read("form.json") or b"null")

    def turn_bytes(self, tokens: int | None = None) -> int:
        """See `TurnTables.turn_bytes`."""
        return self._store_format.turn_bytes(tokens)

    def free_bytes(self) -> int | None:
        """Return the free bytes that the storage reports. None if it does not report them."""
        return self._storage.free_bytes()

    # --- reading

    def newest(self, owner: str, column: str, value: str) -> TurnRecord | None:
        """Return the owner's newest turn with a chain or node, whichever replica made it."""
        found = super().newest(owner, column, value)
        data = None if found else self._storage.read(_entry(f"{column}s", owner, value))
        if data is None:
            return found
        with contextlib.suppress(ValueError, LookupError, TypeError):  # entries are only hints
            self._learn(owner, str(json.loads(data)[0]))
        return super().newest(owner, column, value)

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """Return the kept turns of a session, in the order in which they ended."""
        self._learn(owner, session)
        return super().list_turns(owner, session)

    def summaries(self, owner: str, session: str | None = None) -> list[SessionSummary]:
        """Return the owner's sessions, or one of them, the least recently used first."""
        if session is not None:
            self._learn(owner, session)
            return super().summaries(owner, session)
        folder = f"owners/{_hash(owner)}"
        # Sorted by session, then time, so that a session's newest entry comes last.
        names = {name.partition("-")[0]: name for name in self._storage.list_names(folder)}
        known, found = self._listed.get(owner, {}), {}
        for name in names.values():
            if name in known:  # entries never change: they are replaced
                found[name] = known[name]
            elif (data := self._storage.read(f"{folder}/{name}")) is not None:
                found[name] = SessionSummary(**json.loads(data))
        self._listed[owner] = found
        return sorted(found.values(), key=lambda summary: summary.used)

    def ancestry(self, owner: str, node: str) -> tuple[list[TurnTokens], str | None]:
        """Return the tokens that led to a turn, as far back as its turns are kept."""
        self.newest(owner, "node", node)
        return super().ancestry(owner, node)

    # --- writing

    def add(self, turns: Sequence[Turn], what: str = "one turn") -> None:
        """Add turns to one session, parents first, either all or none. If the session then has
        too many, the oldest are deleted. Of more than `kept` turns, only the newest are added.
        """
        owner, session = turns[0][1].owner, turns[0][1].session
        turns = turns[-self._kept :]
        try:
            for checkpoint, record in turns:
                self._write_files(checkpoint, record)
            with self.exclusive:
                for turn in turns:
                    super().add([turn])
                self._publish(owner, session)
        except BaseException:
            for _, record in turns:
                with contextlib.suppress(OSError):
                    self._delete(record)
            raise

    def fork(self, owner: str, node: str, session: str) -> None:
        """Begin a session with copies of a turn and of its ancestors."""
        record = self.newest(owner, "node", node)
        if record is None:
            raise WeirError("the turn does not exist")
        if self.list_turns(owner, session):
            raise NameTaken("a session with this name already exists. Use another name")
        turns = {turn.node: turn for turn in super().list_turns(owner, record.session)}
        path = find_path(node, {name: turn.parent for name, turn in turns.items()})
        names = {name: secrets.token_hex(16) for name in path}
        copies: list[Turn] = []
        for name, new in names.items():
            parent = names.get(turns[name].parent or "")
            copy = replace(turns[name], node=new, session=session, parent=parent)
            copies.append((self._lazy_checkpoint(turns[name]), copy))
        self.add(copies)

    def remove(
        self, nodes: Collection[str], owner: str | None = None, session: str | None = None
    ) -> list[str]:
        """Remove turns from a session, which deletes them. Without a session, only from memory."""
        if owner is None or session is None:
            return super().remove(nodes)
        with self.exclusive:
            gone = [turn for turn in self.list_turns(owner, session) if turn.node in nodes]
            for record in gone:
                self._delete(record)
            if gone:
                self._publish(owner, session)
        return [record.node for record in gone]

    def _write_files(self, checkpoint: Checkpoint, record: TurnRecord) -> None:
        """Write a turn's snapshot, its record, and the entries that point to it."""
        path = f"{_folder(record.owner, record.session)}/{record.node}"
        snapshot = checkpoint.to_bytes()
        self._storage.write(f"{path}.safetensors", snapshot)
        self._storage.write(f"{path}.json", _record_to_json(record))
        entry = json.dumps([record.session, record.node]).encode()
        for kind, name in (("chains", record.chain), ("nodes", record.node)):
            self._storage.write(_entry(kind, record.owner, name), entry)

    def _delete(self, record: TurnRecord) -> None:
        """Delete a turn and the entries that point to it."""
        self.remove([record.node])
        folder = _folder(record.owner, record.session)
        for kind in ("json", "safetensors"):
            self._storage.delete(f"{folder}/{record.node}.{kind}")
        self._storage.delete(_entry("nodes", record.owner, record.node))
        path = _entry("chains", record.owner, record.chain)
        data = self._storage.read(path)
        if data is not None and json.loads(data)[1] == record.node:
            self._storage.delete(path)

    def _publish(self, owner: str, session: str) -> None:
        """Update a session's entry in lists, and delete its turns above the limit."""
        turns = self.list_turns(owner, session)
        for record in turns[: -self._kept]:
            self._delete(record)
        self._delete_abandoned(_folder(owner, session), {f"{turn.node}.json" for turn in turns})
        folder, name = f"owners/{_hash(owner)}", _hash(owner, session)
        before = [entry for entry in self._storage.list_names(folder) if entry.startswith(name)]
        file = None
        for now in super().summaries(owner, session):
            file = f"{name}-{round(now.used * 1e6):020}-{now.head[:8]}.json"
            self._storage.write(f"{folder}/{file}", json.dumps(asdict(now)).encode())
        for old in before:
            if old != file:
                self._storage.delete(f"{folder}/{old}")

    def _delete_abandoned(self, folder: str, records: set[str]) -> None:
        """Delete files that killed replicas left, or all files if no turn remains."""
        for file in self._storage.list_names(folder):
            name, _, kind = file.rpartition(".")
            if kind not in ("safetensors", "part") or f"{name}.json" in records:
                continue
            if not records or self._storage.age(f"{folder}/{file}") > ABANDONED:
                self._storage.delete(f"{folder}/{file}")

    # --- learning what other replicas did

    def _learn(self, owner: str, session: str) -> None:
        """Read the turns of a session from the storage into memory."""
        folder = _folder(owner, session)
        with self.exclusive:
            files = self._storage.list_names(folder)
            names = {file.removesuffix(".json") for file in files if file.endswith(".json")}
            near = {record.node for record in super().list_turns(owner, session)}
            if near == names:
                return
            super().remove(near)
            read = [self._read_record(folder, name) for name in names]
            found = [record for record in read if record is not None]
            for record in sorted(found, key=lambda record: (record.created, record.seen)):
                super().add([(self._lazy_checkpoint(record), record)])

    def _read_record(self, folder: str, name: str) -> TurnRecord | None:
        """Read the record of a turn. None if it was just deleted, or cannot be read."""
        try:
            values = json.loads(self._storage.read(f"{folder}/{name}.json") or b"")
            values["messages"] = tuple(Message.from_json(kept) for kept in values["messages"])
            values["ids"] = bytes.fromhex(values["ids"])
            values["kept"] = tuple(ResultPlace(*place) for place in values.get("kept", ()))
            return TurnRecord(**values)
        except (ValueError, TypeError, LookupError):
            return None

    def _lazy_checkpoint(self, record: TurnRecord) -> Checkpoint:
        """Return the checkpoint of a turn. Its state is read when needed."""

        def read() -> RowState:
            path = f"{_folder(record.owner, record.session)}/{record.node}.safetensors"
            data = self._storage.read(path)
            if data is None:
                self.remove([record.node])
                raise WeirError(NOT_KEPT)
            return Checkpoint.from_bytes(data, self._store_format.rows, (record.last,)).state

        return Checkpoint(read, (record.last,))


def _folder(owner: str, session: str) -> str:
    name = _hash(owner, session)
    return f"sessions/{name[:2]}/{name}"


def _entry(kind: str, owner: str, name: str) -> str:
    found = _hash(owner, name)
    return f"{kind}/{found[:2]}/{found}"


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _record_to_json(record: TurnRecord) -> bytes:
    values = {**vars(record), "messages": [message.to_json() for message in record.messages]}
    return json.dumps({**values, "ids": record.ids.hex()}).encode()
