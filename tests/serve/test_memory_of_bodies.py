"""How much memory a hostile body takes, measured on a server in a separate process."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import pytest

from weir.serve.json_nodes import NodeCounter
from weir.serve.limits import MEMORY_OF_BYTE, NODE
from weir_bench.serving.attackers import make_bodies
from weir_bench.serving.server import Server, weir_serves
from weir_bench.timing import status_bytes

LARGE = 15_900_000
PAGES = 4_000_000
"""Bytes by which a process grows for other reasons, such as libraries and arenas of threads."""

WIDE = ("a wide word", "control tokens")
"""Texts that may take 8 times their bytes. Python stores each of their characters in 4 bytes if one
is beyond U+FFFF, or in 2 because weir puts marks of two bytes into control tokens."""

bodies_of = lru_cache(maxsize=1)(make_bodies)
"""Bodies of a size. They are cached, because making all kinds of large ones takes half a second."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(),
        reason="the peak of a process is read from /proc",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with weir_serves(Path("nano"), "--rows", 2, "--max-prompt", 4000) as server:
        send(server, "/v1/completions", b'{"model":"model","prompt":"a","max_tokens":2}')
        yield server


def send(server: Server, path: str, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    headers = {"Content-Type": "application/json", "Host": "localhost"}
    with suppress(OSError):  # the server can refuse it before all of it was sent
        connection.request("POST", path, body, headers)
        connection.getresponse().read()
    connection.close()


def peak_of(server: Server, path: str, body: bytes) -> int:
    """Return by how many bytes the server's memory rises at most while it works on a body."""
    processes, rise = [server.process.pid, *server.workers], 0
    for each in processes:
        Path(f"/proc/{each}/clear_refs").write_text("5")  # resets the peak to the current memory
        rise -= status_bytes(each, "VmRSS")
    send(server, path, body)
    return rise + sum(status_bytes(each, "VmHWM") for each in processes)


@pytest.mark.parametrize("kind", make_bodies("model", 1000))
def test_a_large_body_takes_four_times_its_bytes_at_most(server, kind):
    path, body = bodies_of("model", LARGE)[kind]
    times = 8 if kind in WIDE else 4
    assert peak_of(server, path, body) <= times * len(body) + PAGES


@pytest.mark.parametrize("kind", make_bodies("model", 1000))
def test_a_body_of_many_nodes_takes_what_the_start_counts_for_it(server, kind):
    path, body = bodies_of("model", 1_000_000)[kind]
    counter = NodeCounter(10**9)
    # Counting stops at too many nodes, as such a body is refused before it is parsed.
    with suppress(Exception):
        counter.feed(body)
    assert peak_of(server, path, body) <= MEMORY_OF_BYTE * (len(body) + NODE * counter.nodes)
