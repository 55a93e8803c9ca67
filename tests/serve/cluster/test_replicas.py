"""Two replicas on Ray Serve: one is killed, and its session goes on on the other."""

from __future__ import annotations

import itertools
import socket
import time

import httpx
import pytest

from weir.errors import WeirError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[cluster]'")
running = pytest.importorskip("weir.serve.cluster.running")

POLICY = "sink(4) | recent(60)"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def url(tmp_path):
    """Two replicas of nano that answer."""
    port = free_port()
    settings = running.Settings("nano", POLICY, 16, 2, str(tmp_path), "nano", most=16, threads=1)
    with running.joined("local"):
        running.deploy(settings, 2, "127.0.0.1", port)
        yield f"http://127.0.0.1:{port}"


def ask(url: str, messages: list[dict[str, str]], session: str | None) -> httpx.Response:
    """A turn, asked again as OpenAI's client does."""
    body = {"model": "nano", "messages": messages, "max_tokens": 8, "temperature": 0}
    headers = {} if session is None else {"x-session-id": session}
    for _ in range(60):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        if answer.status_code not in (409, 500, 503):
            break
        time.sleep(0.5)
    assert answer.status_code == 200, answer.text
    return answer


def replicas() -> dict[str, str]:
    """The actors of replicas, and their namespaces."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return {
        each["name"]: each["namespace"]
        for each in named
        if each["name"].startswith("SERVE_REPLICA::weir#weir#")
    }


@pytest.mark.slow
def test_the_session_of_a_killed_replica_goes_on_elsewhere(url):
    said = [{"role": "user", "content": "Prince Andrew looked at the sky and said nothing."}]
    seen, both = [], list(replicas())
    for turn in range(4):
        answer = ask(url, said, "one" if turn != 3 else None)
        whole = answer.json()
        assert answer.headers["x-session-id"] == "one"
        seen.append(whole["usage"])
        said.append(whole["choices"][0]["message"])
        said.append({"role": "user", "content": "And then?"})
        if turn in (1, 2):  # one after the other, so that the one with the session is among them
            killed = both[turn - 1]
            ray.kill(ray.get_actor(killed, namespace=replicas()[killed]))
    # Each turn read only what was new, also those after the kills, and one that names no session.
    for before, after in itertools.pairwise(seen):
        assert after["prompt_tokens_details"]["cached_tokens"] == before["total_tokens"] - 1
    assert [session["turns"] for session in httpx.get(f"{url}/v1/sessions").json()["data"]] == [4]


@pytest.mark.parametrize("address", ["nowhere", ":99", "a:b"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(WeirError, match="'local' or 'host:port'"), running.joined(address):
        pass


def test_a_cluster_that_does_not_answer_is_refused():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(WeirError, match="no cluster answers"), running.joined(address):
        pass
