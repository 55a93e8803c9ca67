"""For tests of stores: checkpoints of a small model, and processes killed at any disk change."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from reference.naive import VOCABULARY, make_llama

from weir.cache import StreamingCache
from weir.errors import WeirError
from weir.serve import Checkpoint
from weir.serve.messages import Message
from weir.serve.sessions import snapshot_folder as folder_file
from weir.serve.sessions.disk_turns import DiskTurns
from weir.serve.sessions.export import read_export, write_export
from weir.serve.sessions.records import SessionSummary, TurnRecord, pack_ids
from weir.serve.sessions.store import SessionStore
from weir.serve.sessions.store_format import StoreFormat

MODEL = make_llama(layers=1)
POLICY = "sink(2) | recent(6)"
CHUNK = 4


def nodes(count: int, tokens: int = 20) -> list[Checkpoint]:
    """Checkpoints at the ends of different turns."""
    cache = StreamingCache(MODEL, POLICY, chunk=CHUNK, batch=1)
    made = []
    for n in range(count):
        cache.reset_row(0, seed=n)
        generator = torch.Generator().manual_seed(n)
        ids = torch.randint(0, VOCABULARY, (1, tokens + n), generator=generator)
        with torch.no_grad():
            MODEL(ids, past_key_values=cache)
        made.append(Checkpoint(cache.take_row(0), (n % VOCABULARY,)))
    return made


NODES = nodes(6)
FORM = StoreFormat.of(MODEL, POLICY, CHUNK)


def store(
    folder: Path, store_format: StoreFormat = FORM, limit: int | None = None, **given: Any
) -> SessionStore:
    return SessionStore(DiskTurns(folder, store_format, limit), **given)


def save(store: SessionStore, made: TurnRecord, checkpoint: Checkpoint) -> Exception | None:
    """Save a turn, wait until it is safe, and return why it cannot be kept, or None."""
    told, errors = threading.Event(), []

    def done(error: Exception | None) -> None:
        errors.append(error)
        told.set()

    store.save(checkpoint, made, done)
    assert told.wait(60)
    (error,) = errors
    return error


def kept(store: SessionStore, name: str, checkpoint: Checkpoint) -> Exception | None:
    """Save a turn of this name in a separate session; return like `save`."""
    return save(store, record(name, session=f"of {name}"[:50], checkpoint=checkpoint), checkpoint)


def same(found: Checkpoint, wanted: Checkpoint) -> bool:
    """Whether two checkpoints are equal, bit for bit."""
    mine, other = found.state, wanted.state
    return (
        found.pending == wanted.pending
        and mine.facts == other.facts
        and mine.kind == other.kind
        and mine.tensors.keys() == other.tensors.keys()
        and all(torch.equal(t, other.tensors[name]) for name, t in mine.tensors.items())
    )


def has(store: SessionStore, name: str, checkpoint: Checkpoint) -> bool:
    """Whether a store has this checkpoint; False if it has none of the name."""
    try:
        found = store.load(name)
    except WeirError as error:
        assert "no longer kept" in str(error)
        return False
    assert same(found, checkpoint)
    return True


def record(node: str, n: int = 0, checkpoint: Checkpoint | None = None, **given: Any) -> TurnRecord:
    """The record of a checkpoint, or of `NODES[n]`."""
    checkpoint = checkpoint or NODES[n]
    state, (last,) = checkpoint.state, checkpoint.pending
    made: dict[str, Any] = {
        "owner": "me",
        "session": "s",
        "parent": None,
        "chain": f"{n:064x}",
        "messages": (Message("user", f"hé\ud800 {n}\x00"), Message("assistant", "ja", "n")),
        "last": last,
        "seen": state.facts["seen"] + 1,
        "usage": {"bytes": 5},
        "created": 3.5,
        "ids": pack_ids([*range(state.facts["seen"]), last]),
        **given,
    }
    return TurnRecord(node, **made)


def pack(its: SessionStore, owner: str, session: str, path: Path) -> int:
    """Write a session into a file, and return how many turns it has."""
    turns = [(its.load(one.node), one) for one in its.list_turns(owner, session)]
    write_export(path, turns, FORM)
    return len(turns)


def unpack(its: SessionStore, owner: str, path: Path, limit: int | None = None) -> SessionSummary:
    """Import a session from a file."""
    return its.import_session(read_export(path, FORM, limit, owner))


class PlainStore:
    """A store in plain Python, as an oracle."""

    def __init__(self) -> None:
        self.turns: dict[str, tuple[Checkpoint, TurnRecord]] = {}  # in the order they came
        self.members: list[tuple[str, str, str]] = []  # owner, session, node
        self.uses: list[str] = []

    def save(self, checkpoint: Checkpoint, made: TurnRecord) -> None:
        self.drop(made.node)
        self.turns[made.node] = checkpoint, made
        self.members.append((made.owner, made.session, made.node))
        self.uses.append(made.node)

    def load(self, node: str) -> Checkpoint:
        self.uses.append(node)
        return self.turns[node][0]

    def drop(self, node: str) -> None:
        self.turns.pop(node, None)
        self.members = [place for place in self.members if place[2] != node]

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        mine = (made for _, made in self.turns.values() if made.owner == owner)
        ends = [made for made in mine if made.chain == chain]
        return self.told(ends[-1]) if ends else None

    def told(self, made: TurnRecord) -> TurnRecord:
        """A record, with the first of the sessions that still have its turn."""
        return replace(made, session=next(s for _, s, node in self.members if node == made.node))

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        nodes = [node for *place, node in self.members if place == [owner, session]]
        return [self.told(self.turns[node][1]) for node in nodes]

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        turns = self.list_turns(owner, session)
        if not turns:
            return None
        head, times = turns[-1], (turns[0].created, turns[-1].created)
        facts = head.seen, head.usage, head.topic
        return SessionSummary(session, head.node, len(turns), *times, *facts)

    def list_sessions(self, owner: str) -> list[SessionSummary | None]:
        names = {session for its, session, _ in self.members if its == owner}
        nodes = {name: {made.node for made in self.list_turns(owner, name)} for name in names}
        used = {n: max(i for i, use in enumerate(self.uses) if use in nodes[n]) for n in names}
        return [self.get_session(owner, name) for name in sorted(names, key=used.__getitem__)]

    def fork(self, owner: str, node: str, session: str) -> SessionSummary | None:
        path, at = [], node if node in self.turns and self.turns[node][1].owner == owner else None
        while at is not None and at in self.turns and at not in path:
            path.append(at)
            at = self.turns[at][1].parent
        if not path:
            raise WeirError("the turn does not exist")
        if self.list_turns(owner, session):
            raise WeirError("a session with this name already exists. Use another name")
        self.members += [(owner, session, each) for each in reversed(path)]
        return self.get_session(owner, session)

    def remove_turns(self, owner: str, session: str, nodes: Any) -> list[str]:
        leaving = [place for place in self.members if place[:2] == (owner, session)]
        leaving = [place for place in leaving if place[2] in nodes]
        self.members = [place for place in self.members if place not in leaving]
        kept = {node for *_, node in self.members}
        gone = [node for *_, node in leaving if node not in kept]
        for node in gone:
            self.drop(node)
        return gone


class Killed(BaseException):
    """The process was killed here."""


class Cut:
    """`os` as the snapshot folder uses it, in a process that is killed after `left` changes."""

    def __init__(self, after: int | None) -> None:
        self.left = after

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("write", "fsync", "rename", "unlink", "open"):
            return real

        def call(*given: Any, **named: Any) -> Any:
            if self.left is not None:
                if self.left == 0:
                    if name == "write":
                        real(given[0], bytes(given[1])[: len(given[1]) // 2])
                    raise Killed
                self.left -= 1
            return real(*given, **named)

        return call


def kill(store: SessionStore) -> None:
    """End a store as if its process were killed: nothing more is written, and the lock is free."""
    place, writer = store.place, store._writer
    folder_file.os = Cut(0)  # type: ignore[attr-defined]
    try:
        place.db._writer.set_authorizer(lambda *given: 1)  # SQLITE_DENY
        writer.shutdown()
    finally:
        folder_file.os = os  # type: ignore[attr-defined]
    place.db.close()
    place._files.close()
    os.close(place._lock)
    place._lock = -1
