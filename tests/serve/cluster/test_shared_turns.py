"""Two replicas share a store: each can continue turns of the other, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "sessions"))

from stores import FORM, MODEL, NODES, Killed, PlainStore, record, same, save

from weir.errors import WeirError
from weir.serve.cluster import SharedTurns, Storage, open_storage, shared_turns, storage
from weir.serve.messages import Call, Message
from weir.serve.sessions.records import NameTaken, StorageFull, TurnRecord
from weir.serve.sessions.store import SessionStore
from weir.serve.sessions.store_format import StoreFormat

FOLDER = shared_turns._folder("me", "s")


@pytest.fixture(params=["folder", "fsspec"])
def shared(request, tmp_path) -> Storage:
    memory = f"memory://{secrets.token_hex(4)}/weir"
    return open_storage(str(tmp_path / "shared") if request.param == "folder" else memory)


class Replicas:
    """Stores of two replicas."""

    def __init__(self, shared: Storage, **given: Any) -> None:
        self.a, self.b = (SessionStore(SharedTurns(shared, FORM, **given)) for _ in "ab")


@pytest.fixture
def replicas(shared) -> Replicas:
    return Replicas(shared)


def turn(store: SessionStore, name: str, n: int = 0, **given: Any) -> TurnRecord:
    """Save a turn that ends on a replica."""
    made = record(name, n, **{"created": float(n), **given})
    error = save(store, made, NODES[n])
    if error is not None:
        raise error
    return made


def test_a_turn_is_gone_on_from_on_another_replica_bit_for_bit(replicas):
    said = (
        Message("user", "hé\ud800 \x00"),
        Message("assistant", "", calls=(Call("c", "f", "{}"),)),
    )
    first = turn(replicas.a, "n0", messages=said)
    assert replicas.b.find_history("me", first.chain) == first
    assert replicas.b.find_turn("me", "n0") == first
    found = replicas.b.load("n0")
    assert found.pending == NODES[0].pending
    assert same(type(NODES[0])(found.state, found.pending), NODES[0])
    second = turn(replicas.b, "n1", 1, parent="n0")
    assert replicas.a.list_turns("me", "s") == [first, second]
    session = replicas.a.get_session("me", "s")
    assert session == replicas.b.get_session("me", "s")
    assert replicas.a.list_sessions("me") == [session]
    assert [stretch.node for stretch in replicas.a.ancestry("me", "n1")][-1] == "n1"


def test_what_is_anothers_is_not_found(replicas):
    first = turn(replicas.a, "n0")
    for store in (replicas.a, replicas.b):
        assert store.find_history("you", first.chain) is None
        assert store.find_turn("you", "n0") is None
        assert store.get_session("you", "s") is None
        assert store.list_sessions("you") == []


def test_replicas_that_answer_one_session_at_once_both_add_to_it(replicas):
    turn(replicas.a, "n0")
    errors, answered = [], threading.Barrier(2)

    def answer(store: SessionStore, name: str) -> None:
        for n in range(1, 4):
            answered.wait()
            made = record(f"{name}{n}", n, parent="n0", chain=f"{n}{name}", created=float(n))
            errors.append(save(store, made, NODES[n]))

    threads = [
        threading.Thread(target=answer, args=(getattr(replicas, name), name)) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None] * 6
    names = {f"{name}{n}" for name in "ab" for n in range(1, 4)} | {"n0"}
    for store in (replicas.a, replicas.b):
        assert {each.node for each in store.list_turns("me", "s")} == names
        for name in sorted(names - {"n0"}):
            found = store.find_history("me", name[::-1])
            assert found is not None and found.node == name
            assert store.load(name).state.facts == NODES[int(name[1])].state.facts
    turn(replicas.a, "n5", 5)
    (session,) = replicas.b.list_sessions("me")
    assert session == replicas.b.get_session("me", "s")
    assert session.turns == 8


def test_what_a_killed_replica_was_writing_goes_later_or_with_its_session(
    replicas, shared, monkeypatch
):
    turn(replicas.a, "n0")
    shared.write(f"{FOLDER}/half.safetensors", b"x")
    turn(replicas.b, "n1", 1)
    assert "half.safetensors" in shared.list_names(FOLDER)  # it may still be being written
    monkeypatch.setattr(shared_turns, "ABANDONED", -1.0)
    turn(replicas.a, "n2", 2)
    assert "half.safetensors" not in shared.list_names(FOLDER)
    monkeypatch.undo()
    shared.write(f"{FOLDER}/half.safetensors", b"x")
    replicas.b.remove_turns("me", "s", ["n0", "n1", "n2"])
    assert [name for name in shared.list_names(FOLDER) if "." in name] == []


def test_a_full_shared_folder_is_known_before_an_answer_and_loses_none(tmp_path, monkeypatch):
    replicas = Replicas(open_storage(str(tmp_path)))
    turn(replicas.a, "n0")
    monkeypatch.setattr(storage, "free_bytes", lambda folder: FORM.turn_bytes() - 1)
    assert replicas.a.is_full()
    size = FORM.turn_bytes()
    said = f"Needed: {size:,} bytes, free: {size - 1:,} bytes"
    with pytest.raises(StorageFull, match=said):
        replicas.a.check_room(size)

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)  # now writing fails
    assert isinstance(save(replicas.a, record("n1", 1), NODES[1]), StorageFull)
    again = Replicas(open_storage(str(tmp_path)))  # a start needs no room
    assert [each.node for each in again.b.list_turns("me", "s")] == ["n0"]
    monkeypatch.undo()
    assert [each.node for each in replicas.a.list_turns("me", "s")] == ["n0"]
    assert len([name for name in os.listdir(tmp_path / FOLDER) if "." in name]) == 2
    replicas.a.check_room(size)


def test_a_storage_that_fails_loses_no_other_turn(replicas, shared, monkeypatch):
    turn(replicas.a, "n0")

    write = shared._write

    def fail(path, data):
        if path.endswith(".json"):  # a record, whose snapshot was already written
            raise OSError(errno.EIO, "Input/output error")
        write(path, data)

    monkeypatch.setattr(shared, "_write", fail)
    error = save(replicas.a, record("n1", 1), NODES[1])
    assert "cannot save the turn: Input/output error" in str(error)
    assert [each.node for each in replicas.b.list_turns("me", "s")] == ["n0"]
    assert shared.list_names(FOLDER) == ["n0.json", "n0.safetensors"]


def test_the_newest_turns_of_a_session_are_kept(shared):
    replicas = Replicas(shared, kept=2)
    made = [
        turn(replicas.a, f"n{n}", n % 6, chain=f"{n:064x}", created=float(n)) for n in range(12)
    ]
    assert replicas.b.list_turns("me", "s") == made[-2:]
    assert replicas.a.list_turns("me", "s") == made[-2:]
    assert replicas.b.find_history("me", made[0].chain) is None
    assert len(shared.list_names(FOLDER)) == 4
    assert len(shared.list_names("owners")) <= 1


def test_a_session_is_rewound_and_deleted_from_any_replica(replicas, shared):
    made = [turn(replicas.a, f"n{n}", n) for n in range(3)]
    assert replicas.b.remove_turns("me", "s", ["n2", "none"]) == ["n2"]
    assert replicas.a.list_turns("me", "s") == made[:2]
    late = replicas.b.load("n1")  # and another replica deletes it before it is read
    assert sorted(replicas.a.remove_turns("me", "s", ["n0", "n1"])) == ["n0", "n1"]
    with pytest.raises(WeirError, match="no longer kept"):
        _ = late.state
    for store in (replicas.a, replicas.b):
        assert store.find_turn("me", "n1") is None
        assert store.get_session("me", "s") is None
        assert store.list_sessions("me") == []
        assert store.find_turn("me", "n0") is None
    assert shared.list_names(FOLDER) == []
    again = turn(replicas.b, "n4", 4)
    assert replicas.a.list_turns("me", "s") == [again]


def test_a_fork_is_a_session_of_its_own(replicas):
    turn(replicas.a, "n0")
    turn(replicas.a, "n1", 1, parent="n0")
    turn(replicas.a, "n2", 2, parent="n0")
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
    with pytest.raises(WeirError, match="the turn does not exist"):
        replicas.a.fork("you", fork.head, "mine")


def test_a_folder_of_another_policy_is_refused(shared):
    Replicas(shared)
    other = StoreFormat.of(MODEL, "recent(6)", 4)
    with pytest.raises(WeirError, match="cannot be used here: its rows are of a cache with policy"):
        SharedTurns(shared, other)


def test_a_shared_file_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []

    def note(name: str) -> None:
        real = getattr(os, name)
        monkeypatch.setattr(storage.os, name, lambda *given: (calls.append(name), real(*given)))

    for name in ("fsync", "replace"):
        note(name)
    shared = open_storage(str(tmp_path))
    shared.write("folder/file", b"x")
    shared.write("folder/file", b"y")
    assert calls == ["fsync", "replace", "fsync"] * 2
    assert shared.read("folder/file") == b"y"
    assert shared.list_names("folder") == ["file"]


@pytest.mark.parametrize("place", ["nothing://x", "s3"])
def test_a_storage_that_is_none_is_refused_or_a_folder(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "://" in place:
        with pytest.raises(WeirError, match="cannot use nothing://x"):
            open_storage(place)
    else:
        open_storage(place)
        assert (tmp_path / place).is_dir()


# --- any course of events


class MortalStorage:
    """A storage as used by a process that is killed after `left` changes."""

    def __init__(self, shared: Storage) -> None:
        self.shared = shared
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        if self.left is not None:
            if self.left <= 0:
                raise Killed
            self.left -= name in ("write", "delete")
        return getattr(self.shared, name)


class Cluster(RuleBasedStateMachine):
    """Two replicas that answer, delete and are killed, compared with a store in memory."""

    @initialize()
    def begin_with_nothing(self) -> None:
        self.shared = open_storage(f"memory://{secrets.token_hex(8)}")
        self.replicas = {name: self.replica() for name in "ab"}
        self.oracle = PlainStore()
        self.count = 0

    def replica(self) -> SessionStore:
        return SessionStore(SharedTurns(MortalStorage(self.shared), FORM, kept=100))

    def make(self, n: int, session: str) -> TurnRecord:
        self.count += 1
        given = {"chain": f"{self.count:064x}", "created": float(self.count)}
        return record(f"n{self.count}", n, session=session, **given)

    @rule(replica=st.sampled_from("ab"), n=st.integers(0, 5), session=st.sampled_from("st"))
    def a_turn_ends(self, replica: str, n: int, session: str) -> None:
        made = self.make(n, session)
        assert save(self.replicas[replica], made, NODES[n]) is None
        self.oracle.save(NODES[n], made)

    @rule(
        replica=st.sampled_from("ab"),
        n=st.integers(0, 5),
        session=st.sampled_from("st"),
        after=st.integers(0, 6),
    )
    def a_replica_is_killed_at_the_end_of_a_turn(
        self, replica: str, n: int, session: str, after: int
    ) -> None:
        made, store = self.make(n, session), self.replicas[replica]
        store.place._storage.left = after
        with contextlib.suppress(Killed):
            store.place.add([(NODES[n], made)])
        self.replicas[replica] = self.replica()
        if any(one.node == made.node for one in self.replicas[replica].list_turns("me", session)):
            self.oracle.save(NODES[n], made)  # it was saved, although no client has seen its end

    @rule(
        replica=st.sampled_from("ab"),
        session=st.sampled_from("st"),
        which=st.sets(st.integers(0, 5)),
    )
    def turns_are_deleted(self, replica: str, session: str, which: set[int]) -> None:
        kept = self.oracle.list_turns("me", session)
        nodes = [kept[n].node for n in which if n < len(kept)]
        gone = self.replicas[replica].remove_turns("me", session, nodes)
        assert sorted(gone) == sorted(self.oracle.remove_turns("me", session, nodes))

    @invariant()
    def replicas_have_what_the_oracle_has(self) -> None:
        for store in self.replicas.values():
            for session in "st":
                wanted = self.oracle.list_turns("me", session)
                assert store.list_turns("me", session) == wanted
                for made in wanted:
                    found = store.load(made.node)
                    assert same(
                        type(NODES[0])(found.state, found.pending), self.oracle.load(made.node)
                    )
                    assert store.find_history("me", made.chain) == made


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    settings.get_profile("weir"), max_examples=12, stateful_step_count=15
)
