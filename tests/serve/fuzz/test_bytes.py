"""Broken requests, sent to the server's socket, harm neither the server nor other conversations.

`WEIR_FUZZ=5000` sends 5,000 of them.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from servers import Server, make_client, serving

from weir.serve import Limits

ROUNDS = int(os.environ.get("WEIR_FUZZ", "120"))
LIMITS = Limits(body=20_000, prompt=400, answer=10, stall=0.5)
BODY = {
    "model": "small",
    "messages": [{"role": "user", "content": "Grüße"}],
    "max_tokens": 3,
    "temperature": 0,
    "stop": ["x"],
    "logit_bias": {"5": 1.5},
}
ODD = [
    *(b"\x00", b"\xff\xfe", b"\r\n", b"\n\n", b"\r\n\r\n", b"%00", b"../", b"{", b"}", b'"', b"\\"),
    *(b"\\ud800", b"NaN", b"1e999", b"-1", b"9" * 40, b"[" * 200, b"\xc3", b"\xed\xa0\x80"),
    *(b"HTTP/0.9", b"GET http://elsewhere/ HTTP/1.1", b"x-session-id: ../../etc\r\n"),
    *(b"Content-Length: 5\r\n", b"Content-Length: -5\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Host: elsewhere\r\n", b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(make_client(rows=2, limits=LIMITS)) as server:
        yield server


def request() -> bytes:
    """A valid request."""
    body = json.dumps(BODY, ensure_ascii=False).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def mangled(data: bytes, draw: random.Random) -> bytes:
    """A request with a few random changes."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(found) + 1)
        stop = min(len(found), start + draw.choice([0, 1, 1, 8, 60]))
        change = draw.randrange(4)
        if change == 0:
            found[start:stop] = draw.choice(ODD)
        elif change == 1:
            found[start:stop] = draw.randbytes(stop - start)
        elif change == 2:
            del found[start:stop]
        else:
            found[start:start] = found[start:stop] * draw.choice([2, 50])
    return bytes(found)


def sent(port: int, wait: float, data: bytes) -> bytes:
    """Send data, and return the response. Hang up if nothing comes for `wait` seconds."""
    heard = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                heard += part
        except (ConnectionError, TimeoutError):  # the server may close before it has read all
            pass
    return bytes(heard)


def test_no_bytes_harm_the_server_or_another_conversation(server: Server) -> None:
    first = BODY["messages"]
    answer = server.post("/v1/chat/completions", BODY).json()["choices"][0]["message"]
    history = [*first, answer, {"role": "user", "content": "And?"}]
    then = server.post("/v1/chat/completions", {**BODY, "messages": history}).json()["choices"]
    began = time.monotonic()
    assert sent(server.port, 60, request()).startswith(b"HTTP/1.1 ")
    wait = max(0.5, 8 * (time.monotonic() - began))  # eight are sent at once
    send = partial(sent, server.port, wait)
    draw = random.Random(0)
    asked = [mangled(request(), draw) for _ in range(ROUNDS)]
    heard: Counter[str] = Counter()
    with ThreadPoolExecutor(8) as pool:
        for data, told in zip(asked, pool.map(send, asked), strict=True):
            status = told[9:12].decode()
            heard[status] += 1
            assert not status.startswith("5") or status == "505", (data, told)  # HTTP/0.9
            assert b"Traceback" not in told, (data, told)
    assert heard["400"] > ROUNDS // 10, heard
    server.settled()
    assert httpx.get(f"{server.url}/health").status_code == 200
    again = server.post("/v1/chat/completions", {**BODY, "messages": history}).json()["choices"]
    assert again == then
