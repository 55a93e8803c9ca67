"""Turns are visible to their owner only, and a store on disk behaves like one in memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference.naive import make_llama
from safetensors import safe_open
from safetensors.torch import save_file
from stores import (
    CHUNK,
    FORM,
    NODES,
    POLICY,
    Cut,
    PlainStore,
    has,
    kill,
    pack,
    record,
    same,
    save,
    store,
    unpack,
)

from weir.errors import WeirError
from weir.serve.messages import Message, ResultPlace
from weir.serve.sessions import export
from weir.serve.sessions import snapshot_folder as folder_file
from weir.serve.sessions.records import SessionSummary, TurnRecord, pack_ids, unpack_ids
from weir.serve.sessions.store import SessionStore
from weir.serve.sessions.store_format import StoreFormat

# Threads of processes that the tests kill can end with an exception.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def saved(its: SessionStore, name: str, n: int = 0, **given: Any) -> TurnRecord:
    """Save a turn as the engine and its client do, and return its record."""
    made = record(name, n, **given)
    assert save(its, made, NODES[n]) is None
    return made


def test_records_are_found_again_as_they_were(tmp_path):
    with store(tmp_path) as its:
        first = saved(its, "a")
        # Created earlier than its parent, as if the clock had been set back.
        second = saved(its, "b", 1, parent="a", created=2.0)
        other = saved(its, "c", 2, session="t", chain=second.chain)
    with store(tmp_path) as its:
        assert its.find_turn("me", "a") == first
        assert its.find_history("me", first.chain) == first
        assert its.find_history("me", second.chain) == other  # the newest
        known = (first.created, 2.0, second.seen, second.usage, "hé? 1\x00")
        assert its.get_session("me", "s") == SessionSummary("s", "b", 2, *known)
        assert [each.id for each in its.list_sessions("me")] == ["s", "t"]
        its.load("a")
        assert [each.id for each in its.list_sessions("me")] == ["t", "s"]
    with store(tmp_path) as its:
        assert [each.id for each in its.list_sessions("me")] == ["t", "s"]
        its.drop("c")
        assert its.find_history("me", second.chain) == second
        assert its.get_session("me", "t") is None


def test_what_is_anothers_is_as_what_never_was(tmp_path):
    with store(tmp_path) as its:
        mine = saved(its, "a")
        saved(its, "b", 1, parent="a", owner="you")
        for owner in ("you", "", "ME", "me ", "\ud800", "' OR 1=1 --", "%"):
            assert its.find_turn(owner, "a") is None
            assert its.find_history(owner, mine.chain) is None
            assert owner == "you" or (its.list_sessions(owner), its.get_session(owner, "s")) == (
                [],
                None,
            )
            assert its.remove_turns(owner, "s", ["a"]) == its.list_turns(owner, "t") == []
            for name in ("a", "s", ""):
                with pytest.raises(WeirError, match=r"the turn does not exist|is not valid text"):
                    its.fork(owner, name, "u")
        for unknown in ("", "\ud800", "../a", "a\x00", "%"):
            assert its.find_turn("me", unknown) is its.find_history("me", unknown) is None
            assert its.get_session("me", unknown) is None
        assert its.find_turn("me", "a") == mine
        assert its.remove_turns("me", "s", ["b", "\ud800"]) == []
        assert its.remove_turns("me", "s", ["a", "b"]) == ["a"]
        # A deleted turn takes only turns of the same owner with it.
        assert its.find_turn("you", "b") is not None


def test_the_tokens_of_a_stream_are_told_as_far_back_as_its_turns_line_up(tmp_path):
    with store(tmp_path) as disk:
        for its in (disk, SessionStore()):
            for name, parent, seen, ids in [
                ("a", None, 5, [1, 2, 3, 4, 5]),
                ("b", "a", 8, [6, 7, 2**20]),
                ("c", "b", 9, [9]),
                ("other", "a", 6, [9]),
                ("gap", "b", 9, []),  # from a store that did not save token ids
                ("on", "gap", 11, [1, 2]),
                ("wrong", "a", 9, [1, 2]),
            ]:
                made = record(name, parent=parent, seen=seen, ids=pack_ids(ids))
                assert save(its, made, NODES[0]) is None
            told = [(each.start, unpack_ids(each.ids).tolist()) for each in its.ancestry("me", "c")]
            assert told == [(0, [1, 2, 3, 4, 5]), (5, [6, 7, 2**20]), (8, [9])]
            assert [each.node for each in its.ancestry("me", "other")] == ["a", "other"]
            assert [each.node for each in its.ancestry("me", "on")] == ["gap", "on"]
            assert [each.node for each in its.ancestry("me", "wrong")] == ["wrong"]
            assert its.ancestry("you", "c") == its.ancestry("me", "\ud800") == []
            its.drop("a")
            assert [each.node for each in its.ancestry("me", "c")] == ["b", "c"]


def both(folder: Path) -> Iterator[SessionStore]:
    """Yield a store on disk, then one in memory, each with a session whose turns form a tree."""
    with store(folder) as disk:
        for its in (disk, SessionStore()):
            for n, (name, parent) in enumerate([("a", None), ("b", "a"), ("c", "b"), ("d", "a")]):
                saved(its, name, n, parent=parent)
            yield its


def names(its: SessionStore, session: str) -> list[str]:
    """List the ids of the turns in one of my sessions."""
    return [each.node for each in its.list_turns("me", session)]


def test_a_fork_shares_what_came_before_and_outlives_where_it_came_from(tmp_path):
    for its in both(tmp_path):
        assert its.fork("me", "c", "t") == its.get_session("me", "t")
        assert (names(its, "s"), names(its, "t")) == (list("abcd"), list("abc"))
        with pytest.raises(WeirError, match="a session with this name already exists"):
            its.fork("me", "a", "s")
        saved(its, "e", 4, parent="c", session="t")
        found = its.get_session("me", "t")
        assert found is not None and (found.turns, found.head) == (4, "e")
        assert [each.session for each in its.list_turns("me", "t")] == ["s", "s", "s", "t"]
        assert its.remove_turns("me", "s", names(its, "s")) == ["d"]
        assert its.get_session("me", "s") is None and not has(its, "d", NODES[3])
        assert [each.session for each in its.list_turns("me", "t")] == ["t"] * 4
        assert has(its, "a", NODES[0])
        assert sorted(its.remove_turns("me", "t", "abce")) == list("abce")
        assert its.list_sessions("me") == []


def test_a_dropped_turn_leaves_all_its_sessions(tmp_path):
    for its in both(tmp_path):
        its.fork("me", "c", "t")
        its.drop("b")
        assert (names(its, "s"), names(its, "t")) == (list("acd"), list("ac"))
        assert its.fork("me", "c", "u").turns == 1  # the link to the turns before it is gone


def test_a_turn_whose_record_is_refused_is_not_kept_at_all(tmp_path):
    with store(tmp_path) as its:
        saved(its, "b", 1)
        error = save(its, record("a", session="\ud800"), NODES[0])
        assert isinstance(error, WeirError) and "is not valid text" in str(error)
        assert its.find_turn("me", "a") is None
        assert not has(its, "a", NODES[0])
        (path,) = (tmp_path / "nodes").iterdir()
        assert its.place.nbytes == path.stat().st_size


def test_a_checkpoint_without_a_record_goes_at_the_start(tmp_path):
    with store(tmp_path) as its:
        saved(its, "a")
        saved(its, "b", 1)
        with its.place.changing() as db:
            db.execute("DELETE FROM records WHERE node = 'a'")
    with store(tmp_path) as its:
        assert not has(its, "a", NODES[0]) and has(its, "b", NODES[1])
    assert len(list((tmp_path / "nodes").iterdir())) == 1


def test_sessions_used_longest_ago_go_at_the_limit(tmp_path):
    with store(tmp_path / "a") as its:
        saved(its, "x")
        size = its.place.nbytes + 200
    with store(tmp_path / "b", limit=2 * size) as its:
        saved(its, "a", session="a")
        saved(its, "b", session="b")
        its.load("a")
        saved(its, "c", session="c")
        assert [each.id for each in its.list_sessions("me")] == ["a", "c"]


def test_a_damaged_turn_is_not_found_again(tmp_path):
    with store(tmp_path) as its:
        made = saved(its, "a")
        (path,) = (tmp_path / "nodes").iterdir()
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(WeirError, match="turn 'a' cannot be continued"):
            _ = its.load("a").state
        assert its.find_history("me", made.chain) is None


def test_a_turn_in_memory_finds_what_its_parents_on_disk_have_read(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    def read(name: str, number: int, parent: str | None) -> ResultPlace:
        """Save a turn that has read the result of a call, and return the place of the result."""
        place = ResultPlace(10 * number, 10 * number + 5, f"{number + 7:064x}")
        question = Message("user", f"The code of vault {number} is 4821{number}.")
        result = Message("tool", f"text {number}", result=f"call_{number}", where=place)
        saved(its, name, number, parent=parent, messages=(question, result))
        return place

    with store(tmp_path, keep=3) as its:
        its.place.open_archive(10**6)
        first, second = read("a", 0, None), read("b", 1, "a")
        monkeypatch.setattr(its.place._files, "write", full)
        third, fourth = read("c", 2, "b"), read("d", 3, "c")
        assert [turn.node for turn in its._memory.list_all()] == ["c", "d"]
        every = [fourth, third, second, first]
        assert [place for _, place in its.list_results("me", "d")] == every
        assert its.list_results("me", "d", most=3) == its.list_results("me", "d")[:3]
        assert its.list_results("me", "d", "call_0") == [("call_0", first)]
        assert its.list_results("you", "d") == []
        found = [its.read_result("me", "d", place.chain) for place in every]
        assert [one and one.content for one in found] == [f"text {n}" for n in (3, 2, 1, 0)]
        said = [one.text for one in its.search_archive("me", "d", "What is the code of vault 1?")]
        assert "The code of vault 1 is 48211." in said
        counted = its.count_archived("me", "b")
        assert its.count_archived("me", "d") == its.count_archived("me", "c") == counted > 0
        assert its.archive is not None and its.archive.count_turns("me", "d") == 0
        assert its.count_archived("me", "none") == its.count_archived("you", "d") == 0
        for place in (first, fourth):
            its.drop_result("me", place.chain)
        assert sorted(its.dropped_places("me", "d")) == [first[:2], fourth[:2]]
        assert its.dropped_places("me", "b") == [first[:2]]
        monkeypatch.undo()
        saved(its, "e", 4, parent="d")
        assert its._memory.list_all() == []
        assert [place for _, place in its.list_results("me", "e")] == every
        assert sorted(its.dropped_places("me", "e")) == [first[:2], fourth[:2]]


# --- sessions that travel


def exported(folder: Path) -> Path:
    with store(folder / "one") as its:
        saved(its, "a", 0)
        saved(its, "b", 1, parent="a")
        saved(its, "c", 2, parent="a", owner="you")
        assert pack(its, "me", "s", folder / "file") == 2
    return folder / "file"


def test_a_session_travels(tmp_path):
    path = exported(tmp_path)
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["file"]
    with store(tmp_path / "two") as its:
        first, again = unpack(its, "you", path), unpack(its, "you", path)
        turns = {each.node for one in (first, again) for each in its.list_turns("you", one.id)}
        assert first.id != again.id and len(turns - {"a", "b"}) == 4
        assert its.list_sessions("me") == []
    with store(tmp_path / "two") as its:
        for session in (first, again):
            assert its.get_session("you", session.id) == session
            found = its.list_turns("you", session.id)
            for n, each in enumerate(found):
                assert same(its.load(each.node), NODES[n])
                parent = found[0].node if n else None
                wanted = record(each.node, n, owner="you", session=session.id, parent=parent)
                assert each == wanted


def test_a_session_that_does_not_fit_is_refused_and_others_stay(tmp_path):
    path = exported(tmp_path)
    with store(tmp_path / "two", limit=path.stat().st_size * 3 // 4) as its:
        saved(its, "a")
        with pytest.raises(WeirError, match="for all sessions"):
            unpack(its, "me", path)
        assert has(its, "a", NODES[0])
    with store(tmp_path / "three", limit=path.stat().st_size) as its:
        saved(its, "a")
        assert unpack(its, "me", path).turns == 2
        assert its.find_turn("me", "a") is None


def test_a_full_disk_refuses_a_session_whole(tmp_path, monkeypatch):
    path = exported(tmp_path)
    with store(tmp_path / "two") as its:
        write, count = its.place._files.write, itertools.count()

        def full(*given):
            if next(count):
                raise OSError(28, "No space left on device")
            write(*given)

        monkeypatch.setattr(its.place._files, "write", full)
        with pytest.raises(WeirError, match="is full"):
            unpack(its, "me", path)
        assert its.list_sessions("me") == []
    assert not list((tmp_path / "two" / "nodes").iterdir())


def lie(path: Path, *place: Any, to: Any) -> None:
    """Change a value in a session file, and recompute the checksums of what was changed."""
    with safe_open(path, framework="pt") as file:
        said = json.loads(file.metadata()[export.KEY])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    at: Any = said
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = to
    save_file(tensors, path, metadata={export.KEY: json.dumps(said)})


TURN = ("turns", 1)
CALLED = ["user", "x", None]
LIES = [
    ("it has the format 1", (("format",), 1)),
    ("turns must be a list", (("turns",), {})),
    ("it has no turns", (("turns",), [])),
    (r"turns\[1\]: last must be a token id from 0 to 60", ((*TURN, "last"), 61)),
    (r"turns\[1\]: it is the end of another turn", ((*TURN, "last"), 7)),
    (r"turns\[1\]: it does not end where", ((*TURN, "seen"), 7)),
    (r"turns\[1\].seen must be", ((*TURN, "seen"), -1)),
    (r"turns\[1\].chain must be a text that fits", ((*TURN, "chain"), "../x")),
    (r"turns\[1\].node must be a text", ((*TURN, "node"), 3)),
    (r"turns\[1\]: another turn has the same name", ((*TURN, "node"), "a")),
    (r"turns\[1\].parent must be a text", ((*TURN, "parent"), [])),
    (r"turns\[1\]: it comes before the turn that it continues", ((*TURN, "parent"), "b")),
    (
        r"turns\[1\].messages\[0\] must be a list of 3 or 6 or 7 parts",
        ((*TURN, "messages", 0), ["user"]),
    ),
    (r"messages\[0\].role must be", ((*TURN, "messages", 0, 0), "root")),
    (r"messages\[0\].content must be", ((*TURN, "messages", 0, 1), None)),
    (r"messages\[0\].calls\[0\] must", ((*TURN, "messages", 0), [*CALLED, [["x"]], None, 0])),
    (r"messages\[0\].place must", ((*TURN, "messages", 0), [*CALLED, [], "x", -1])),
    (r"usage.bytes must be", ((*TURN, "usage", "bytes"), 1e9)),
    (r"usage must be an object", ((*TURN, "usage"), [1])),
    (r"created must be a finite number", ((*TURN, "created"), float("nan"))),
    (r"turns\[1\].created must be", ((*TURN, "created"), 10**400)),
    (r"turns\[1\]: ids must be a token id from 0 to 60", ((*TURN, "ids", 0), 61)),
    (r"turns\[1\]: it has more tokens than its stream", ((*TURN, "ids"), [1] * 99)),
    (r"turns\[1\]: it is damaged", ((*TURN, "sha256"), "0" * 64)),
    (r"unexpected field 'owner' in turns\[1\]", ((*TURN, "owner"), "you")),
]


@pytest.mark.parametrize(("sentence", "lied"), LIES)
def test_a_file_that_lies_is_refused_and_nothing_of_it_is_kept(tmp_path, sentence, lied):
    path, (place, to) = exported(tmp_path), lied
    lie(path, *place, to=to)
    with store(tmp_path / "two") as its:
        with pytest.raises(WeirError, match=sentence) as error:
            unpack(its, "me", path)
        assert str(path) not in str(error.value) and "\n" not in str(error.value)
        assert its.list_sessions("me") == []
    assert not list((tmp_path / "two" / "nodes").iterdir())


def forged(path: Path, change: Any) -> None:
    """Write a file whose snapshot is changed and has a correct checksum."""
    with safe_open(path, framework="pt") as file:
        said = json.loads(file.metadata()[export.KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    data = change(tensors["1"].numpy().tobytes())
    said["turns"][1]["sha256"] = hashlib.sha256(data).hexdigest()
    tensors["1"] = torch.tensor(list(data), dtype=torch.uint8)
    save_file(tensors, path.with_suffix(".new"), metadata={export.KEY: json.dumps(said)})
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    ("renamed", "sentence"),
    [
        ({"1": "2"}, r"'1' of turns\[1\] is missing, and the checkpoint '2' belongs to no turn"),
        (
            {"0": "00", "1": "a"},
            r"'0' of turns\[0\] is missing, and the checkpoint '00' belongs to no",
        ),
        ({"1": None}, "it has 1 checkpoint for 2 turns"),
    ],
)
def test_checkpoints_with_wrong_names_are_refused_by_name(tmp_path, renamed, sentence):
    path = exported(tmp_path)
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
        names = {name: renamed.get(name, name) for name in file.keys()}  # noqa: SIM118
        tensors = {new: file.get_tensor(old).clone() for old, new in names.items() if new}
    save_file(tensors, path, metadata=said)
    with store(tmp_path / "two") as its:
        with pytest.raises(WeirError, match=sentence):
            unpack(its, "me", path)
        assert its.list_sessions("me") == []


def said_otherwise(old: str, new: str) -> Any:
    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        text = header["__metadata__"]["weir_row"]
        assert old in text
        header["__metadata__"]["weir_row"] = text.replace(old, new)
        written = json.dumps(header).encode()
        written += b" " * (-len(written) % 8)
        return len(written).to_bytes(8, "little") + written + data[8 + length :]

    return change


def infinite(data: bytes) -> bytes:
    """Fill the keys of the first layer with bytes of 0xff, which are NaN."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start, end = header["0.keys"]["data_offsets"]
    start, end = (8 + length + at for at in (start, end))
    return data[:start] + b"\xff" * (end - start) + data[end:]


FORGED = [
    ("damaged or not the state of a row", lambda data: data[:-9]),
    ("damaged or not the state of a row", lambda data: b""),
    ("damaged or not the state of a row", lambda data: b"\xff" * 64),
    ("it has the format 7", said_otherwise('"format": 1', '"format": 7')),
    (
        "another model: kind mistral, here llama",
        said_otherwise('"kind": "llama"', '"kind": "mistral"'),
    ),
    ("of a cache with policy", said_otherwise("recent(6)", "recent(7)")),
    ("pending must be a list", said_otherwise('"pending": [1]', '"pending": 1')),
    ("the end of another turn", said_otherwise('"pending": [1]', '"pending": [61]')),
    ("seen must be a whole number", said_otherwise('"seen": 21', '"seen": "21"')),
    ("keys has numbers that are not finite", infinite),
]


@pytest.mark.parametrize(("sentence", "change"), FORGED)
def test_a_forged_snapshot_is_refused_though_its_checksum_is_right(tmp_path, sentence, change):
    path = exported(tmp_path)
    forged(path, change)
    with store(tmp_path / "two") as its:
        with pytest.raises(WeirError, match=sentence):
            unpack(its, "me", path)
        assert its.list_sessions("me") == []


@pytest.mark.parametrize("what", ["snapshot", "header", "lists"])
def test_what_is_too_large_in_a_file_is_refused_before_it_is_read(tmp_path, what):
    path = exported(tmp_path)
    if what == "snapshot":
        forged(path, lambda data: data + bytes(2 * FORM.turn_bytes()))
    else:
        most = export.MAX_FACTS + export.HEADER
        lie(path, "turns", 0, "usage", to=[[]] * 200_000 if what == "lists" else "x" * most)
    with store(tmp_path / "two") as its:
        with pytest.raises(WeirError, match=TOO_LARGE[what]):
            unpack(its, "me", path)
        assert its.list_sessions("me") == []


TOO_LARGE = {
    "snapshot": r"turns\[1\]: its checkpoint has [\d,]+ bytes",
    "header": r"its header has [\d,]+ bytes",
    "lists": "100,000 objects, lists and fields",
}


def test_more_than_a_file_may_say_is_not_exported(tmp_path):
    long = replace(record("a", 0), messages=(Message("user", "x" * export.MAX_FACTS),))
    with pytest.raises(WeirError, match=r"export only the newest turns, .* \?turns=5\."):
        export.write_export(tmp_path / "file", [(NODES[0], long)], FORM)
    assert not list(tmp_path.iterdir())


def test_what_is_no_export_is_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "other")
    with store(tmp_path / "two") as its:
        for name in ("other", "nothing", "two"):
            with pytest.raises(WeirError, match=r"the file is damaged|the file does not exist"):
                unpack(its, "me", tmp_path / name)
        for text in ("", "hello", "x" * 8, "x" * 100):
            (tmp_path / "text").write_text(text)
            with pytest.raises(WeirError) as error:
                unpack(its, "me", tmp_path / "text")
            assert str(error.value) == (
                "the file cannot be imported: it does not begin like a session that weir "
                "exported, or its end is missing. Send the file that a server returned when a "
                "session was exported."
            )
        saved(its, "a")
        with pytest.raises(WeirError, match="the session cannot be written"):
            pack(its, "me", "s", tmp_path / "nowhere" / "file")
    with pytest.raises(WeirError, match="another model"):
        store(tmp_path / "two", StoreFormat.of(make_llama(layers=1, seed=9), POLICY, CHUNK))


# --- random sequences of events


class Stores(RuleBasedStateMachine):
    """Run turns, forks, deletions, kills and restarts, and compare with a plain Python model."""

    @initialize()
    def open(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.its = store(self.folder)
        self.oracle = PlainStore()
        self.known: dict[str, tuple[int, TurnRecord]] = {}
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "its"):
            self.its.close()
            shutil.rmtree(self.folder)

    def make(self, data: st.DataObject, n: int) -> TurnRecord:
        parent = data.draw(st.sampled_from([None, *self.known]))
        self.count += 1
        given: dict[str, Any] = {"owner": data.draw(st.sampled_from(["me", "you"]))}
        given["chain"] = f"{data.draw(st.integers(0, 3)):064x}"
        given["session"] = data.draw(st.sampled_from(["s", "t"]))
        if parent is not None:
            given |= {"parent": parent, "owner": self.known[parent][1].owner}
        return record(f"n{self.count}", n, created=float(self.count), **given)

    @rule(data=st.data(), n=st.integers(0, 5))
    def turn(self, data: st.DataObject, n: int) -> None:
        made = self.make(data, n)
        assert save(self.its, made, NODES[n]) is None
        self.oracle.save(NODES[n], made)
        self.known[made.node] = (n, made)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        assert same(self.its.load(name), self.oracle.load(name))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.its.drop(name)
        self.oracle.drop(name)
        del self.known[name]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), owner=st.sampled_from(["me", "you"]), name=st.sampled_from("stuv"))
    def fork(self, data: st.DataObject, owner: str, name: str) -> None:
        node = data.draw(st.sampled_from(sorted(self.known)))
        told = []
        for its in (self.its, self.oracle):
            try:
                told.append(its.fork(owner, node, name))
            except WeirError as error:
                told.append(str(error))
        assert told[0] == told[1]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), owner=st.sampled_from(["me", "you"]), session=st.sampled_from("stuv"))
    def leave(self, data: st.DataObject, owner: str, session: str) -> None:
        nodes = data.draw(st.sets(st.sampled_from(sorted(self.known))))
        gone = self.its.remove_turns(owner, session, nodes)
        assert sorted(gone) == sorted(self.oracle.remove_turns(owner, session, nodes))
        for each in gone:
            del self.known[each]

    @rule()
    def restart(self) -> None:
        self.its.close()
        self.its = store(self.folder)

    @rule(data=st.data(), n=st.integers(0, 5), after=st.integers(0, 8))
    def killed(self, data: st.DataObject, n: int, after: int) -> None:
        """Kill during a turn. It is saved completely or not at all, and others do not change."""
        made = self.make(data, n)
        told: list[Exception | None] = []
        folder_file.os = Cut(after)  # type: ignore[attr-defined]
        try:
            self.its.save(NODES[n], made, told.append)
            # Wait until it has finished or was cut off, so that what is saved depends only on what
            # was drawn, and not on the speed of this machine.
            self.its._writer.shutdown()
        finally:
            kill(self.its)
        self.its = store(self.folder)
        found = self.its.find_turn(made.owner, made.node)
        assert found is not None or not told
        if found is not None:
            assert found == made
            self.oracle.save(NODES[n], made)
            self.known[made.node] = (n, made)

    @invariant()
    def is_as_the_oracle(self) -> None:
        if not hasattr(self, "its"):
            return
        for owner in ("me", "you", "nobody"):
            mine = {each.id: each for each in self.its.list_sessions(owner)}
            assert mine == {each.id: each for each in self.oracle.list_sessions(owner)}
            for n in range(4):
                chain = f"{n:064x}"
                assert self.its.find_history(owner, chain) == self.oracle.find_history(owner, chain)
            for name in "stuv":
                assert self.its.list_turns(owner, name) == self.oracle.list_turns(owner, name)
        for name, (_, made) in self.known.items():
            found = self.its.find_turn(made.owner, name)
            assert found is not None and replace(found, session=made.session) == made
        sizes = [path.stat().st_size for path in (self.folder / "nodes").iterdir()]
        assert len(sizes) == len(self.known)
        assert self.its.place.nbytes == sum(sizes)


TestStores = Stores.TestCase
TestStores.settings = settings(
    settings.get_profile("weir"), max_examples=12, stateful_step_count=12
)
