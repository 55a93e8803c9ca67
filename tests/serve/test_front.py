"""Several servers behind the front of a cluster keep the promises of a single server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from servers import POLICY, make_model, make_tokenizer, raw, run_app

from weir.errors import WeirError
from weir.serve import Engine, EngineClient, Limits, ResponseStore
from weir.serve.api import Keys, bind, make_app
from weir.serve.api import front as front_module
from weir.serve.api.front import Front, FrontConnection, OnlyFront, listen_for_front
from weir.serve.api.protocol import SMALL_CHUNKS, BoundedConnection
from weir.serve.cluster import SharedTurns, open_storage
from weir.serve.sessions.store import SessionStore
from weir.serve.sessions.store_format import StoreFormat

CHAT, RESPONSE = "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
KEYS = ("a-key", "e-key", "c-key", "i-key")  # two of each server
SPARE = "another-key"
LIMITS = Limits(body=200_000, bodies=400_000, stall=3.0)


@dataclass
class Behind:
    """A server behind the front, in this process."""

    client: EngineClient
    server: uvicorn.Server
    thread: threading.Thread
    bound: socket.socket

    @property
    def address(self) -> tuple[str, int]:
        name, port = self.bound.getsockname()[:2]
        return name, port

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.bound.close()


@dataclass
class Cluster:
    """Several servers and their front."""

    url: str
    port: int
    servers: list[Behind]
    down: set[int] = field(default_factory=set)
    asked: list[tuple[int, bool]] = field(default_factory=list)
    error: Exception = field(default_factory=lambda: WeirError("it is down"))

    def post(self, path: str, body: Any, key: str = KEYS[0], **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", **headers}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def chat(self, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        headers = more.pop("headers", {})
        body = {"model": "small", "temperature": 0, "max_tokens": 6, "messages": messages, **more}
        answer = self.post(CHAT, body, **headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def locate(self, number: int, *, failed: bool) -> tuple[str, int]:
        self.asked.append((number, failed))
        if number in self.down:
            raise self.error
        return self.servers[number].address

    @property
    def seen(self) -> list[int]:
        return [one.client.engine.load().seen for one in self.servers]

    @property
    def busy(self) -> int:
        return sum(one.client.engine.load().busy for one in self.servers)


def _behind(place: Path, limits: Limits) -> Behind:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    store = SessionStore(SharedTurns(open_storage(str(place)), StoreFormat.of(model, POLICY, 4)))
    engine = Engine(model, POLICY, 3, store, chunk=4)
    client = EngineClient(engine, tokenizer, "small", limits, ResponseStore(most=limits.texts))
    bound = listen_for_front("127.0.0.1")
    app = OnlyFront(make_app(client, Keys(map(_hash, (*KEYS, SPARE)))), "secret")
    return Behind(client, *run_app(app, FrontConnection, bound), bound)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@contextlib.contextmanager
def _serving(place: Path) -> Iterator[Cluster]:
    bound = bind("127.0.0.1", 0, Keys())
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    port = bound.getsockname()[1]
    made = Cluster(f"http://127.0.0.1:{port}", port, [_behind(place, LIMITS) for _ in range(2)])
    app = Front(2, lambda n, *, failed: made.locate(n, failed=failed), "secret")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_module, "CHECKED", 0.2)
        server, thread = run_app(app, BoundedConnection, bound)
        yield made
        server.should_exit = True
        thread.join(30)
    bound.close()
    for one in made.servers:
        one.end()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that no test shuts down."""
    with _serving(tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture
def passing(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose servers a test can shut down."""
    with _serving(tmp_path) as made:
        yield made


def test_a_conversation_goes_on_at_any_server(cluster):
    said = [{"role": "user", "content": "Good morning"}]
    for turn in range(4):
        answer = cluster.chat(said, headers={"x-session-id": "one"} if turn % 2 else {})
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == (turn > 0)
        said += [answer["choices"][0]["message"], {"role": "user", "content": "More"}]


def test_a_session_stays_at_one_server(cluster):
    said = [*HELLO]
    before = cluster.seen
    for _ in range(3):
        answer = cluster.chat(said, headers={"x-session-id": "stays"})
        said += [answer["choices"][0]["message"], {"role": "user", "content": "More"}]
    assert sorted(after > then for after, then in zip(cluster.seen, before, strict=True)) == [
        False,
        True,
    ]


def test_responses_and_conversations_are_found_again(cluster):
    homes: list[bool] = []
    for key in KEYS:
        body = {"model": "small", "max_output_tokens": 4}
        first = cluster.post(RESPONSE, {**body, "input": "Hello"}, key).json()
        more = {**body, "input": "And?", "previous_response_id": first["id"]}
        second = cluster.post(RESPONSE, more, key).json()
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        talk = cluster.post("/v1/conversations", {}, key).json()
        told = cluster.post(RESPONSE, {**body, "input": "x", "conversation": talk["id"]}, key)
        assert told.status_code == 200, told.text
        headers = {"authorization": f"Bearer {key}"}
        items = httpx.get(f"{cluster.url}/v1/conversations/{talk['id']}/items", headers=headers)
        assert len(items.json()["data"]) == 2
        for sent in (headers, {"x-api-key": key}, {"authorization": f"bearer  {key}"}):
            found = httpx.get(f"{cluster.url}{RESPONSE}/{first['id']}", headers=sent)
            assert found.json()["id"] == first["id"]
        stored = [one.client.responses for one in cluster.servers]
        homes += [store.get_response(_hash(key), first["id"]) is not None for store in stored]
    # The responses of each key are stored on one server, and both servers store some.
    assert sum(homes) == len(KEYS)
    assert all(any(homes[at::2]) for at in range(2))


def test_sessions_are_known_everywhere(cluster):
    body = {"model": "small", "max_tokens": 2, "messages": HELLO}
    cluster.post(CHAT, body, SPARE, **{"x-session-id": "one"})
    headers = {"authorization": f"Bearer {SPARE}"}
    url = f"{cluster.url}/v1/sessions"
    for _ in range(3):
        assert [one["id"] for one in httpx.get(url, headers=headers).json()["data"]] == ["one"]
        assert httpx.get(f"{url}/one/turns", headers=headers).json()["data"]
    assert httpx.delete(f"{url}/one", headers=headers).status_code == 200
    assert httpx.get(url, headers=headers).json()["data"] == []


def test_a_server_answers_the_front_only(cluster):
    host, port = cluster.servers[0].address
    for path, form in (
        (CHAT, lambda said: said["error"]["code"]),
        ("/v1/messages", lambda said: said["error"]["type"]),
        ("/api/chat", lambda said: said["error"]),
    ):
        for secret in ({}, {"x-weir-front": "secre"}):
            headers = {"authorization": f"Bearer {KEYS[0]}", **secret}
            answer = httpx.post(f"http://{host}:{port}{path}", json={}, headers=headers)
            assert answer.status_code == 403
            assert "front" in form(answer.json()) or "permission" in form(answer.json())


def test_a_client_cannot_say_that_it_is_the_front(cluster):
    # The front removes these headers from a client's request.
    answer = cluster.post(CHAT, {}, **{"x-weir-front": "secret", "x-weir-client": "1.2.3.4"})
    assert answer.status_code == 400
    assert "model" in answer.json()["error"]["message"]


def test_errors_have_the_form_of_the_api_and_nothing_is_open_without_a_key(cluster):
    for path in (CHAT, "/v1/models", "/-/routes", "/-/healthz", "/metrics"):
        answer = httpx.get(f"{cluster.url}{path}")
        assert answer.status_code in (401, 404, 405), path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert cluster.post(CHAT, {"model": "small", "messages": 3}).json()["error"]["param"]


def test_bodies_and_chunks_have_their_bounds(cluster):
    large = b'{"model":"' + b"x" * LIMITS.body + b'"}'
    headers = {"authorization": f"Bearer {KEYS[0]}", "content-type": "application/json"}
    answer = httpx.post(f"{cluster.url}{CHAT}", content=large, headers=headers, timeout=30)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"

    def chunks() -> Iterator[bytes]:
        for at in range(0, len(large), 1000):
            yield large[at : at + 1000]

    answer = httpx.post(f"{cluster.url}{CHAT}", content=chunks(), headers=headers, timeout=30)
    assert answer.status_code == 413
    with socket.create_connection(("127.0.0.1", cluster.port), 30) as small:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {KEYS[0]}\r\nTransfer-Encoding: chunked\r\n\r\n"
        with contextlib.suppress(OSError):
            small.sendall(head.encode() + b"1\r\n \r\n" * (SMALL_CHUNKS + 10))
        got = small.recv(1000)
        while part := small.recv(1000):
            got += part
    assert b" 400 " in got
    assert (
        b'"a body can have at most 2,048 chunks of fewer than 256 bytes in 10 seconds. Send' in got
    )


def test_two_ends_of_a_body_are_refused(cluster):
    with raw(cluster.port, CHAT, b"0\r\n\r\n", "Transfer-Encoding: chunked") as both:
        assert b" 400 " in both.recv(100)


def test_a_slow_body_gets_an_answer(cluster):
    with raw(cluster.port, CHAT, b"{", f"Authorization: Bearer {KEYS[0]}", length=50) as slow:
        began = time.monotonic()
        assert b" 408 " in slow.recv(100)
        assert time.monotonic() - began >= LIMITS.stall - 0.5


def _stream(tokens: int) -> bytes:
    body = {"model": "small", "messages": HELLO, "max_tokens": tokens, "stream": True}
    return json.dumps(body).encode()


def _wait_until(true: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_who_hangs_up_is_answered_no_longer(cluster):
    connection = raw(cluster.port, CHAT, _stream(60_000), f"Authorization: Bearer {KEYS[0]}")
    assert b" 200 " in connection.recv(100)
    _wait_until(lambda: cluster.busy == 1)
    connection.close()
    _wait_until(lambda: cluster.busy == 0)


@pytest.mark.slow
def test_a_stream_that_nobody_reads_is_cut_off(cluster):
    with raw(cluster.port, CHAT, _stream(60_000), f"Authorization: Bearer {KEYS[0]}"):
        _wait_until(lambda: cluster.busy == 1)
        _wait_until(lambda: cluster.busy == 0, 120)


def _body_of(path: str) -> dict[str, Any]:
    """Return a request for a long stream."""
    body: dict[str, Any] = {"model": "small", "stream": True}
    body |= {"input": "Hello"} if path == RESPONSE else {"messages": HELLO}
    limit = {"/api/chat": "options", RESPONSE: "max_output_tokens"}.get(path, "max_tokens")
    return {**body, limit: {"num_predict": 60_000} if path == "/api/chat" else 60_000}


@contextlib.contextmanager
def _answering(cluster: Cluster, path: str) -> Iterator[Iterator[bytes]]:
    """Yield the parts of a long stream as they arrive."""
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    url, body = f"{cluster.url}{path}", _body_of(path)
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        yield answer.iter_raw()


@pytest.mark.parametrize(
    ("path", "ended"),
    [
        (CHAT, b'data: {"error":{"message":"the server is shutting down'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
        ("/api/chat", b'{"error": "the server is shutting down'),
        (RESPONSE, b"event: response.failed"),
    ],
)
def test_a_drained_server_tells_those_whom_it_answers(passing, path, ended):
    with _answering(passing, path) as parts:
        got = next(parts)
        _wait_until(lambda: passing.busy == 1)
        for one in passing.servers:
            one.client.drain(0.1)
        got += b"".join(parts)
    assert ended in got.replace(b'{"error":"the', b'{"error": "the')
    assert b"[DONE]" not in got


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", RESPONSE])
def test_a_server_that_dies_ends_its_streams_with_an_error(cluster, path):
    with _answering(cluster, path) as parts:
        got = next(parts)
        _wait_until(lambda: cluster.busy == 1)
        for one in cluster.servers:
            for connection in list(one.server.server_state.connections):
                one.server.servers[0].get_loop().call_soon_threadsafe(connection.transport.abort)
        got += b"".join(parts)
    wanted = {
        CHAT: b'data: {"error":{"message":"the server stopped while it was answering',
        "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"',
        "/api/chat": b'{"error": "the server stopped while it was answering',
        RESPONSE: b'event: error\ndata: {"type":"error","code":"server_error"',
    }
    assert wanted[path] in got
    assert b"[DONE]" not in got


def test_a_request_is_answered_by_another_server_when_one_is_lost(passing):
    said = [*HELLO]
    first = passing.chat(said, headers={"x-session-id": "one"})
    home = max((0, 1), key=lambda n: passing.servers[n].client.engine.load().seen)
    passing.down.add(home)
    passing.servers[home].end()
    said += [first["choices"][0]["message"], {"role": "user", "content": "More"}]
    second = passing.chat(said, headers={"x-session-id": "one"})
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert passing.servers[1 - home].client.engine.load().seen > 0
    # Requests that only the lost server could answer are refused, and clients are told to retry.
    body = {"model": "small", "input": "Hello", "max_output_tokens": 2}
    statuses = {key: passing.post(RESPONSE, body, key) for key in KEYS}
    assert {answer.status_code for answer in statuses.values()} == {200, 503}
    lost = next(answer for answer in statuses.values() if answer.status_code == 503)
    assert lost.headers["retry-after"] == "5"
    assert lost.json()["error"]["code"] == "server_closing"


def test_without_any_server_there_is_an_answer(passing):
    passing.down |= {0, 1}
    for one in passing.servers:
        one.end()
    answer = passing.post("/v1/messages", {"model": "small"})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("error", [WeirError("it is down"), OSError("no such address")])
def test_a_server_that_died_without_a_request_is_found_again(passing, error):
    """Checks continue when a server refuses a connection, and when it cannot be started."""
    body = {"model": "small", "input": "Hello", "max_output_tokens": 2}
    passing.error = error
    passing.down.add(0)
    passing.servers[0].end()
    passing.asked.clear()
    _wait_until(lambda: passing.asked.count((0, False)) > 1)
    passing.servers[0] = passing.servers[1]  # a server is started again, at this address
    passing.down.clear()
    _wait_until(lambda: {passing.post(RESPONSE, body, key).status_code for key in KEYS} == {200})


def test_a_server_that_has_failed_is_replaced(passing):
    passing.servers[0].client.failure = RuntimeError("broken")
    _wait_until(lambda: (0, True) in passing.asked)
    assert (1, True) not in passing.asked


def test_without_keys_all_requests_to_responses_go_to_one_server():
    """Clients of a server without keys send any key, such as `none`, and share their responses."""

    async def located(number: int) -> list[int]:
        front = Front(number, lambda n, *, failed: ("127.0.0.1", n), "secret", has_keys=False)
        front._places = [("127.0.0.1", n) for n in range(number)]
        scope = {"path": RESPONSE, "method": "POST"}
        keys = ["none", "sk-1", "sk-2", "sk-3", "sk-4"]
        heads = [(b"authorization", f"Bearer {key}".encode()) for key in keys]
        return [front._choose({**scope, "headers": [head]})[0] for head in heads]

    assert len(set(asyncio.run(located(8)))) == 1
