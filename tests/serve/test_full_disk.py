"""A full disk is noticed before an answer is generated. If old turns may go, they go first."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from servers import Server, make_client, serving

from weir.serve import Limits
from weir.serve.sessions import snapshot_folder as folder_file
from weir.serve.sessions.records import DISK_FULL
from weir.serve.sessions.store_format import OVERHEAD

CHAT = "/v1/chat/completions"


def chat(*said: str) -> dict:
    """Return a request whose history alternates between the user and the assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
    return {"model": "small", "messages": messages, "max_tokens": 4, "temperature": 0}


def ask(server: Server, *said: str) -> str:
    answer = server.post(CHAT, chat(*said))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def cached(server: Server, *said: str) -> int:
    used = server.post(CHAT, chat(*said)).json()["usage"]
    return used["prompt_tokens_details"]["cached_tokens"]


def free_bytes_in(message: str) -> int:
    """Return the free bytes that the message of a full disk names. Check that they are too few."""
    found = re.match(rf"{DISK_FULL}. Needed: ([\d,]+) bytes, free: ([\d,]+) bytes", message)
    assert found, message
    needed, free = (int(number.replace(",", "")) for number in found.groups())
    assert free < needed
    return free


def sessions(server: Server) -> list[dict]:
    return httpx.get(f"{server.url}/v1/sessions").json()["data"]


class Disk:
    """A disk with as many free bytes as the test sets, less those of the snapshot files."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def free_bytes(self, folder: object) -> int:
        return self.size - sum(file.stat().st_size for file in self.folder.glob("nodes/*"))


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Disk:
    made = Disk(tmp_path, 10**9)
    monkeypatch.setattr(folder_file, "free_bytes", made.free_bytes)
    monkeypatch.setattr("weir.serve.sessions.responses.free_bytes", made.free_bytes)
    return made


def test_a_full_disk_is_said_before_anything_is_generated(tmp_path, disk, caplog):
    with serving(make_client(data=tmp_path)) as server:
        said = ask(server, "Hi")
        calls, disk.size = server.engine.load().calls, 0
        answers = [server.post(CHAT, {**chat("Ho"), **more}) for more in ({}, {"stream": True})]
        answers.append(server.post("/v1/responses", {"model": "small", "input": "Ho"}))
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (507, "storage_full")
            assert free_bytes_in(error["message"]) == 0
        assert server.engine.load().calls == calls
        assert [DISK_FULL in line for line in caplog.messages].count(True) == 1
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 200
        assert health.json()["status"] == "storage_full"
        assert free_bytes_in(health.json()["message"]) == 0
        # OpenAI's client does not ask again.
        sent = []
        with httpx.Client(event_hooks={"request": [sent.append]}) as counted:
            client = server.client(http_client=counted).with_options(max_retries=2)
            with pytest.raises(openai.InternalServerError, match="Delete sessions"):
                client.chat.completions.create(**chat("Ho"))
        assert len(sent) == 1
        # What is not stored needs no room.
        whole = server.post("/v1/completions", {"model": "small", "prompt": "a", "max_tokens": 2})
        assert whole.status_code == 200
        loose = {"model": "small", "input": "Ho", "store": False, "max_output_tokens": 2}
        assert server.post("/v1/responses", loose).status_code == 200
        disk.size = 10**9
        assert cached(server, "Hi", said, "On") > 0
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_all_answers_under_way_have_room(tmp_path, disk):
    client = make_client(data=tmp_path, limits=Limits(unread=10**6))
    row = client.store.place.store_format.turn_bytes()
    with serving(client) as server:
        disk.size = 2 * row
        assert server.post(CHAT, {**chat("Hi"), "n": 3}).status_code == 507
        assert server.post(CHAT, {**chat("Hi"), "n": 2}).status_code == 200
        disk.size += 2 * row - disk.free_bytes(None)
        body = {**chat("Hi"), "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=600) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert server.post(CHAT, {**chat("Ho"), "n": 2}).status_code == 507
            assert server.post(CHAT, chat("Ho")).status_code == 200


def test_a_short_turn_needs_no_room_for_a_row(tmp_path, disk):
    client = make_client(data=tmp_path, policy="sink(2) | recent(9000)")
    row, short = client.store.place.turn_bytes(), client.store.place.turn_bytes(100)
    assert 2 * short < row
    with serving(client) as server:
        disk.size = row - 1
        ask(server, "Hi")
        (turn,) = server.store.list_turns("", sessions(server)[0]["id"])
        written = server.store.load(turn.node).state.nbytes
        assert written <= client.store.place.turn_bytes(turn.seen) - OVERHEAD <= 2 * written
        answer = server.post(CHAT, {**chat("Hi"), "max_tokens": 9000})
        assert answer.status_code == 507
        assert f" Needed: {row:,} bytes" in answer.json()["error"]["message"]


def test_where_old_turns_may_go_they_make_room(tmp_path, disk):
    client = make_client(data=tmp_path, limit=10**9, keep=2)
    with serving(client) as server:
        said = [ask(server, f"Number {n}") for n in range(4)]
        taken = 10**9 - disk.free_bytes(None)
        row = client.store.place.store_format.turn_bytes()
        disk.size = taken + row - 1  # one byte too few: only the oldest turn is deleted
        said.append(ask(server, "Number 4"))
        assert [session["topic"] for session in sessions(server)] == [
            f"Number {n}" for n in (4, 3, 2, 1)
        ]
        # If deleting turns would not make enough room, none is deleted, and turns go on in memory.
        disk.size = 0
        said.append(ask(server, "Number 5"))
        assert len(sessions(server)) == 5
        assert cached(server, "Number 5", said[5], "On") > 0
        health = httpx.get(f"{server.url}/health").json()
        assert health["status"] == "storage_full"
        assert free_bytes_in(health["message"]) == 0
        assert health["message"].endswith("bytes. Up to 2 turns continue in memory")


def test_turns_that_went_on_in_memory_are_written_when_there_is_room(tmp_path, disk, monkeypatch):
    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with serving(make_client(data=tmp_path, limit=10**9, keep=3, archive=10**6)) as server:
        first = ask(server, "One")
        disk.size = 0
        monkeypatch.setattr(folder_file.os, "write", full)
        second = ask(server, "One", first, "Two")
        third = ask(server, "One", first, "Two", second, "Three")
        (session,) = sessions(server)
        assert session["turns"] == 3
        told = httpx.get(f"{server.url}/v1/sessions/{session['id']}").json()
        assert told["turns"] == 3
        memory = httpx.get(f"{server.url}/v1/sessions/{session['id']}/memory").json()
        assert memory["archive"]["turns"] == 2  # the first message and its answer are on the disk
        node = server.store.find_history("", server.store.list_turns("", session["id"])[-1].chain)
        assert [len(one.ids) > 0 for one in server.store.ancestry("", node.node)] == [True] * 3
        ask(server, "Other")
        fork = httpx.post(f"{server.url}/v1/sessions/{session['id']}/fork", json={})
        assert fork.status_code == 507, fork.text
        disk.size = 10**9
        monkeypatch.undo()
        ask(server, "Another")
    with serving(make_client(data=tmp_path)) as server:
        assert cached(server, "One", first, "Two", second, "Three", third, "On") > 0
        assert sorted(session["topic"] for session in sessions(server)) == [
            "Another",
            "On",
            "Other",
        ]


def test_a_disk_that_refuses_what_it_says_is_free_fails_an_answer_and_the_next_before_it(
    tmp_path, monkeypatch
):
    def full(*given, **named):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with serving(make_client(data=tmp_path, limit=10**9)) as server:
        ask(server, "Hi")
        monkeypatch.setattr(folder_file.os, "write", full)
        monkeypatch.setattr(folder_file.os, "posix_fallocate", full, raising=False)
        late = server.post(CHAT, chat("Ho"))
        calls = server.engine.load().calls
        early = server.post(CHAT, chat("Ho"))
        assert {late.status_code, early.status_code} == {507}
        assert early.json()["error"]["code"] == late.json()["error"]["code"] == "storage_full"
        assert server.engine.load().calls == calls
        assert len(sessions(server)) == 1  # no turn is deleted, because it would not help
        monkeypatch.undo()
        ask(server, "Ho")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs a small disk")
@pytest.mark.parametrize("keep", [None, 2])
def test_a_disk_that_is_really_small(tmp_path, keep):
    made = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(tmp_path)]
    if subprocess.run(made, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        given = {} if keep is None else {"limit": 10**9, "keep": keep}
        with serving(make_client(data=tmp_path, **given)) as server:
            filler = tmp_path / "filler"
            said = ask(server, "Hi")
            with contextlib.suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(2**16))
            calls = server.engine.load().calls
            answer = server.post(CHAT, chat("Hi", said, "On"))
            if keep is None:
                assert answer.status_code == 507
                assert free_bytes_in(answer.json()["error"]["message"]) < 2**16
                assert server.engine.load().calls == calls
            else:
                assert answer.status_code == 200
            filler.unlink()
            assert cached(server, "Hi", said, "On") > 0
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
