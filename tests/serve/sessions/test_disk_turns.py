"""Turns that the store on disk reported as saved survive killed processes and disk errors."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bare_record import bare_record
from reference.naive import make_llama
from stores import CHUNK, MODEL, NODES, POLICY, has, kept, kill, record, same, store

from weir.errors import WeirError
from weir.models import fingerprint
from weir.policies import format_policy_file
from weir.serve import Engine, Sampler, SamplingParams, SessionStore, TokenSequence
from weir.serve.sessions import snapshot_folder as folder_file
from weir.serve.sessions.store_format import StoreFormat


def files(folder: Path) -> list[Path]:
    return sorted((folder / "nodes").iterdir())


def test_what_was_put_is_there_when_the_folder_is_opened_again(tmp_path):
    with store(tmp_path) as first:
        for n, node in enumerate(NODES):
            assert kept(first, f"n{n}", node) is None
        assert all(has(first, f"n{n}", node) for n, node in enumerate(NODES))
        held = first.place.nbytes
    with store(tmp_path) as again:
        assert all(has(again, f"n{n}", node) for n, node in enumerate(NODES))
        assert again.place.nbytes == held == sum(file.stat().st_size for file in files(tmp_path))
        again.drop("n1")
        again.drop("nobody")
        assert not has(again, "n1", NODES[1])
        assert again.place.nbytes < held
    with store(tmp_path) as again:
        assert not has(again, "n1", NODES[1])
        assert has(again, "n2", NODES[2])
    assert len(files(tmp_path)) == 5


def test_a_node_under_the_name_of_another_takes_its_place(tmp_path):
    with store(tmp_path) as one:
        kept(one, "n", NODES[0])
        kept(one, "n", NODES[1])
        assert has(one, "n", NODES[1])
        assert one.place.nbytes == files(tmp_path)[0].stat().st_size
    assert len(files(tmp_path)) == 1


def test_who_saves_too_much_waits_and_nothing_is_there_before_it_is_safe(tmp_path, monkeypatch):
    go, writing = threading.Event(), threading.Event()
    with store(tmp_path, queue=2) as one:
        write = one.place._files.write

        def slow(*given):
            writing.set()
            assert go.wait(60)
            write(*given)

        monkeypatch.setattr(one.place._files, "write", slow)
        told = []
        for n in range(2):
            one.save(NODES[n], record(f"n{n}", n), told.append)
        third = threading.Thread(target=one.save, args=(NODES[2], record("n2", 2), told.append))
        third.start()
        assert writing.wait(60)
        third.join(0.05)
        assert third.is_alive()
        assert not told
        assert not any(has(one, f"n{n}", NODES[n]) for n in range(3))
        go.set()
        third.join(60)
    assert told == [None, None, None]
    with store(tmp_path) as again:
        assert all(has(again, f"n{n}", NODES[n]) for n in range(3))


def test_a_turn_is_there_only_when_its_file_is_safe(tmp_path, monkeypatch):
    calls = []

    class Noting:
        """An `os` that records changes to the disk, and whether the turn is visible yet."""

        def __getattr__(self, name):
            real = getattr(os, name)
            if name not in ("write", "fsync", "rename"):
                return real

            def call(*given, **named):
                calls.append((name, has(one, "n0", NODES[0])))
                return real(*given, **named)

            return call

    with store(tmp_path) as one:
        monkeypatch.setattr(folder_file, "os", Noting())
        assert kept(one, "n0", NODES[0]) is None
        monkeypatch.undo()
        assert has(one, "n0", NODES[0])
    assert calls == [(name, False) for name in ("write", "fsync", "rename", "fsync")]


def test_nothing_is_kept_after_the_end(tmp_path):
    one = store(tmp_path)
    one.close()
    one.close()
    assert "closed" in str(kept(one, "n", NODES[0]))


def test_one_server_at_a_time(tmp_path):
    with store(tmp_path), pytest.raises(WeirError, match="in use by another server"):
        store(tmp_path)
    store(tmp_path).close()


def test_what_was_used_longest_ago_goes_at_the_limit(tmp_path):
    with store(tmp_path / "all") as one:
        kept(one, "n", NODES[0])
        size = one.place.nbytes + 200
    with store(tmp_path / "some", limit=3 * size) as one:
        for n in range(3):
            kept(one, f"n{n}", NODES[n])
        one.load("n0")
        kept(one, "n3", NODES[3])
        assert [has(one, f"n{n}", NODES[n]) for n in range(4)] == [True, False, True, True]
        one.load("n2")
    assert len(files(tmp_path / "some")) == 3
    with store(tmp_path / "some", limit=2 * size) as one:  # the times of the last use were saved
        kept(one, "n4", NODES[4])
        assert [has(one, f"n{n}", NODES[n]) for n in range(5)] == [False, False, True, False, True]
        assert one.place.nbytes <= 2 * size
    with store(tmp_path / "none", limit=100) as one:
        assert "one turn takes" in str(kept(one, "n", NODES[0]))


# --- a disk that is full


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_full_disk_refuses_a_node_and_loses_none(tmp_path, monkeypatch, call):
    with store(tmp_path, limit=10**9) as one:
        kept(one, "n0", NODES[0])

        def full(*given, **named):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(folder_file.os, call, full)
        error = kept(one, "n1", NODES[1])
        monkeypatch.undo()
        assert isinstance(error, WeirError) and "is full" in str(error)
        assert has(one, "n0", NODES[0]) and not has(one, "n1", NODES[1])
        assert len(files(tmp_path)) == 1
        assert kept(one, "n1", NODES[1]) is None
        assert has(one, "n1", NODES[1])


def test_a_full_disk_is_remembered_whatever_fails_next(tmp_path, monkeypatch):
    """A quota can refuse bytes that are reported as free, until `has_room` can reserve them."""

    def failing(number: int):
        def fail(*given, **named):
            raise OSError(number, os.strerror(number))

        return fail

    folder = folder_file.SnapshotFolder(tmp_path / "nodes")
    monkeypatch.setattr(folder_file.os, "posix_fallocate", failing(errno.EDQUOT), raising=False)
    assert folder.has_room(1)  # no write has failed, so the free bytes are trusted
    for number in (errno.EDQUOT, errno.EIO):
        monkeypatch.setattr(folder_file.os, "fsync", failing(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            folder.write(folder_file.new_name(), b"x")
        assert not folder.has_room(1)
    monkeypatch.undo()
    assert folder.has_room(1)
    folder.close()
    assert files(tmp_path) == []


def test_tables_that_cannot_be_written_refuse_a_node_and_lose_none(tmp_path):
    with store(tmp_path) as one:
        kept(one, "n0", NODES[0])
        pages = one.place.db._writer.execute("PRAGMA page_count").fetchone()[0]
        one.place.db._writer.execute(f"PRAGMA max_page_count = {pages}")
        errors = [kept(one, f"{n:05}" * 200, NODES[1]) for n in range(60)]
        errors = [error for error in errors if error is not None]
        assert errors and all("is full" in str(error) for error in errors)
        assert len(files(tmp_path)) == 61 - len(errors)
        assert has(one, "n0", NODES[0])
        one.place.db._writer.execute("PRAGMA max_page_count = 1000000")
        assert kept(one, "n1", NODES[1]) is None


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Yield a folder on a small separate disk."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs a small disk")
    made = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(made, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full(tmp_path):
    with small_disk(tmp_path, "2m"):
        with store(tmp_path) as one:
            told = {n: kept(one, f"n{n}", NODES[n % 6]) for n in range(200)}
            safe = [n for n, error in told.items() if error is None]
            assert 9 < len(safe) < 200
            assert any("is full" in str(error) for error in told.values())
            assert all(has(one, f"n{n}", NODES[n % 6]) == (n in safe) for n in told)
        with store(tmp_path) as one:
            assert all(has(one, f"n{n}", NODES[n % 6]) == (n in safe) for n in told)
            for n in safe[:9]:
                one.drop(f"n{n}")
            assert kept(one, "new", NODES[0]) is None
        with store(tmp_path) as one:
            assert all(has(one, f"n{n}", NODES[n % 6]) == (n in safe[9:]) for n in told)
            assert has(one, "new", NODES[0])


def test_old_turns_make_room_on_a_disk_without_a_byte(tmp_path):
    with small_disk(tmp_path, "8m"), store(tmp_path, limit=10**9) as one:
        for n in range(99):
            assert kept(one, f"n{n}", NODES[n % 6]) is None
        with contextlib.suppress(OSError), (tmp_path / "filler").open("wb", 0) as file:
            while True:
                file.write(bytes(2**12))
        assert has(one, "n0", NODES[0])  # no disk space is left to record that it was used
        assert one.place.make_room(one.place.turn_bytes(), keep=9)
        assert kept(one, "new", NODES[0]) is None
        left = [n for n in range(99) if has(one, f"n{n}", NODES[n % 6])]
        assert left[0] == 0 and left[-8:] == [*range(91, 99)] and 1 not in left


# --- damage to the folder


def spoil_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def spoil_long(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(2**40)


def spoil_link(path: Path) -> None:
    copy = path.parent / "elsewhere"
    path.rename(copy)
    path.symlink_to(copy)


def spoil_gone(path: Path) -> None:
    path.unlink()


def spoil_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def spoil_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILS = [spoil_half, spoil_bit, spoil_long, spoil_link, spoil_gone, spoil_pipe, spoil_folder]


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("running", [True, False])
def test_a_damaged_file_is_refused_by_name_and_all_others_go_on(tmp_path, caplog, spoil, running):
    one = store(tmp_path)
    kept(one, "n0", NODES[0])
    (path,) = files(tmp_path)
    kept(one, "n1", NODES[1])
    if not running:
        one.close()
    spoil(path)
    if not running:
        with caplog.at_level(logging.WARNING):
            one = store(tmp_path)
    if running or spoil is spoil_bit:
        node = one.load("n0")
        sentence = "no longer kept" if spoil is spoil_gone else "turn 'n0' cannot be continued"
        with caplog.at_level(logging.WARNING), pytest.raises(WeirError, match=sentence):
            _ = node.state
    if not (running and spoil is spoil_gone):
        assert "turn 'n0'" in caplog.text
    assert not has(one, "n0", NODES[0])
    assert has(one, "n1", NODES[1])
    assert kept(one, "n0", NODES[2]) is None
    assert has(one, "n0", NODES[2])
    one.close()


def test_files_without_a_row_go_at_the_start_and_foreign_ones_stay(tmp_path):
    with store(tmp_path) as one:
        kept(one, "n0", NODES[0])
    stray = [f"{'a' * 32}.safetensors", f"{'b' * 32}.part"]
    for name in [*stray, "mine.safetensors", ".."[:1] + "dots"]:
        (tmp_path / "nodes" / name).write_bytes(b"x")
    with store(tmp_path) as one:
        assert has(one, "n0", NODES[0])
        assert one.place.nbytes == max(path.stat().st_size for path in files(tmp_path))
    left = {path.name for path in files(tmp_path)}
    assert not left & set(stray)
    assert {"mine.safetensors", ".dots"} < left and len(left) == 3


@pytest.mark.parametrize("name", ["../weir.db", "/etc/passwd", ".", "", "a" * 32, "\x00"])
def test_no_row_opens_a_file_elsewhere(tmp_path, name):
    with store(tmp_path) as one:
        kept(one, "n0", NODES[0])
    with sqlite3.connect(tmp_path / "weir.db") as db:
        db.execute("UPDATE nodes SET file = ?, bytes = 5", (name,))
    db.close()
    with store(tmp_path) as one:
        assert not has(one, "n0", NODES[0])
        with pytest.raises(WeirError, match="not a file name of a store"):
            one.place._files.read(name, 5)
    assert (tmp_path / "weir.db").exists()


def test_names_are_never_parts_of_a_path(tmp_path):
    names = ["../../x", "/x", ".", "..", "", "a\x00b", "x" * 5000, "nodes/../../y"]
    with store(tmp_path / "in") as one:
        for name in names:
            assert kept(one, name, NODES[0]) is None
        assert all(has(one, name, NODES[0]) for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("model", "policy", "chunk", "sentence"),
    [
        (
            MODEL,
            "sink(2) | recent(7)",
            CHUNK,
            r"with policy 'sink\(2\) \| recent\(6\)', but this cache has",
        ),
        (MODEL, POLICY, 8, "with chunk 4, but this cache has 8"),
        (make_llama(layers=2), POLICY, CHUNK, "another model .layers 1, here 2"),
        (make_llama(layers=1, seed=3), POLICY, CHUNK, "another model .weights"),
    ],
)
def test_a_store_of_another_model_or_policy_is_refused(tmp_path, model, policy, chunk, sentence):
    with store(tmp_path) as one:
        kept(one, "n0", NODES[0])
    for _ in range(2):
        with pytest.raises(WeirError, match=sentence):
            store(tmp_path, StoreFormat.of(model, policy, chunk))
    with store(tmp_path, StoreFormat.of(MODEL, "streaming_llm(8, sinks=2)", CHUNK)) as one:
        # The same policy in another spelling.
        assert one.load("n0").state.facts == NODES[0].state.facts


def test_without_a_chunk_engine_and_store_take_that_of_the_policy_file(tmp_path):
    layers = [{"policy": POLICY}]
    file = tmp_path / "measured.toml"
    file.write_text(format_policy_file({"chunk": 8}, fingerprint(MODEL), layers))
    for policy, chunk in ((str(file), 8), (POLICY, 64)):
        folder = tmp_path / str(chunk)
        with store(folder, StoreFormat.of(MODEL, policy, None)) as one:
            engine = Engine(MODEL, policy, 1, one)
            assert engine.cache.chunk == chunk
            answers(engine, "a", None, [1, 2, 3])
            named = one.load("a").state.facts
        with store(folder, StoreFormat.of(MODEL, policy, chunk)) as one:
            assert one.load("a").state.facts == named
        with pytest.raises(WeirError, match=f"with chunk {chunk}, but this cache has {CHUNK}"):
            store(folder, StoreFormat.of(MODEL, policy, CHUNK))
        assert Engine(MODEL, policy, 1, SessionStore(), chunk=CHUNK).cache.chunk == CHUNK


def test_a_store_whose_policy_stood_for_other_pools_is_refused(tmp_path):
    with store(tmp_path, StoreFormat.of(MODEL, "centers(24, quiet=3)", CHUNK)) as one:
        was = one.place.store_format
    now = StoreFormat.of(MODEL, "centers(24)", CHUNK)
    renamed = {"model": was.model, "kind": {**was.rows.kind, "policy": "centers(24)"}}
    with pytest.raises(WeirError, match=r"quiet=3.* this cache has .*quiet=2"):
        now.check(renamed)
    was.check(renamed)  # the same pools under another name
    with pytest.raises(WeirError, match="rows are of a cache with policy"):
        now.check({"model": now.model, "kind": {**now.rows.kind, "pools": None}})


def test_a_folder_that_is_none_of_ours_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WeirError, match="file is not a folder"):
        store(tmp_path / "file")
    with store(tmp_path / "a") as one:
        kept(one, "n0", NODES[0])
    for end in ("", "-wal", "-shm"):
        (tmp_path / "a" / f"weir.db{end}").unlink(missing_ok=True)
    for _ in range(2):
        with pytest.raises(WeirError, match="snapshots, but not the tables"):
            store(tmp_path / "a")
    for spoiled in (b"no database" * 1000, b""):
        (tmp_path / "a" / "weir.db").write_bytes(spoiled)
        with pytest.raises(WeirError, match=r"is damaged|not the tables"):
            store(tmp_path / "a")
    assert len(files(tmp_path / "a")) == 1
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "nodes").symlink_to(tmp_path / "a" / "nodes")
    with pytest.raises(WeirError, match="b/nodes must be a folder, not a file or a link"):
        store(tmp_path / "b")
    (tmp_path / "b" / "nodes").unlink()
    (tmp_path / "b" / "nodes").write_text("x")
    with pytest.raises(WeirError, match="b/nodes must be a folder, not a file or a link"):
        store(tmp_path / "b")
    assert (tmp_path / "b" / "nodes").read_text() == "x"
    (tmp_path / "c" / "lock").mkdir(parents=True)
    with pytest.raises(WeirError, match=r"cannot use .*c/lock: Is a directory"):
        store(tmp_path / "c")
    (tmp_path / "c" / "lock").rmdir()
    (tmp_path / "c" / "weir.db").symlink_to(tmp_path / "file")
    with pytest.raises(WeirError, match="not an ordinary file"):
        store(tmp_path / "c")
    assert (tmp_path / "file").read_text() == "x"


def test_a_database_of_another_version_is_refused_by_name(tmp_path):
    store(tmp_path).close()
    with sqlite3.connect(tmp_path / "weir.db") as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    with pytest.raises(WeirError, match=r"weir\.db has version 1, .* weir reads 3"):
        store(tmp_path)


def test_only_its_owner_reads_a_store(tmp_path):
    with store(tmp_path / "a") as one:
        kept(one, "n0", NODES[0])
        # Including SQLite's logs, which exist while it is open.
        tables = sorted((tmp_path / "a").glob("weir.db*"))
        assert len(tables) == 3
        its = [tmp_path / "a", *files(tmp_path / "a"), *tables]
        assert [path.stat().st_mode & 0o077 for path in its] == [0] * 5


# --- with an engine


class Heard:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.over = threading.Event()
        self.error: Exception | None = None

    def on_token(self, token):
        self.tokens.append(token.id)

    def on_finish(self, reason):
        self.over.set()

    def on_failure(self, error):
        self.error = error
        self.over.set()


def answers(engine: Engine, name: str, start: str | None, ids: list[int]) -> list[int]:
    heard = Heard()
    engine.submit(
        TokenSequence(
            name, start, ids, 6, frozenset(), Sampler(SamplingParams()), heard, record=bare_record
        )
    )
    for _ in range(1000):
        engine.step()
        if heard.over.wait(0.01):
            break
    assert heard.error is None, heard.error
    return heard.tokens


def test_after_a_restart_an_engine_goes_on_as_one_that_never_stopped(tmp_path):
    def engine(its) -> Engine:
        return Engine(MODEL, POLICY, 1, its, chunk=CHUNK, prefill_chunk=5)

    memory = engine(SessionStore())
    told = [("a", None, [1, 2, 3, 4, 5, 6, 7]), ("b", "a", [8, 9]), ("c", "a", [10] * 9)]
    told += [("d", "b", [3]), ("e", "c", [5, 6])]
    wanted = [answers(memory, *each) for each in told]
    found = []
    for each in told:
        with store(tmp_path) as its:
            found.append(answers(engine(its), *each))
    assert found == wanted
    with store(tmp_path) as its:
        for name, *_ in told:
            assert same(its.load(name), memory.store.load(name))


def test_a_row_that_stands_where_a_turn_starts_is_not_read_from_disk(tmp_path, monkeypatch):
    with store(tmp_path) as its:
        served = Engine(MODEL, POLICY, 2, its, chunk=CHUNK)
        answers(served, "a", None, [1, 2, 3])
        monkeypatch.setattr(its.place, "_read", None)
        answers(served, "b", "a", [4])


# --- killed


ROUNDS = int(os.environ.get("WEIR_KILLS", "3"))
"""How often a process is killed while it writes. Use 50 for a long run."""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_it_said_is_safe(tmp_path):
    script = Path(__file__).with_name("putting.py")
    command = [sys.executable, str(script), str(tmp_path)]
    pipe = subprocess.PIPE
    safe: dict[str, int] = {}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in range(ROUNDS):
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            said, pid = process.stdout.readline().split()
            assert said == "pid"
            lines = [process.stdout.readline() for _ in range(3 + 7 * number % 11)]
            # Kill it at some moment during the next writes.
            threading.Event().wait(torch.rand(()).item() * 0.03)
            os.kill(int(pid), signal.SIGKILL)
            while not (line := process.stdout.readline()).startswith("dead"):
                lines.append(line)
            told = (line.split() for line in lines)
            safe |= {name: int(n) for name, n in told}
            check_all_is_there(tmp_path, safe)
        process.stdin.close()


def check_all_is_there(folder: Path, safe: dict[str, int]) -> None:
    """Check that all nodes reported as safe can be loaded, and that no stray file is left."""
    with store(folder) as one:
        assert all(has(one, name, NODES[n]) for name, n in safe.items())
        known = [row["name"] for row in one.place.db.query("SELECT name FROM nodes")]
        for name in known:
            assert one.load(name).state  # every node can be read
        assert len(known) == len(files(folder))
        assert {path.suffix for path in files(folder)} == {".safetensors"}


def test_a_killed_shelf_lets_go_of_its_folder(tmp_path):
    one = store(tmp_path)
    kept(one, "n0", NODES[0])
    kill(one)
    with store(tmp_path) as again:
        assert has(again, "n0", NODES[0])
