"""Two replicas share a store: what one has ended the other goes on from, and only one may end."""

from __future__ import annotations

import errno
import os
import secrets
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sessions"))

from stores import FORM, MODEL, NODES, record, same, save

from weir.errors import WeirError
from weir.serve.cluster import LeaseTable, SharedStore, Storage, open_storage, storage
from weir.serve.cluster.ledger import PAGES
from weir.serve.cluster.store import folder_of
from weir.serve.messages import Call, Message
from weir.serve.sessions import (
    AnsweredElsewhere,
    LeaseLost,
    NameTaken,
    RowFormat,
    SessionLease,
    StorageFull,
    TurnRecord,
)


class Clock:
    """Seconds, as a test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["folder", "fsspec"])
def shared(request, tmp_path) -> Storage:
    memory = f"memory://{secrets.token_hex(4)}/weir"
    return open_storage(str(tmp_path / "shared") if request.param == "folder" else memory)


class Replicas:
    """Stores of two replicas, and the table between them."""

    def __init__(self, shared: Storage, **given: Any) -> None:
        self.clock = Clock()
        table = LeaseTable(10.0, clock=self.clock)
        self.a, self.b = (SharedStore(shared, table, name, FORM, **given) for name in "ab")


@pytest.fixture
def replicas(shared) -> Replicas:
    return Replicas(shared)


def turn(
    store: SharedStore, made: TurnRecord, n: int, lease: SessionLease | None = None
) -> TurnRecord:
    """A turn that ends on a replica."""
    lease = lease or store.acquire_lease(made.owner, made.session)
    made = replace(made, epoch=lease.epoch)
    try:
        error = save(store, made, NODES[n])
    finally:
        lease.release()
    if error is not None:
        raise error
    return made


def files(shared: Storage, store: SharedStore, made: TurnRecord) -> list[str]:
    """The files of turns in a session's folder."""
    return [n for n in shared.list_names(folder_of(made.owner, made.session)) if "." in n]


def test_a_turn_is_gone_on_from_on_another_replica_bit_for_bit(replicas):
    said = (
        Message("user", "hé\ud800 \x00"),
        Message("assistant", "", calls=(Call("c", "f", "{}"),)),
    )
    first = turn(replicas.a, record("n0", 0, messages=said), 0)
    assert replicas.b.find_history("me", first.chain) == first
    assert replicas.b.find_turn("me", "n0") == first
    found = replicas.b.load("n0")
    assert found.pending == NODES[0].pending
    assert same(type(NODES[0])(found.state, found.pending), NODES[0])
    second = turn(replicas.b, record("n1", 1, parent="n0"), 1)
    assert replicas.a.list_turns("me", "s") == [first, second]
    session = replicas.a.get_session("me", "s")
    assert session == replicas.b.get_session("me", "s")
    assert replicas.a.list_sessions("me") == [session]
    assert [stretch.node for stretch in replicas.a.ancestry("me", "n1")][-1] == "n1"


def test_what_is_anothers_is_not_found(replicas):
    first = turn(replicas.a, record("n0", 0), 0)
    for store in (replicas.a, replicas.b):
        assert store.find_history("you", first.chain) is None
        assert store.find_turn("you", "n0") is None
        assert store.get_session("you", "s") is None
        assert store.list_sessions("you") == []


def test_a_session_that_is_answered_is_not_begun_elsewhere(replicas):
    held = replicas.a.acquire_lease("me", "s")
    with pytest.raises(AnsweredElsewhere) as refused:
        replicas.b.acquire_lease("me", "s")
    assert refused.value.seconds == 10
    replicas.b.acquire_lease("me", "other").release()
    held.release()
    held.release()  # which changes nothing
    replicas.b.acquire_lease("me", "s").release()


def test_a_replica_that_was_silent_for_too_long_cannot_end_its_turn(replicas, shared):
    first = turn(replicas.a, record("n0", 0), 0)
    late = replicas.a.acquire_lease("me", "s")
    replicas.clock.now = 11
    held = replicas.b.acquire_lease("me", "s")
    with pytest.raises(LeaseLost):
        turn(replicas.a, record("late", 1, parent="n0"), 1, late)
    assert replicas.b.find_turn("me", "late") is None
    second = turn(replicas.b, record("n2", 2, parent="n0"), 2, held)
    assert replicas.a.list_turns("me", "s") == [first, second]
    assert {name.partition(".")[0] for name in files(shared, replicas.a, first)} == {"n0", "n2"}


def test_a_turn_that_began_before_its_session_was_lost_and_won_again_cannot_end(replicas):
    late = replicas.a.acquire_lease("me", "s")
    replicas.clock.now = 11
    turn(replicas.b, record("n1", 1), 1)
    turn(replicas.a, record("n2", 2), 2)
    with pytest.raises(LeaseLost):
        turn(replicas.a, record("late", 3), 3, late)
    assert [each.node for each in replicas.b.list_turns("me", "s")] == ["n1", "n2"]


def test_what_a_killed_replica_was_writing_goes_when_its_session_goes_on(replicas, shared):
    first = turn(replicas.a, record("n0", 0), 0)
    writing = record("half", 1)
    replicas.a._write_files(folder_of("me", "s"), writing, NODES[1])
    assert len(files(shared, replicas.a, first)) == 4
    replicas.b.acquire_lease("me", "s").release()
    assert len(files(shared, replicas.a, first)) == 2


def test_a_full_shared_folder_is_known_before_an_answer_and_loses_none(tmp_path, monkeypatch):
    replicas = Replicas(open_storage(str(tmp_path)))
    turn(replicas.a, record("n0", 0), 0)
    monkeypatch.setattr(storage, "free_bytes", lambda folder: FORM.turn_bytes - 1)
    assert replicas.a.is_full()
    with pytest.raises(StorageFull):
        replicas.a.check_room(1)

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)  # where it was not known
    late = replicas.a.acquire_lease("me", "s")
    error = save(replicas.a, replace(record("n1", 1), epoch=late.epoch), NODES[1])
    late.release()
    monkeypatch.undo()
    assert isinstance(error, StorageFull)
    assert [each.node for each in replicas.b.list_turns("me", "s")] == ["n0"]
    replicas.a.check_room(1)


def test_the_newest_turns_of_a_session_are_kept_and_old_pages_go(shared):
    replicas = Replicas(shared, kept=2)
    made = [turn(replicas.a, record(f"n{n}", n % 6, chain=f"{n:064x}"), n % 6) for n in range(12)]
    assert replicas.b.list_turns("me", "s") == made[-2:]
    assert replicas.a.list_turns("me", "s") == made[-2:]
    assert replicas.b.find_history("me", made[0].chain) is None
    assert len(files(shared, replicas.a, made[0])) == 4
    pages = f"{folder_of('me', 's')}/pages"
    assert len(shared.list_names(pages)) == PAGES
    assert len(shared.list_names("owners")) <= 1


def test_a_session_is_rewound_and_deleted_from_any_replica(replicas, shared):
    made = [turn(replicas.a, record(f"n{n}", n), n) for n in range(3)]
    late = replicas.a.acquire_lease("me", "s")
    assert replicas.b.remove_turns("me", "s", ["n2", "none"]) == ["n2"]
    with pytest.raises(LeaseLost):
        turn(replicas.a, record("late", 3), 3, late)
    assert replicas.a.list_turns("me", "s") == made[:2]
    assert sorted(replicas.a.remove_turns("me", "s", ["n0", "n1"])) == ["n0", "n1"]
    for store in (replicas.a, replicas.b):
        assert store.get_session("me", "s") is None
        assert store.list_sessions("me") == []
        assert store.find_turn("me", "n0") is None
    assert files(shared, replicas.a, made[0]) == []
    again = turn(replicas.b, record("n4", 4), 4)
    assert replicas.a.list_turns("me", "s") == [again]


def test_a_fork_is_a_session_of_its_own(replicas):
    turn(replicas.a, record("n0", 0), 0)
    turn(replicas.a, record("n1", 1, parent="n0"), 1)
    turn(replicas.a, record("n2", 2, parent="n0"), 2)
    fork = replicas.b.fork("me", "n2", "fork")
    copies = replicas.a.list_turns("me", "fork")
    assert [each.last for each in copies] == [0, 2]
    assert copies[1].parent == copies[0].node != "n0"
    assert (fork.head, fork.turns) == (copies[1].node, 2)
    found = replicas.a.load(fork.head)
    assert same(type(NODES[2])(found.state, found.pending), NODES[2])
    replicas.a.remove_turns("me", "s", ["n0", "n1", "n2"])
    assert replicas.b.list_turns("me", "fork") == copies
    with pytest.raises(NameTaken):
        replicas.a.fork("me", fork.head, "fork")
    with pytest.raises(WeirError, match="no such turn"):
        replicas.a.fork("you", fork.head, "mine")


def test_a_folder_of_another_policy_is_refused(shared):
    Replicas(shared)
    other = RowFormat.of(MODEL, "recent(6)", 4)
    with pytest.raises(WeirError, match="cannot be used here: its rows have the policy"):
        SharedStore(shared, LeaseTable(), "c", other)


def test_a_shared_file_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []

    def note(name: str) -> None:
        real = getattr(os, name)
        monkeypatch.setattr(storage.os, name, lambda *given: (calls.append(name), real(*given)))

    for name in ("fsync", "link", "replace"):
        note(name)
    shared = open_storage(str(tmp_path))
    assert shared.create("folder/file", b"x")
    shared.write("folder/file", b"y")
    assert calls == ["fsync", "link", "fsync", "fsync", "replace", "fsync"]
    assert shared.read("folder/file") == b"y"


def test_of_those_who_make_a_file_at_once_one_does(tmp_path):
    shared = open_storage(str(tmp_path))
    at_once, made = threading.Barrier(8), []

    def make(n: int) -> None:
        at_once.wait()
        for file in range(20):
            if shared.create(f"folder/{file}", bytes([n]) * 1000):
                made.append((file, n))

    threads = [threading.Thread(target=make, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(file for file, _ in made) == list(range(20))
    assert all(shared.read(f"folder/{file}") == bytes([n]) * 1000 for file, n in made)
    assert len(shared.list_names("folder")) == 20


@pytest.mark.parametrize("place", ["nothing://x", "s3"])
def test_a_storage_that_is_none_is_refused_or_a_folder(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "://" in place:
        with pytest.raises(WeirError, match="cannot be used"):
            open_storage(place)
    else:
        open_storage(place)
        assert (tmp_path / place).is_dir()
