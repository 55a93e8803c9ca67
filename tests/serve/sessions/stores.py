"""What tests of stores share: nodes of a small model, and a disk that can be cut off anywhere."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from reference.naive import VOCABULARY, make_llama

from weir.cache import StreamingCache
from weir.errors import WeirError
from weir.serve import Checkpoint
from weir.serve.messages import Message
from weir.serve.sessions import (
    RowFormat,
    SessionArchive,
    SessionStore,
    SessionSummary,
    SQLiteStore,
    TurnRecord,
    pack_ids,
)
from weir.serve.sessions import snapshot_folder as folder_file

MODEL = make_llama(layers=1)
POLICY = "sink(2) | recent(6)"
CHUNK = 4


def nodes(count: int, tokens: int = 20) -> list[Checkpoint]:
    """Ends of turns that differ."""
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
FORM = RowFormat.of(MODEL, POLICY, CHUNK)


def store(folder: Path, **given: Any) -> SQLiteStore:
    return SQLiteStore(folder, MODEL, POLICY, chunk=CHUNK, **given)


def save(store: SessionStore, made: TurnRecord, checkpoint: Checkpoint) -> Exception | None:
    """Save a turn and wait until it is safe; why it cannot be kept, or None."""
    told, errors = threading.Event(), []

    def done(error: Exception | None) -> None:
        errors.append(error)
        told.set()

    store.save(checkpoint, made, done)
    assert told.wait(60)
    (error,) = errors
    return error


def kept(store: SessionStore, name: str, checkpoint: Checkpoint) -> Exception | None:
    """Save a turn of this name, in a session of its own."""
    return save(store, record(name, session=f"of {name}"[:50], checkpoint=checkpoint), checkpoint)


def same(found: Checkpoint, wanted: Checkpoint) -> bool:
    """Whether two nodes are one, bit for bit."""
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
        assert "not kept any more" in str(error)
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


def pack(its: SessionStore, owner: str, session: str, path: Path, most: int = 100) -> int:
    """Write a session into a file; how many turns it has."""
    archive = SessionArchive.of(its, owner, session, most)
    archive.write(path, FORM)
    return len(archive.records)


def unpack(its: SessionStore, owner: str, path: Path, limit: int | None = None) -> SessionSummary:
    """Take in a session from a file."""
    archive = SessionArchive.read(path, FORM, limit).renamed(owner)
    return its.import_session(archive.records, archive.checkpoints)


class Killed(BaseException):
    """The process was killed here."""


class Cut:
    """`os` as `folder` sees it, in a process that is killed after so many changes of the disk."""

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


def kill(store: SQLiteStore) -> None:
    """End a store as a killed process does: nothing more is written, the lock is gone."""
    checkpoints, writer = store.checkpoints, store._writer
    folder_file.os = Cut(0)  # type: ignore[attr-defined]
    try:
        checkpoints.db._writer.set_authorizer(lambda *given: 1)  # SQLITE_DENY
        writer.close()
    finally:
        folder_file.os = os  # type: ignore[attr-defined]
    checkpoints.db.close()
    checkpoints._files.close()
    os.close(checkpoints._lock)
    checkpoints._lock = -1
