"""Sessions over HTTP: turns, forks, rewinding, and files that move sessions to other servers."""

from __future__ import annotations

import hashlib

import httpx
import pytest
from servers import make_client, raw, serving

from weir.serve import Limits
from weir.serve.api import Keys
from weir.serve.sessions.disk_turns import DiskTurns

ALICE, BOB = "wk-alice-0123456789", "wk-bob-0123456789"
FILE = "application/octet-stream"


class Api:
    """The requests of one key."""

    def __init__(self, server, key=ALICE):
        self.url = f"{server.url}/v1"
        self.headers = {"Authorization": f"Bearer {key}"}

    def ask(self, method, path, body=None, **headers):
        given = {} if body is None else {"json": body}
        if isinstance(body, bytes):
            given, headers = {"content": body}, {"Content-Type": FILE, **headers}
        return httpx.request(
            method, self.url + path, headers={**self.headers, **headers}, timeout=600, **given
        )

    def say(self, history, text, session):
        """Run one turn, and return the history with it."""
        messages = [*history, {"role": "user", "content": text}]
        body = {"model": "small", "messages": messages, "max_tokens": 6, "temperature": 0}
        answer = self.ask("POST", "/chat/completions", body, **{"x-session-id": session}).json()
        message = answer["choices"][0]["message"]["content"]
        return [*messages, {"role": "assistant", "content": message}]

    def turns(self, session):
        return self.ask("GET", f"/sessions/{session}/turns").json()["data"]

    def talk(self, session):
        """Run three turns, and return the history after each."""
        histories = [[]]
        for text in ("One", "Two", "Three"):
            histories.append(self.say(histories[-1], text, session))
        return histories[1:]


@pytest.fixture(scope="module", params=["memory", "disk"])
def server(request, tmp_path_factory):
    data = tmp_path_factory.mktemp("data") if request.param == "disk" else None
    keys = Keys([hashlib.sha256(key.encode()).hexdigest() for key in (ALICE, BOB)])
    with serving(make_client(rows=2, limits=Limits(parcel=2_000_000), data=data), keys) as server:
        yield server


@pytest.fixture
def alice(server):
    return Api(server)


@pytest.mark.slow
def test_turns_are_told_page_by_page(alice):
    alice.talk("paged")
    path = "/sessions/paged/turns"
    all_of = [turn["id"] for turn in alice.turns("paged")]
    first = alice.ask("GET", f"{path}?limit=2").json()
    assert [turn["id"] for turn in first["data"]] == all_of[:2] and first["has_more"]
    last = alice.ask("GET", f"{path}?limit=2&after={first['last_id']}").json()
    assert [turn["id"] for turn in last["data"]] == all_of[2:] and not last["has_more"]
    newest = alice.ask("GET", f"{path}?order=desc&limit=1").json()
    assert [turn["id"] for turn in newest["data"]] == all_of[-1:]
    assert newest["data"][0]["current"]
    assert alice.ask("GET", f"{path}?after=resp_0").status_code == 404
    for wrong in ("limit=0", "limit=1001", "order=any"):
        error = alice.ask("GET", f"{path}?{wrong}").json()["error"]
        assert error["param"] == wrong.partition("=")[0]


@pytest.mark.thinned(2)
def test_a_parameter_that_nobody_knows_is_refused(alice):
    alice.talk("asked")
    for path in ("", "/asked", "/asked/turns", "/asked/export", "/asked/memory"):
        answer = alice.ask("GET", f"/sessions{path}?bogus=1")
        error = answer.json()["error"]
        told = (answer.status_code, error["param"], error["code"])
        assert told == (400, "bogus", "unknown_parameter")
    for path in ("/asked/turns?limit=2&order=desc&include[]=x", "/asked/export?turns=1"):
        assert alice.ask("GET", f"/sessions{path}").status_code == 200


@pytest.mark.thinned(2)
def test_turns_of_a_session_are_told_with_what_was_said(alice):
    histories = alice.talk("told")
    turns = alice.turns("told")
    assert [m for turn in turns for m in turn["messages"]] == histories[-1]
    assert [turn["parent"] for turn in turns] == [None, turns[0]["id"], turns[1]["id"]]
    assert all(turn["id"].startswith("resp_") and turn["current"] for turn in turns)
    edited = alice.say(histories[0], "Not two", "told")
    turns = alice.turns("told")
    assert [turn["current"] for turn in turns] == [True, False, False, True]
    current = [m for turn in turns if turn["current"] for m in turn["messages"]]
    assert current == edited
    session = alice.ask("GET", "/sessions/told").json()
    assert (session["turns"], session["head"]) == (4, turns[-1]["id"])


@pytest.mark.thinned(2)
def test_a_fork_goes_on_by_itself_from_any_turn(alice):
    histories = alice.talk("trunk")
    turns = alice.turns("trunk")
    fork = alice.ask("POST", "/sessions/trunk/fork", {"turn": turns[1]["id"], "id": "branch"})
    assert fork.json()["id"] == "branch"
    assert (fork.json()["turns"], fork.json()["head"]) == (2, turns[1]["id"])
    assert alice.turns("branch") == turns[:2]
    alice.say(histories[1], "Elsewhere", "branch")
    assert (len(alice.turns("branch")), alice.turns("trunk")) == (3, turns)
    assert alice.ask("POST", "/sessions/trunk/fork", {"id": "branch"}).status_code == 409
    newest = alice.ask("POST", "/sessions/trunk/fork").json()
    assert newest["id"].startswith("sess_") and newest["turns"] == 3
    # Turns that only the trunk has are deleted with it, and the branch stays.
    alice.ask("DELETE", "/sessions/trunk")
    alice.ask("DELETE", f"/sessions/{newest['id']}")
    assert alice.turns("branch")[:2] == turns[:2]
    assert alice.ask("POST", "/sessions/trunk/fork", {"turn": turns[2]["id"]}).status_code == 404


@pytest.mark.thinned(2)
def test_a_session_is_taken_back_to_one_of_its_turns(server, alice):
    histories = alice.talk("back")
    turns = alice.turns("back")
    alice.ask("POST", "/sessions/back/fork", {"turn": turns[1]["id"], "id": "kept"})
    told = alice.ask("POST", "/sessions/back/rewind", {"turn": turns[0]["id"]})
    assert (told.json()["turns"], told.json()["head"]) == (1, turns[0]["id"])
    assert (alice.turns("back"), alice.turns("kept")) == (turns[:1], turns[:2])
    owner = hashlib.sha256(ALICE.encode()).hexdigest()
    for turn, there in zip(turns, (True, True, False), strict=True):
        found = server.store.find_turn(owner, turn["id"].removeprefix("resp_"))
        assert (found is not None) is there
    again = alice.ask("POST", "/sessions/back/rewind", {"turn": turns[1]["id"]})
    assert again.status_code == 404
    assert alice.say(histories[0], "Two", "back") == histories[1]


@pytest.mark.thinned(2)
def test_a_session_travels_in_a_file_and_goes_on_as_it_would_have(server, alice):
    histories = alice.talk("far")
    file = alice.ask("GET", "/sessions/far/export")
    assert file.headers["content-type"] == FILE
    assert int(file.headers["content-length"]) == len(file.content)
    wanted = alice.say(histories[-1], "Four", "far")
    bob = Api(server, BOB)
    taken = bob.ask("POST", "/sessions/import", file.content).json()
    assert taken["turns"] == 3 and taken["id"] != "far"
    turns = bob.turns(taken["id"])
    assert [m for turn in turns for m in turn["messages"]] == histories[-1]
    assert bob.say(histories[-1], "Four", taken["id"]) == wanted
    assert [turn["parent"] for turn in bob.turns(taken["id"])][1:] == [t["id"] for t in turns]
    file = alice.ask("GET", "/sessions/far/export?turns=1")
    newest = bob.ask("POST", "/sessions/import", file.content)
    assert newest.json()["turns"] == 1
    assert newest.json()["seen"] == alice.ask("GET", "/sessions/far").json()["seen"]


@pytest.mark.slow
def test_sessions_are_told_in_the_order_of_their_newest_turns(alice):
    alice.talk("older")
    file = alice.ask("GET", "/sessions/older/export?turns=1").content
    alice.talk("newer")
    taken = alice.ask("POST", "/sessions/import", file).json()["id"]
    told = alice.ask("GET", "/sessions").json()["data"]
    names = [session["id"] for session in told]
    assert names.index("newer") < names.index(taken)
    assert [s["used"] for s in told] == sorted((s["used"] for s in told), reverse=True)


@pytest.mark.thinned(2)
def test_files_that_are_none_are_refused_and_nothing_is_kept(server, alice):
    alice.talk("file")
    file = alice.ask("GET", "/sessions/file/export").content
    before = alice.ask("GET", "/sessions").json()
    for body in (b"", b"x", file[:-1], file[:200], b"\xff" * 8 + file[8:], file[:-1] + b"\x00"):
        answer = alice.ask("POST", "/sessions/import", body)
        assert answer.status_code == 400
        assert "/" not in answer.json()["error"]["message"]
    assert alice.ask("POST", "/sessions/import", {"a": 1}).status_code == 415
    assert alice.ask("POST", "/sessions/import", file, **{"Content-Type": ""}).status_code == 415
    assert alice.ask("POST", "/sessions/import", b"x" * 2_000_001).status_code == 413
    with raw(
        server.port, "/v1/sessions/import", b"half", f"Authorization: Bearer {ALICE}", length=50
    ):
        pass
    other = file.replace(b"recent(6)", b"recent(5)")
    assert alice.ask("POST", "/sessions/import", other).status_code == 400
    assert alice.ask("GET", "/sessions").json() == before
    if isinstance(server.store.place, DiskTurns):
        assert not list(server.store.place.folder.glob("moving/*"))


BAD = [
    ("fork", {"turn": "x"}, "turn"),
    ("fork", {"turn": "../" + "0" * 32}, "turn"),
    ("fork", {"turn": 7}, "turn"),
    ("fork", {"id": "../x"}, "id"),
    ("fork", {"id": "a" * 129}, "id"),
    ("fork", {"id": "a\n"}, "id"),
    ("fork", {"name": "a"}, "name"),
    ("rewind", {}, "turn"),
    ("rewind", {"turn": None}, "turn"),
    ("rewind", {"turn": "0" * 33}, "turn"),
]


@pytest.mark.parametrize(("what", "body", "param"), BAD)
def test_a_bad_body_is_refused_where_it_is_wrong(alice, what, body, param):
    answer = alice.ask("POST", f"/sessions/any/{what}", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.thinned(2)
def test_what_is_anothers_is_as_unknown_as_what_never_was(server, alice):
    alice.talk("diary")
    (turn, *_) = alice.turns("diary")
    bob = Api(server, BOB)
    Api(server, BOB).talk("bobs")
    for ask in (
        lambda name: bob.ask("GET", f"/sessions/{name}/turns"),
        lambda name: bob.ask("GET", f"/sessions/{name}/export"),
        lambda name: bob.ask("POST", f"/sessions/{name}/fork", {"turn": turn["id"]}),
        lambda name: bob.ask("POST", f"/sessions/{name}/rewind", {"turn": turn["id"]}),
    ):
        answers = [ask(name) for name in ("diary", "unknown", "%2e%2e", "a%00b", "%ed%a0%80")]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.text for answer in answers}) == 1
    guessed = {"turn": "resp_" + "0" * 32}
    for what in ("fork", "rewind"):
        path = f"/sessions/bobs/{what}"
        answers = [bob.ask("POST", path, body) for body in ({"turn": turn["id"]}, guessed)]
        assert answers[0].status_code == 404 and answers[0].text == answers[1].text
        assert answers[0].json()["error"]["message"] == "turn not found"
        unknown = bob.ask("POST", f"/sessions/unknown/{what}", {"turn": turn["id"]})
        assert unknown.json()["error"]["message"] == "session not found"
    wrong = alice.ask("GET", "/sessions/diary/export?turns=0")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "turns")
    assert alice.ask("GET", "/sessions/diary").json()["turns"] == 3
