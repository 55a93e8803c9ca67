"""Attacks on the server: small chunks, half characters, full disks and damaged files."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import sqlite3
import threading
import time

import httpx
import pytest
from servers import make_client, raw, serving
from test_early_bytes import LONG

from weir.serve import Limits
from weir.serve.messages import Call, Message

USER = {"role": "user", "content": "Hello there"}
MORE = {"role": "user", "content": "And then?"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with serving(make_client(limits=Limits(ping=0.2))) as server:
        yield server


def chat(*messages, **given):
    return {"model": "small", "messages": messages, "max_tokens": 5, "temperature": 0, **given}


def said(answer) -> dict:
    return {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}


def chunked(body: bytes, size: int) -> bytes:
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def send(port: int, body: bytes) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    parts = []
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        with contextlib.suppress(OSError):  # the server closed the connection
            connection.sendall(head.encode() + body)
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                parts.append(part)
    return b"".join(parts)


def test_a_body_of_small_chunks_holds_nobody_up(server):
    body = json.dumps(chat(USER, user="x" * 60_000)).encode()
    slowest, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal slowest
        while not done.is_set():
            began = time.perf_counter()
            httpx.get(f"{server.url}/health")
            slowest = max(slowest, time.perf_counter() - began)

    watching = threading.Thread(target=watch)
    watching.start()
    answer = send(server.port, chunked(body, 1))
    done.set()
    watching.join()
    assert answer.startswith(b"HTTP/1.1 400") or not answer
    assert slowest < 1.5
    few = json.dumps(chat(USER)).encode()
    for size in (1, 1000):
        assert send(server.port, chunked(few, size)).startswith(b"HTTP/1.1 200")
    assert send(server.port, chunked(body, 4096)).startswith(b"HTTP/1.1 200")


def test_half_characters_in_a_call_do_not_break_the_list_of_turns(server):
    call = {"id": "a", "type": "function"}
    call["function"] = {"name": "f", "arguments": '{"x": "\\ud800"}'}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    answer = server.post(CHAT, chat(*history), **{"x-session-id": "half"})
    assert answer.status_code == 200
    turns = httpx.get(f"{server.url}/v1/sessions/half/turns")
    assert turns.status_code == 200
    messages = turns.json()["data"][0]["messages"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"x": "\\ud800"}'
    assert Call("a", "f", '{"x": "\\ud83d\\ude00"}').parse_arguments() == {"x": "\U0001f600"}
    assert Message("assistant", "", calls=(Call("a", "f", '{"x":"\\ud800"}'),)).canonical()


@pytest.mark.parametrize("half_closed", [True, False])
def test_a_client_may_end_its_side_of_the_connection(server, half_closed):
    for streams in (False, True):
        body = json.dumps(chat({"role": "user", "content": LONG}, stream=streams)).encode()
        connection = raw(server.port, CHAT, body, "Connection: close")
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
            text = b"".join(parts)
            assert b"HTTP/1.1 200" in text
            assert b'"finish_reason":"length"' in text.replace(b": ", b":")
            connection.close()
        else:
            began = time.monotonic()
            time.sleep(0.2)  # so that the server is reading the prompt
            connection.close()
            server.settled()
            assert time.monotonic() - began < 10


def test_a_full_disk_is_507_for_files_too(tmp_path, monkeypatch):
    with serving(make_client(data=tmp_path)) as server:
        server.post(CHAT, chat(USER), **{"x-session-id": "one"})
        url = f"{server.url}/v1/sessions"
        file = httpx.get(f"{url}/one/export").content

        def refuse(*given, **more):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("weir.serve.sessions.export.save_file", refuse)
        answer = httpx.get(f"{url}/one/export")
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
        monkeypatch.setattr("weir.serve.api.sessions.open", refuse, raising=False)
        headers = {"content-type": "application/octet-stream"}
        answer = httpx.post(f"{url}/import", content=file, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
        monkeypatch.undo()
        assert httpx.post(f"{url}/import", content=file, headers=headers).status_code == 200


def test_a_file_of_empty_tensors_is_refused_before_they_are_listed(server):
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = {"__metadata__": {"weir_node": "{}"}, **{str(n): entry for n in range(200_000)}}
    data = json.dumps(header, separators=(",", ":")).encode()
    file = len(data).to_bytes(8, "little") + data
    headers = {"content-type": "application/octet-stream"}
    answer = httpx.post(f"{server.url}/v1/sessions/import", content=file, headers=headers)
    assert answer.status_code == 400
    assert "objects, lists and fields" in answer.json()["error"]["message"]


def test_damaged_snapshots_are_read_again_from_the_history(tmp_path):
    history = [USER]
    with serving(make_client(data=tmp_path)) as server:
        for _ in range(5):
            history += [said(server.post(CHAT, chat(*history))), MORE]
    damaged = [*tmp_path.rglob("*.safetensors")]
    assert len(damaged) == 5
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with serving(make_client(data=tmp_path)) as server, serving(make_client()) as fresh:
        answer = server.post(CHAT, chat(*history))
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        expected = fresh.post(CHAT, chat(*history))
        assert said(answer) == said(expected)
        again = server.post(CHAT, chat(*history, said(answer), MORE)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_database_is_named_in_the_log_and_not_to_clients(tmp_path, caplog):
    with serving(make_client(data=tmp_path)) as server:
        first = server.post(CHAT, chat(USER), **{"x-session-id": "one"})

        def fail(*given):
            raise sqlite3.DatabaseError("database disk image is malformed")

        server.store.place.db._reader.close()
        server.store.place.db._reader = type(
            "Broken", (), {"execute": fail, "close": lambda s: None}
        )()
        for path, body in ((CHAT, chat(USER, said(first), MORE)), ("/v1/sessions/one", None)):
            url = f"{server.url}{path}"
            answer = httpx.get(url) if body is None else server.post(path, body)
            assert answer.status_code == 500
            assert str(tmp_path) not in answer.text
        assert any(f"{tmp_path / 'weir.db'} is damaged" in line for line in caplog.messages)
