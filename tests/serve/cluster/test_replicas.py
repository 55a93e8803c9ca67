"""Two replicas on Ray: one is killed, and its session continues on the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from weir.errors import WeirError
from weir.serve.cluster.replica import START

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[cluster]'")
running = pytest.importorskip("weir.serve.cluster.running")

POLICY = "sink(4) | recent(60)"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def cluster(tmp_path):
    """`weir serve` with two replicas of nano, and its address."""
    words = ["serve", "nano", "--cluster", "local", "--replicas", "2", "--rows", "2"]
    words += ["--policy", POLICY, "--chunk", "16", "--data", str(tmp_path), "--port", "0"]
    words += ["--drain", "5"]
    start = "import sys; from weir.cli import main; main()"
    command = [sys.executable, "-c", start, *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = ""
            while not (found := re.search(r"(http://\S+:\d+)/v1", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield found[1], process
        finally:
            process.kill()


def ask(url: str, messages: list[dict[str, str]], session: str | None) -> httpx.Response:
    """Ask for a turn, again after some errors, as OpenAI's client does."""
    body = {"model": "nano", "messages": messages, "max_tokens": 8, "temperature": 0}
    headers = {} if session is None else {"x-session-id": session}
    for _ in range(400):  # a replica takes as long to start as `weir serve`
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        if answer.status_code not in (409, 500, 503):
            break
        time.sleep(0.5)
    assert answer.status_code == 200, answer.text
    return answer


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Post a request, again while no replica is ready, and return the answer."""
    for _ in range(400):
        answer = httpx.post(f"{url}{path}", json=body, timeout=60)
        if answer.status_code != 503:
            break
        time.sleep(0.5)
    assert answer.status_code == 200, answer.text
    return answer.json()


def parent_of(pid: int) -> int:
    """The process that started a process."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def processes() -> list[int]:
    """The processes of replicas, which Ray's actors have started."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if START.encode() in words:
                found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_the_session_of_a_killed_replica_goes_on_elsewhere(cluster):
    url, process = cluster
    said = [{"role": "user", "content": "Prince Andrew looked at the sky and said nothing."}]
    seen: list[dict[str, Any]] = []
    for turn in range(4):
        answer = ask(url, said, "one" if turn != 3 else None)
        whole = answer.json()
        assert answer.headers["x-session-id"] == "one"
        seen.append(whole["usage"])
        said.append(whole["choices"][0]["message"])
        said.append({"role": "user", "content": "And then?"})
        if turn in (1, 2):  # one replica, then another, so that one of them has the session
            serving = [pid for pid in processes() if parent_of(pid) not in processes()]
            os.kill(min(serving) if turn == 1 else max(serving), signal.SIGKILL)
    # Each turn read only what was new, also after the kills, and without the session's name.
    for before, after in itertools.pairwise(seen):
        assert after["prompt_tokens_details"]["cached_tokens"] == before["total_tokens"] - 1
    assert [session["turns"] for session in httpx.get(f"{url}/v1/sessions").json()["data"]] == [4]
    body = {"model": "nano", "input": "Prince Andrew", "max_output_tokens": 4}
    first = post(url, "/v1/responses", body)
    again = {**body, "previous_response_id": first["id"]}
    assert post(url, "/v1/responses", again)["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert httpx.get(f"{url}/-/routes").json()["error"]["code"] == "not_found"
    # At shutdown, an answer that does not end in time gets an error, and all processes end.
    long = {"model": "nano", "messages": said[:1], "max_tokens": 60_000, "stream": True}
    long["ignore_eos"] = True
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=120) as answer:
        parts = answer.iter_raw()
        got = next(parts)
        process.terminate()
        got += b"".join(parts)
    assert b'data: {"error":{"message":"the server is shutting down' in got
    assert process.wait(60) == 0
    until = time.monotonic() + 30
    while processes():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("address", ["nowhere", ":99", "a:b"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(WeirError, match="must be local or host:port"), running.joined(address):
        pass


def test_a_cluster_that_does_not_answer_is_refused():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(WeirError, match="no Ray cluster answers"), running.joined(address):
        pass
