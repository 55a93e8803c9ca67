"""Session store that replicas share: turns in files, and a ledger of which turns count.

A turn is written in this order: snapshot, record, page in the ledger, and then the entries by which
others find it. A replica keeps in memory what it has used of a session and reads the rest on
demand. Names and owners that come from clients are hashed, and never part of a path. Knows nothing
about Ray or HTTP.

The files:
    form.json                                the model and policy of all rows
    sessions/HASH/NODE.safetensors, .json    a turn: its snapshot, and its record
    sessions/HASH/pages/NUMBER.json          the ledger
    chains/HASH, nodes/HASH                  the session of a history, and of a turn
    owners/HASH/SESSION-TIME-HEAD.json       a session as lists show it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Protocol

from weir.errors import WeirError
from weir.serve.cluster.ledger import TAKEN, Ledger, LedgerPage
from weir.serve.cluster.storage import Storage
from weir.serve.messages import Message
from weir.serve.sessions import (
    DISK_FULL,
    AnsweredElsewhere,
    BackgroundWriter,
    Checkpoint,
    LazyCheckpoint,
    LeaseLost,
    MemoryStore,
    NameTaken,
    OnSaved,
    RowFormat,
    SessionLease,
    SessionSummary,
    StorageFull,
    TurnRecord,
    TurnTokens,
    decode_checkpoint,
    encode_checkpoint,
    find_path,
)

KEPT = 8
"""The newest turns of a session, which are kept."""


class Leases(Protocol):
    """Interface of the `LeaseTable` for stores, wherever the table runs."""

    def begin(self, session: str, replica: str) -> float:
        """Lease a session for a turn; return 0, or seconds until the next try."""

    def end(self, session: str, replica: str) -> None:
        """End a turn."""

    def beat(self, replica: str, sessions: Collection[str]) -> None:
        """Record a replica's heartbeat and its turns under way."""


class SharedStore:
    """One replica's view of the shared sessions (`SessionStore`).

    Args:
        replica: name of this replica, never used by another.
        kept: number of turns that are kept per session.

    Raises:
        WeirError: the files belong to another model or policy.
    """

    def __init__(
        self,
        storage: Storage,
        leases: Leases,
        replica: str,
        row_format: RowFormat,
        *,
        most: int = 256,
        kept: int = KEPT,
    ) -> None:
        self.replica = replica
        self._storage = storage
        self._leases = leases
        self._row_format = row_format
        self._kept = kept
        self._ledger = Ledger(storage)
        self._near = MemoryStore(most)
        self._pages: dict[str, LedgerPage] = {}  # this replica's own, by folder
        self._alone = threading.RLock()  # guards pages and the turns in memory
        self._summaries: dict[str, dict[str, SessionSummary]] = {}  # by owner and file
        self._answering: Counter[str] = Counter()
        self._counting = threading.Lock()
        if storage.read("form.json") is None:
            storage.create("form.json", json.dumps(row_format.to_json()).encode())
        try:
            row_format.check(json.loads(storage.read("form.json") or b"null"))
        except (WeirError, ValueError) as error:
            raise WeirError(
                f"the shared folder cannot be used here: {error}; give it its own model and "
                "policy, or another folder"
            ) from None
        self._writer = BackgroundWriter(self._write, 2)

    def close(self) -> None:
        """Write all pending turns."""
        self._writer.close()

    # --- leases

    def acquire_lease(self, owner: str, session: str) -> SessionLease:
        """Lease a session for a turn, and load the turns that other replicas added.

        Raises:
            AnsweredElsewhere: another replica is answering the session. WeirError: the session
                cannot be claimed.
        """
        with self._counting:
            self._answering[session] += 1
        try:
            seconds = self._leases.begin(session, self.replica)
            if seconds > 0:
                raise AnsweredElsewhere(seconds)
            epoch = self._claim(owner, session).epoch
            return SessionLease(epoch, partial(self._end_turn, session))
        except BaseException:
            self._end_turn(session)
            raise

    def _end_turn(self, session: str) -> None:
        with self._counting:
            self._answering[session] -= 1
            if not self._answering[session]:
                del self._answering[session]
        self._leases.end(session, self.replica)

    def beat(self) -> None:
        """Send this replica's heartbeat and its turns under way to the lease table."""
        with self._counting:
            answering = list(self._answering.elements())
        self._leases.beat(self.replica, answering)

    # --- saving

    def load(self, node: str) -> Checkpoint:
        """Load a checkpoint; the state of another replica's is read on access."""
        return self._near.load(node)

    def save(self, checkpoint: Checkpoint, record: TurnRecord, done: OnSaved) -> None:
        """Save a turn in the writer's thread, which calls `done`.

        The error is `LeaseLost` where another replica has claimed the session since the turn began.
        """
        self._writer.submit(checkpoint, record, done)

    def _write(self, checkpoint: Checkpoint, record: TurnRecord) -> None:
        folder = folder_of(record.owner, record.session)
        with self._alone, self._undoing(folder, [record]):
            self._write_files(folder, record, checkpoint)
            page = self._pages.get(folder)
            if page is None or page.epoch != record.epoch:
                raise LeaseLost(TAKEN)
            turns = (*page.turns, record.node)
            self._put(folder, page.next(turns[-self._kept :]))
            self._near.save(checkpoint, record)
            self._publish(record.owner, record.session, [record])
            self._forget(record.owner, record.session, turns[: -self._kept])

    def check_room(self, turns: int) -> None:
        """Refuse turns that could not be kept, before they are answered."""
        if not self._storage.has_room(turns * self._row_format.turn_bytes):
            raise StorageFull(DISK_FULL)

    def is_full(self) -> bool:
        """Whether the storage has no room for one more turn."""
        return not self._storage.has_room(self._row_format.turn_bytes)

    def drop(self, node: str) -> None:
        """Forget a turn on this replica."""
        self._near.drop(node)

    # --- finding

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        """The owner's newest turn that ends a conversation of this hash, wherever it was made."""
        found = self._near.find_history(owner, chain)
        if found is None and self._learn_from(owner, "chains", chain):
            found = self._near.find_history(owner, chain)
        return found

    def find_turn(self, owner: str, node: str) -> TurnRecord | None:
        """A turn of the owner's, wherever it was made."""
        found = self._near.find_turn(owner, node)
        if found is None and self._learn_from(owner, "nodes", node):
            found = self._near.find_turn(owner, node)
        return found

    def ancestry(self, owner: str, node: str) -> list[TurnTokens]:
        """The tokens that led to a turn of the owner's, as far back as its turns are kept."""
        self.find_turn(owner, node)
        return self._near.ancestry(owner, node)

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        """A session of the owner's."""
        self._learn(owner, session)
        return self._near.get_session(owner, session)

    def list_sessions(self, owner: str) -> list[SessionSummary]:
        """All sessions of the owner, the least recently used first."""
        folder = f"owners/{_hash(owner)}"
        # Sorted by session, then time: a session's newer entry comes last.
        names = {name.partition("-")[0]: name for name in self._storage.list_names(folder)}
        known, found = self._summaries.get(owner, {}), {}
        for name in names.values():
            if name in known:  # entries never change: they are replaced by new ones
                found[name] = known[name]
            elif (data := self._storage.read(f"{folder}/{name}")) is not None:
                found[name] = SessionSummary(**json.loads(data))
        self._summaries[owner] = found
        return sorted(found.values(), key=lambda session: session.used)

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """The turns of a session that are kept, in the order they came."""
        self._learn(owner, session)
        return self._near.list_turns(owner, session)

    # --- sessions that exist

    def fork(self, owner: str, node: str, session: str) -> SessionSummary:
        """Begin a session with copies of a turn and of its ancestors."""
        record = self.find_turn(owner, node)
        if record is None:
            raise WeirError("there is no such turn")
        turns = {turn.node: turn for turn in self._near.list_turns(owner, record.session)}
        path = find_path(node, {name: turn.parent for name, turn in turns.items()})
        names = {name: secrets.token_hex(16) for name in path}
        copies = [
            replace(
                turns[name],
                node=names[name],
                session=session,
                parent=names.get(turns[name].parent or ""),
            )
            for name in path
        ]
        return self.import_session(copies, [self.load(name) for name in path])

    def remove_turns(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        """Take turns out of a session, also where another replica is answering it just now."""
        folder, unwanted = folder_of(owner, session), set(nodes)
        with self._alone:
            page = self._claim(owner, session)
            gone = [node for node in page.turns if node in unwanted]
            if gone:
                self._put(folder, page.next(n for n in page.turns if n not in unwanted))
                self._forget(owner, session, gone)
                self._publish(owner, session, [])
        return gone

    def import_session(
        self, records: Sequence[TurnRecord], checkpoints: Sequence[Checkpoint]
    ) -> SessionSummary:
        """Save the newest turns of one new session."""
        records, checkpoints = records[-self._kept :], checkpoints[-self._kept :]
        owner, session = records[0].owner, records[0].session
        folder = folder_of(owner, session)
        with self._alone:
            page = self._claim(owner, session)
            if page.turns:
                raise NameTaken("there is a session of this name already")
            with self._undoing(folder, records):
                for record, checkpoint in zip(records, checkpoints, strict=True):
                    self._write_files(folder, record, checkpoint)
                self._put(folder, page.next(record.node for record in records))
                self._learn(owner, session)
                self._publish(owner, session, records)
        found = self._near.get_session(owner, session)
        if found is None:
            raise WeirError("the session was taken in, but others took its room at once")
        return found

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file in transit."""
        return self._near.make_scratch_folder()

    # --- pages

    def _claim(self, owner: str, session: str) -> LedgerPage:
        """Claim a session: make this replica's page, after which no other replica's turn can end.

        Files of turns without a page were being written by replicas that lost the session; they are
        deleted.
        """
        folder = folder_of(owner, session)
        with self._alone:
            page, newest = self._pages.get(folder), self._ledger.read(folder)
            if page is None or page != newest:
                page = self._pages[folder] = self._ledger.claim(folder, self.replica)
                for file in self._storage.list_names(folder):
                    name, _, kind = file.partition(".")
                    if kind in ("json", "safetensors") and name not in page.turns:
                        self._storage.delete(f"{folder}/{file}")
                self._meet(owner, session, page)
            return page

    def _put(self, folder: str, page: LedgerPage) -> None:
        """Create a page of this replica."""
        try:
            self._ledger.put(folder, page)
        except LeaseLost:
            self._pages.pop(folder, None)
            raise
        self._pages[folder] = page

    def _learn(self, owner: str, session: str) -> None:
        """Bring the turns of a session in memory up to date."""
        with self._alone:
            page = self._ledger.read(folder_of(owner, session))
            if page is not None:
                self._meet(owner, session, page)

    def _learn_from(self, owner: str, kind: str, name: str) -> bool:
        """Learn the session that an entry names; False if there is no entry."""
        data = self._storage.read(_entry(kind, owner, name))
        if data is None:
            return False
        with contextlib.suppress(ValueError, LookupError, TypeError):  # entries are only hints
            self._learn(owner, str(json.loads(data)[0]))
        return True

    def _meet(self, owner: str, session: str, page: LedgerPage) -> None:
        """Make the turns in memory of a session those of a page."""
        near = {record.node for record in self._near.list_turns(owner, session)}
        if near == set(page.turns):
            return
        self._near.remove_turns(owner, session, near)
        folder = folder_of(owner, session)
        for name in page.turns:
            if (record := self._read_record(folder, name)) is not None:
                self._near.save(self._lazy_checkpoint(folder, record), record)

    # --- files of turns

    def _write_files(self, folder: str, record: TurnRecord, checkpoint: Checkpoint) -> None:
        """Write the snapshot of a turn, and then its record."""
        snapshot = encode_checkpoint(self._row_format, checkpoint)
        try:
            self._storage.write(f"{folder}/{record.node}.safetensors", snapshot)
            self._storage.write(f"{folder}/{record.node}.json", _record_to_json(record))
        except OSError as error:
            reason = error.strerror or error
            raise WeirError(f"the turn cannot be kept in the shared folder: {reason}") from None

    def _read_record(self, folder: str, name: str) -> TurnRecord | None:
        """Read the record of a turn; None if it was just deleted, or cannot be read."""
        data = self._storage.read(f"{folder}/{name}.json")
        try:
            return None if data is None else _record_from_json(data)
        except (ValueError, TypeError, LookupError):
            return None

    def _lazy_checkpoint(self, folder: str, record: TurnRecord) -> Checkpoint:
        """The checkpoint of a turn, read when its state is needed."""

        def read() -> Checkpoint:
            data = self._storage.read(f"{folder}/{record.node}.safetensors")
            if data is None:
                raise WeirError("what this turn goes on from is not kept any more")
            found = decode_checkpoint(self._row_format, data)
            if found.pending != (record.last,):
                raise WeirError("what this turn goes on from is the end of another one")
            return found

        return LazyCheckpoint((record.last,), read)

    def _delete_files(self, folder: str, node: str) -> None:
        for kind in ("json", "safetensors"):
            self._storage.delete(f"{folder}/{node}.{kind}")

    @contextmanager
    def _undoing(self, folder: str, records: Sequence[TurnRecord]) -> Iterator[None]:
        """Delete the files of these turns if the `with` block fails, unless a page lists them."""
        try:
            yield
        except BaseException:
            page = self._ledger.read(folder)
            for record in records:
                if page is None or record.node not in page.turns:
                    self._delete_files(folder, record.node)
            raise

    # --- entries by which turns are found

    def _publish(self, owner: str, session: str, new: Sequence[TurnRecord]) -> None:
        """Write the entries of new turns, and of their session."""
        for record in new:
            entry = json.dumps([record.session, record.node]).encode()
            for kind, name in (("chains", record.chain), ("nodes", record.node)):
                self._storage.write(_entry(kind, owner, name), entry)
        folder, name = f"owners/{_hash(owner)}", _hash(owner, session)
        before = [entry for entry in self._storage.list_names(folder) if entry.startswith(name)]
        now, file = self._near.get_session(owner, session), None
        if now is not None:
            file = f"{name}-{round(now.used * 1e6):020}-{now.head[:8]}.json"
            self._storage.write(f"{folder}/{file}", json.dumps(asdict(now)).encode())
        for old in before:
            if old != file:
                self._storage.delete(f"{folder}/{old}")

    def _forget(self, owner: str, session: str, nodes: Collection[str]) -> None:
        """Delete turns that no page has any more, and the entries that lead to them."""
        for node in nodes:
            record = self._near.find_turn(owner, node)
            if record is not None:
                self._storage.delete(_entry("nodes", owner, node))
                path = _entry("chains", owner, record.chain)
                data = self._storage.read(path)
                if data is not None and json.loads(data)[1] == node:
                    self._storage.delete(path)
            self._delete_files(folder_of(owner, session), node)
        self._near.remove_turns(owner, session, nodes)


def folder_of(owner: str, session: str) -> str:
    """The folder of a session."""
    name = _hash(owner, session)
    return f"sessions/{name[:2]}/{name}"


def _entry(kind: str, owner: str, name: str) -> str:
    found = _hash(owner, name)
    return f"{kind}/{found[:2]}/{found}"


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _record_to_json(record: TurnRecord) -> bytes:
    values = {name: value for name, value in vars(record).items() if name != "epoch"}
    values["messages"] = [message.to_json() for message in record.messages]
    values["ids"] = record.ids.hex()
    return json.dumps(values).encode()


def _record_from_json(data: bytes) -> TurnRecord:
    values = json.loads(data)
    values["messages"] = tuple(Message.from_json(kept) for kept in values["messages"])
    values["ids"] = bytes.fromhex(values["ids"])
    return TurnRecord(**values)
