"""Requests that are made to cost much are limited before validation, and get only a few errors."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from servers import CHATML, Server, make_client, raw, serving

from weir.errors import WeirError
from weir.serve import Limits, json_nodes, prompts
from weir.serve.api import middleware, protocol, requests
from weir.serve.api.requests import LARGE
from weir.serve.api.schemas.chat import ChatBody, TextBody
from weir.serve.api.schemas.responses import ConversationBody, ResponseBody
from weir.serve.json_nodes import NodeCounter, TooManyNodes
from weir.serve.messages import Message
from weir.stream import PromptTooLong, chat_template, template_bounds

LIMITS = Limits(body=2_000_000, bodies=3_000_000, prompt=400, answer=10, reading=2)
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "Hi"}
CHAT_BODY: dict[str, Any] = {"model": "small", "messages": [USER], "max_tokens": 2}
MANY = 5000
HOSTILE: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "messages": (ChatBody, {"messages": [0] * MANY}),
    "parts": (ChatBody, {"messages": [{"role": "user", "content": [0] * MANY}]}),
    "calls": (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}),
    "tools": (ChatBody, {"tools": [{}] * MANY}),
    "stops": (ChatBody, {"stop": [0] * MANY}),
    "biases": (ChatBody, {"logit_bias": {str(n): "x" for n in range(MANY)}}),
    "fields": (ChatBody, {f"f{n}": n for n in range(MANY)}),
    "fields of a tool": (
        ChatBody,
        {"tools": [{"type": "function", **{f"f{n}": n for n in range(MANY)}}]},
    ),
    "fractions": (TextBody, {"prompt": [1.5] * MANY}),
    "lists of fractions": (TextBody, {"prompt": [[1.5] * MANY] * 2}),
    "items": (ResponseBody, {"input": [0] * MANY}),
    "parts of an item": (ResponseBody, {"input": [{"role": "user", "content": [0] * MANY}]}),
    "include": (ResponseBody, {"include": [0] * MANY}),
    "items of a conversation": (ConversationBody, {"items": [{}] * MANY}),
    "metadata": (ConversationBody, {"metadata": {str(n): n for n in range(MANY)}}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(make_client(rows=2, limits=LIMITS)) as server:
        yield server


@pytest.mark.parametrize("name", HOSTILE)
def test_there_is_no_error_for_each_element(name):
    kind, body = HOSTILE[name]
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() < 20


def count(value: Any) -> tuple[int, int]:
    """Count the objects, lists and fields of a value, and the commas between its entries."""
    below = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(below, list):
        return 0, 0
    nodes = 1 + (len(value) if isinstance(value, dict) else 0)
    counts = [count(each) for each in below]
    commas = max(0, len(below) - 1)
    return nodes + sum(n for n, _ in counts), commas + sum(c for _, c in counts)


def test_nodes_are_counted_outside_of_strings_however_they_arrive():
    draw = random.Random(0)
    strings = ["", "a", '"', "\\", '\\"', "[{,:", '\\\\",', "ü\n"]

    def value(depth: int) -> Any:
        kind = draw.randrange(4 if depth else 2)
        if kind == 2:
            return [value(depth - 1) for _ in range(draw.randrange(4))]
        if kind == 3:
            return {
                draw.choice(strings) + str(n): value(depth - 1) for n in range(draw.randrange(4))
            }
        return draw.choice(strings) if kind else draw.random()

    for _ in range(200):
        made = value(4)
        data, counter = json.dumps(made).encode(), NodeCounter(0)
        while data:
            at = draw.randint(1, 7)
            counter.feed(data[:at])
            data = data[at:]
        assert (counter.nodes, counter.commas) == count(made)


def test_bodies_of_too_many_nodes_are_refused_before_they_are_parsed(server, monkeypatch):
    monkeypatch.setattr(requests, "parse_body", None)  # a call would fail
    monkeypatch.setattr(json_nodes, "MAX_NODES", most := 20_000)
    # A prompt can be a list of token ids, and no other list can be that long.
    ids = most + LIMITS.prompt
    for path, entry, many in ((CHAT, "{}", most), (CHAT, "0", most), ("/v1/completions", "0", ids)):
        body = b'{"messages":[' + b",".join([entry.encode()] * (many + 2)) + b"]}"
        answer = httpx.post(f"{server.url}{path}", content=body, headers=JSON, timeout=600)
        assert answer.status_code == 413, answer.text
        assert answer.json()["error"]["code"] == "request_too_large"
    with pytest.raises(TooManyNodes):
        NodeCounter(0).feed(b"[" * (most + 1))


def test_a_refused_body_may_be_sent_to_its_end(server):
    """Otherwise, clients that send everything before they read would get a reset, and no 413."""
    lists = b"[" * (json_nodes.MAX_NODES + 1)
    connection = raw(server.port, CHAT, lists, length=1_000_000 + len(lists))
    for _ in range(10):
        time.sleep(0.02)
        connection.sendall(b" " * 100_000)
    assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    connection.close()
    server.settled()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_may_be_sent_to_its_end(server, chunked):
    """Otherwise, clients that send everything before they read would get a reset, and no 413."""
    body = b" " * (LIMITS.body + 6_000_000)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        given: Any = iter([body[: len(body) // 2]] * 2) if chunked else body
        connection.request("POST", CHAT, given, JSON, encode_chunked=chunked)
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["code"] == "request_too_large"
    server.settled()


def test_who_asks_before_sending_hears_at_once_that_it_is_too_large(server):
    connection = raw(server.port, CHAT, b"", "Expect: 100-continue", length=LIMITS.body + 1)
    assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    connection.close()


def test_a_head_that_does_not_come_ends_its_connection(server, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
        silent = socket.create_connection(("127.0.0.1", server.port), 10)
        slow.sendall(b"POST / HTTP/1.1\r\nX-Slow:")
        slow_body = raw(server.port, CHAT, b"{", length=50)
        told = b"".join(iter(lambda: slow.recv(1000), b""))
        assert told.startswith(b"HTTP/1.1 408"), told
        assert b"the head of the request did not arrive in time" in told
        assert silent.recv(100) == b""  # an idle connection is closed without a response
        silent.close()
    assert httpx.get(f"{server.url}/health").status_code == 200
    # The time limit of the head does not apply to a body.
    assert server.engine_client.open_requests("127.0.0.1") == 1
    slow_body.close()
    server.settled()


@pytest.mark.parametrize(
    ("line", "header", "status"),
    [
        ("GET /health HTTP/9.9", "X: y", 505),
        ("PRI * HTTP/2.0", "X: y", 505),
        ("GET /health HTTP/1.0", "X: y", 200),
        ("GET /health HTTP/1.9", "X: y", 200),
        ("GET /health HTTP/1.1", "Expect: foo", 417),
        ("GET /health HTTP/1.1", "Expect: 100-Continue", 200),
        ("GET /health HTTP/1.1", "Connection: Upgrade\r\nUpgrade: websocket", 200),
    ],
)
def test_what_is_not_spoken_is_refused_by_name(server, caplog, line, header, status):
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(f"{line}\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
        told = connection.recv(1000)
    if status == 200 and "100" in header and told.startswith(b"HTTP/1.1 100"):
        told = told.partition(b"\r\n\r\n")[2]
    assert told.startswith(f"HTTP/1.1 {status} ".encode()), told
    assert "WebSocket" not in caplog.text and "upgrade" not in caplog.text
    server.settled()


def test_one_address_leaves_connections_to_others(server, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 20)
    with contextlib.ExitStack() as held:
        address = ("127.0.0.1", server.port)
        many = [
            held.enter_context(socket.create_connection(address, 10, ("127.0.0.2", 0)))
            for _ in range(20)
        ]
        assert [each.recv(1) for each in many[18:]] == [b"", b""]
        assert httpx.get(f"{server.url}/health").status_code == 200
        many[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert many[0].recv(12) == b"HTTP/1.1 200"


def test_json_in_the_arguments_of_calls_counts_too(server):
    some = json_nodes.MAX_NODES * 2 // 5
    for text in ("[" * some, "[[],[]]" * (some // 3 + 1), json.dumps({"x": [[]] * some})):
        calls = [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": each}}
            for each in ('"', text, text, text)  # the first one leaves a string open
        ]
        said = [USER, {"role": "assistant", "tool_calls": calls}, USER]
        answer = server.post(CHAT, {**CHAT_BODY, "messages": said})
        assert answer.status_code == 413, answer.text


def test_counting_in_a_long_text_ends_where_there_is_too_much():
    counter = NodeCounter(0)
    with pytest.raises(TooManyNodes):
        counter.feed_text("[]," * 1_000_000)
    assert counter.nodes <= json_nodes.MAX_NODES + json_nodes.PIECE


def test_large_bodies_are_parsed_beside_the_event_loop(server, monkeypatch):
    threads = []
    parse = requests.parse_body

    def parse_body(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(requests, "parse_body", parse_body)
    for size in (10, LARGE):
        answer = server.post(CHAT, {**CHAT_BODY, "messages": [0] * size})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0]"
    assert not threads[0].startswith("weir-request")
    assert threads[1].startswith("weir-request")


def test_large_bodies_of_a_client_share_a_pace_while_there_are_answers(server, monkeypatch):
    limiter = requests.BodyLimiter(LIMITS)
    second = requests.PACE
    assert [limiter.delay("a", second, now) for now in (5.0, 5.5, 100.0)] == [1.0, 1.5, 1.0]
    assert limiter.delay("b", second, 100.0) == 1.0
    waited: list[int] = []

    def delay(it: Any, holder: str, size: int, now: float) -> float:
        waited.append(size)
        return 0.0

    monkeypatch.setattr(requests.BodyLimiter, "delay", delay)
    server.settled()
    assert server.post(CHAT, {**CHAT_BODY, "user": "x" * 500_000}).status_code == 200
    assert not waited
    monkeypatch.setattr(type(server.engine), "is_busy", True)
    assert server.post(CHAT, CHAT_BODY).status_code == 200
    assert not waited
    assert server.post(CHAT, {**CHAT_BODY, "user": "x" * 500_000}).status_code == 200
    assert 400_000 < sum(waited) < 600_000


def test_long_histories_rest_while_they_are_rendered(monkeypatch):
    client = make_client(limits=Limits())
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    client.matcher.match("", [Message("user", "a")] * 20, None)
    assert not rests
    said = [Message("user", "a"), Message("assistant", "b")] * 256
    client.matcher.match("", [*said, Message("user", "c")], None)
    assert rests.count(template_bounds.REST) >= 1


def test_the_bodies_of_all_requests_are_bounded_together(server):
    half = raw(server.port, CHAT, b" " * 1_900_000, length=1_900_001)
    while server.engine_client.open_requests("127.0.0.1") < 1:
        time.sleep(0.005)
    large = {**CHAT_BODY, "user": "x" * 1_900_000}
    while (answer := server.post(CHAT, large)).status_code == 200:
        pass  # until all of the first body has arrived
    assert answer.status_code == 429
    assert "too large together" in answer.json()["error"]["message"]
    assert server.post(CHAT, CHAT_BODY).status_code == 200
    half.close()
    server.settled()
    assert server.post(CHAT, large).status_code == 200


def test_slow_bodies_of_one_address_end_the_oldest_of_them_and_nobody_else(server, monkeypatch):
    monkeypatch.setattr(requests, "SLOW_SECONDS", 0)
    half = [raw(server.port, CHAT, b"{", length=50)]
    while server.engine_client.open_requests("127.0.0.1") < 1:
        time.sleep(0.005)
    half += [raw(server.port, CHAT, b"{", length=50) for _ in range(2)]
    heard = half[0].recv(1000)  # without waiting for the half minute that a body can take
    assert heard.startswith(b"HTTP/1.1 408"), heard
    assert server.post(CHAT, CHAT_BODY).status_code == 200
    for each in half:
        each.close()
    server.settled()


def test_media_types_are_compared_as_http_says(server):
    body = json.dumps(CHAT_BODY)

    def status(content: bytes, kind: str, **more: str) -> tuple[int, str | None]:
        headers = {"Content-Type": kind, **more}
        answer = httpx.post(f"{server.url}{CHAT}", content=content, headers=headers, timeout=600)
        code = answer.json()["error"]["code"] if answer.status_code != 200 else None
        return answer.status_code, code

    for kind in ("Application/JSON", "application/json; charset=UTF-8", "application/json ;x=y"):
        assert status(body.encode(), kind) == (200, None), kind
    assert status(body.encode(), "application/json", **{"Content-Encoding": "Identity"})[0] == 200
    wrong = (415, "unsupported_media_type")
    assert status(body.encode("utf-16"), "application/json; charset=utf-16") == wrong
    assert status(body.encode(), "application/json", **{"Content-Encoding": "gzip"}) == wrong
    assert status(body.encode(), "application/jsonx") == wrong
    # LiteLLM sends this type. A page in a browser would need permission to send it.
    assert status(body.encode(), "application/octet-stream") == (200, None)
    assert status(body.encode(), "application/octet-stream", Origin="http://a.b") != (200, None)


def test_a_request_has_one_length(server):
    body = json.dumps(CHAT_BODY).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = f"POST {CHAT} HTTP/%s\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    by_chunks = "Transfer-Encoding: chunked\r\n"
    for version, more in (
        ("1.1", f"Content-Length: {len(body)}\r\n{by_chunks}"),
        ("1.0", by_chunks),
        ("1.1", "Content-Length: -1\r\n"),
        ("1.1", "Content-Length: 1\r\nContent-Length: 2\r\n"),
    ):
        with socket.create_connection(("127.0.0.1", server.port), 600) as connection:
            connection.sendall((head % version + more + "\r\n").encode() + chunked)
            answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        assert answer.startswith("HTTP/1.1 400"), (version, more)
        error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")


def test_a_template_that_fails_is_a_400_or_ends_the_start(monkeypatch):
    ends_at_start = CHATML + "{{ 1/0 }}"
    with pytest.raises(WeirError, match=r"chat template of .* fails with ZeroDivisionError"):
        make_client(template=ends_at_start)
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 20_000)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for bad, why in (("{{ 1/0 }}", "ZeroDivisionError"), (loop, "does not finish")):
        template = CHATML + "{% if messages[0].content == 'bad' %}" + bad + "{% endif %}"
        with serving(make_client(template=template)) as server:
            answer = server.post(CHAT, {**CHAT_BODY, "messages": [{**USER, "content": "bad"}]})
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"]
            assert server.post(CHAT, CHAT_BODY).status_code == 200


@pytest.mark.parametrize("history", [1, prompts.LONG])
def test_turns_do_not_wait_for_a_template_that_loops(monkeypatch, history):
    loops, end = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if seconds == template_bounds.REST and threading.current_thread().name == "looping":
            loops.set()
            end.wait(0.001)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 10**12)
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 60.0)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    bad = "{% if messages[0].content[0] == 'b' %}" + loop + "{% endif %}"
    matcher = make_client(template=CHATML + bad).matcher
    refused: list[str] = []

    def ask() -> None:
        with pytest.raises(WeirError) as found:
            matcher.match("", [Message("user", "b" * history)], None)
        refused.append(str(found.value))

    looping = threading.Thread(target=ask, name="looping")
    looping.start()
    assert loops.wait(60)
    answers = ThreadPoolExecutor(1)
    size = answers.submit(matcher.match, "", [Message("user", "a" * history)], None)
    assert size.result(30).length > history
    assert looping.is_alive()
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 0)
    looping.join(60)
    assert "does not finish" in refused[0]


def test_a_stall_is_a_line_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(middleware, "STALL", 0.05)

    async def stall() -> None:
        watching = asyncio.create_task(middleware.watch_stalls())
        await asyncio.sleep(0)
        time.sleep(0.2)
        await asyncio.sleep(0.1)
        watching.cancel()

    monkeypatch.setattr(logging.getLogger("weir.serve"), "propagate", True)
    with caplog.at_level("WARNING", "weir.serve"):
        asyncio.run(stall())
    lines = [line for line in caplog.records if line.getMessage() == "stalled"]
    assert lines and lines[0].fields["seconds"] > 0 and lines[0].fields["ids"] == []


def test_what_is_too_long_is_refused_before_it_is_hashed(monkeypatch):
    client = make_client(limits=LIMITS)
    hashed: list[Message] = []
    monkeypatch.setattr(prompts, "hash_prefixes", lambda root, said: hashed.extend(said))
    with pytest.raises(PromptTooLong):
        client.matcher.match("", [Message("user", "x" * 10_000)], None)
    assert not hashed


def test_more_messages_than_tokens_are_refused_before_they_are_rendered(monkeypatch):
    client = make_client(limits=Limits(prompt=20))
    monkeypatch.setattr(client.renderer, "_template", None)  # a call would fail
    with pytest.raises(PromptTooLong):
        client.matcher.match("", [Message("user", "a")] * 21, None)


def test_only_the_newest_answers_of_a_history_are_looked_up(monkeypatch):
    client = make_client(limits=Limits())
    monkeypatch.setattr(prompts, "LOOKUPS", 3)
    looked = []
    monkeypatch.setattr(client.store, "find_history", lambda owner, chain: looked.append(chain))
    said = [Message("user", "a"), Message("assistant", "b")] * 5 + [Message("user", "c")]
    prompt = client.matcher.match("", said, None)
    hashes = client.matcher.hash_prefixes(said)
    assert looked == [hashes[9], hashes[7], hashes[5]]
    assert prompt.hash == hashes[-1]


@pytest.mark.slow
def test_long_texts_leave_threads_to_short_ones(server, monkeypatch):
    encoder = server.engine_client.renderer._encoder
    monkeypatch.setattr(chat_template, "PIECE", 200)
    monkeypatch.setattr(prompts, "LONG", 200)
    with ThreadPoolExecutor(20) as pool, contextlib.ExitStack() as held:
        held.enter_context(encoder._one_piece)  # long texts have to wait
        bodies = [{**CHAT_BODY, "messages": [{**USER, "content": "x" * 300}]}] * 20
        waiting = [pool.submit(server.post, CHAT, body) for body in bodies]
        while server.engine_client.open_requests("127.0.0.1") < 20:
            time.sleep(0.005)
        assert server.post(CHAT, CHAT_BODY).status_code == 200
        assert not any(each.done() for each in waiting)
        held.close()
        assert {each.result().status_code for each in waiting} == {200}


def test_every_400_has_a_code(server):
    bodies: list[dict[str, Any]] = [
        {**CHAT_BODY, "messages": [{"role": "assistant", "content": "x"}]},
        {**CHAT_BODY, "n": 100},
        {**CHAT_BODY, "top_logprobs": 2},
        {**CHAT_BODY, "tool_choice": "required"},
        {**CHAT_BODY, "logit_bias": {"x": 1}},
        {**CHAT_BODY, "stop": 5},
    ]
    for body in bodies:
        answer = server.post(CHAT, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), body


def test_json_that_the_parser_cannot_hold_is_not_called_invalid(server):
    for body, problem in (
        ("[" * 300 + "]" * 300, "the body is nested too deeply, at line 1 column"),
        (f'{{"seed": {"9" * 5000}}}', "the body has a number with too many digits, at line 1"),
    ):
        answer = httpx.post(
            f"{server.url}{CHAT}",
            content=body,
            headers={"content-type": "application/json"},
            timeout=600,
        )
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "invalid_json" and error["message"].startswith(problem)
