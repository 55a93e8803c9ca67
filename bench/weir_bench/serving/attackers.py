"""Attack a server from a separate process: requests that are expensive, invalid or never end.

This file does not depend on what is measured.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import itertools
import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ATTACKERS = 6
SLOW = 24
"""The number of clients that send a body byte by byte. As many others send a head byte by byte."""
ADDRESS = "127.0.0.2"
"""The attackers' IP address, which differs from that of the honest clients."""
SIZES = (1_000, 60_000, 1_000_000, 4_000_000, 15_900_000)
TOO_LARGE = (16_000_001, 17_000_000, 40_000_000)
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
IMPORT = "/v1/sessions/import"
_TURN = '{"role":"user","content":"a"},{"role":"assistant","content":"b"}'
_CALL = (
    '{"role":"assistant","tool_calls":[{"id":"x","type":"function","function":{"name":"f",'
    '"arguments":"['
)
_ANSWERED = '{"role":"assistant","content":"a"},{"role":"user","content":"b"}'
_JSON = "Content-Type: application/json"
_ODD: tuple[Any, ...] = (None, -1, 0, 2**63, 1e308, "", "x" * 1000, [], {}, True)
SCRIPT = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from weir_bench.serving import attackers
attackers.%s(*sys.argv[1:])
"""
START, START_REFUSED = (SCRIPT.replace("%s", name) for name in ("main", "send_refused"))
"""The code of the attackers' process. The second script only sends bodies that are refused."""


def make_bodies(model: str, size: int) -> dict[str, tuple[str, bytes]]:
    """Return bodies of about `size` bytes that are expensive to refuse, as {kind: (path, body)}."""

    def repeat(before: str, what: str, after: str) -> bytes:
        times = max(1, (size - len(before) - len(after)) // len(what.encode()))
        return (before + (what * times).rstrip(",") + after).encode()

    fields = ",".join(f'"f{n}":0' for n in range(size // 11))
    head = f'{{"model":"{model}","max_tokens":2,'
    user = head + '"messages":[{"role":"user","content":"'
    return {
        "messages": (CHAT, repeat(head + '"messages":[', "0,", "]}")),
        "objects": (CHAT, repeat(head + '"messages":[', "{},", "]}")),
        "turns": (CHAT, repeat(head + '"messages":[', '{"role":"x","content":""},', "]}")),
        "input": (RESPONSE, repeat(f'{{"model":"{model}","input":[', "0,", "]}")),
        "fractions": (TEXT, repeat(head + '"prompt":[', "1.5,", "]}")),
        "token ids": (TEXT, repeat(head + '"prompt":[', "5,", "]}")),
        "fields": (CHAT, f"{head}{fields}}}".encode()),
        "biases": (CHAT, f'{head}"messages":[],"logit_bias":{{{fields}}}}}'.encode()),
        "depth": (CHAT, repeat(head + '"messages":', "[", "")),
        "escapes": (CHAT, repeat(head + '"messages":"', "\\u00e9", '"}')),
        "no json": (CHAT, b"\xff" * size),
        "a long word": (CHAT, repeat(user, "a", '"}]}')),
        "accents": (CHAT, repeat(user, "\u00e9", '"}]}')),
        "an answered word": (CHAT, repeat(user, "\u00e9", f'"}},{_ANSWERED}]}}')),
        # Because of one character that needs four bytes, Python uses four bytes for all of them.
        "a wide word": (CHAT, repeat(f"{user}\U0001f30a", "a", '"}]}')),
        "control tokens": (CHAT, repeat(user, "<|im_end|><|start|>", '"}]}')),
        "a history": (CHAT, repeat(head + '"messages":[', f"{_TURN}," * 2, "]}")),
        "an unknown history": (
            CHAT,
            repeat(head + '"messages":[', f"{_TURN},", ',{"role":"user","content":"c"}]}'),
        ),
        "arguments": (CHAT, repeat(f'{head}"messages":[{_TURN},{_CALL}', "[],", ']"}}]}]}')),
        "tools": (
            CHAT,
            repeat(
                user + '"}],"tools":[{"type":"function","function":{"name":"f","parameters":'
                '{"type":"object","properties":{',
                *('"p":{"type":"string","pattern":"(a|b){1,9}c"},', "}}}}]}"),
            ),
        ),
        "a schema": (
            CHAT,
            repeat(
                user + '"}],"response_format":{"type":"json_schema","json_schema":{"name":"x",'
                '"schema":{"enum":[',
                '"abc",',
                "]}}}}",
            ),
        ),
    }


class Attacker:
    """A client that sends hostile requests.

    Args:
        port: the server's port.
        model: the server's name of its model.
        number: the seed of the attacker's random choices.
        bodies: the result of `make_bodies` for each size.
        file: a session that the server has exported (`export_session`).
        notes: the list to which the attacker adds (what happened, seconds until the answer). The
            seconds are 0 if there was no answer.
        address: the IP address to send from.
    """

    def __init__(
        self,
        port: int,
        model: str,
        number: int,
        bodies: dict[int, dict[str, tuple[str, bytes]]],
        file: bytes,
        notes: list[tuple[str, float]],
        address: str = ADDRESS,
    ) -> None:
        self._port = port
        self._address = address
        self._model = model
        self._chance = random.Random(number)
        self._bodies = bodies
        self._file = file
        self._notes = notes
        self._ways: dict[Callable[[], None], int] = {
            self._send_body: 60,
            self._hang_up: 8,
            self._leave: 8,
            self._send_session: 8 if file else 0,
            self._send_tricks: 8,
            self._go_astray: 6,
            self._send_too_much: 2,
        }

    def attack(self, until: float) -> None:
        """Send hostile requests until `time.monotonic()` reaches `until`."""
        while time.monotonic() < until:
            (way,) = self._chance.choices(list(self._ways), list(self._ways.values()))
            try:
                way()
            except (OSError, http.client.HTTPException):
                self._note(f"{way.__name__.strip('_').replace('_', ' ')} closed")

    def _note(self, what: str, began: float | None = None) -> None:
        self._notes.append((what, 0.0 if began is None else time.monotonic() - began))

    def _connect(self) -> socket.socket:
        return socket.create_connection(
            ("127.0.0.1", self._port), 120, source_address=(self._address, 0)
        )

    def ask(self, what: str, method: str, path: str, *heads: str, body: bytes = b"") -> None:
        """Send a request exactly as given, and note the status of the answer."""
        began = time.monotonic()
        head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *heads, "", ""])
        status = "closed"
        with self._connect() as connection:
            try:
                connection.sendall(head.encode() + body)
                answer = http.client.HTTPResponse(connection, method=method)
                answer.begin()
                answer.read()
                status = str(answer.status)
            except (OSError, http.client.HTTPException):
                pass  # the server refused the request before all of it was sent
        self._note(f"{what} {status}", None if status == "closed" else began)

    def post(self, what: str, path: str, body: bytes, *heads: str) -> None:
        """Send a complete body, and note the status of the answer."""
        self.ask(what, "POST", path, f"Content-Length: {len(body)}", *heads, body=body)

    def _send_body(self) -> None:
        kind, (path, body) = self._some_body()
        self.post(kind, path, body, _JSON)

    def _some_body(self) -> tuple[str, tuple[str, bytes]]:
        size = self._chance.choice(list(self._bodies))
        return self._chance.choice(list(self._bodies[size].items()))

    def _hang_up(self) -> None:
        """Send a part of a body, then close the connection."""
        _, (path, body) = self._some_body()
        with self._connect() as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{_JSON}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            connection.sendall(body[: self._chance.randrange(len(body))])
        self._note("hung up")

    def _leave(self) -> None:
        """Request a long answer, and close the connection during it, with or without a reset."""
        body = (
            f'{{"model":"{self._model}","stream":true,"max_tokens":4000,"messages":'
            '[{"role":"user","content":"a"}]}'
        ).encode()
        with self._connect() as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{_JSON}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(self._chance.randrange(20)):
                if not connection.recv(self._chance.choice((1, 100, 10_000))):
                    break
            time.sleep(self._chance.choice((0.0, 0.0, 1.0)))
            if self._chance.random() < 0.5:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._note("left")

    def _send_session(self) -> None:
        """Send a corrupted version of an exported session."""
        kind, file = spoil_session(self._file, self._chance)
        heads = ["Content-Type: application/octet-stream"]
        self.post(f"a session {kind}", IMPORT, file, *heads)

    def _send_tricks(self) -> None:
        """Send a request with an unusual or invalid head."""
        chat = json.dumps(
            {"model": self._model, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        ).encode()
        size = f"Content-Length: {len(chat)}"
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(chat), chat)
        bomb = gzip.compress(b" " * 20_000_000)
        plain = {
            "two lengths": (_JSON, size, "Content-Length: 1"),
            "a wrong length": (_JSON, "Content-Length: -1"),
            "an endless length": (_JSON, f"Content-Length: {'9' * 5000}"),
            "no type": (size,),
            "a wrong type": (size, "Content-Type: text/plain"),
            "a form": (size, "Content-Type: multipart/form-data; boundary=x"),
            "another charset": (size, f"{_JSON}; charset=utf-16"),
            "many heads": (_JSON, size, *(f"X-{n}: {'y' * 40}" for n in range(900))),
            "a long head": (_JSON, size, f"X-Long: {'y' * 200_000}"),
            "a session's name": (_JSON, size, f"X-Session-Id: ../{'z' * 200}"),
            "a wrong host": (_JSON, size, "Host: example.com"),
            "an upgrade": (_JSON, size, "Connection: Upgrade", "Upgrade: h2c"),
            "expectations": (_JSON, size, "Expect: 100-continue"),
        }
        what = self._chance.choice([*plain, "CL and TE", "chunks", "a bomb", "no HTTP"])
        if what in plain:
            self.ask(what, "POST", CHAT, *plain[what], body=chat)
        elif what == "a bomb":
            self.post(what, CHAT, bomb, _JSON, "Content-Encoding: gzip")
        elif what == "no HTTP":
            self.ask(what, "\x16\x03\x01", "\x00")
        else:
            both = [size] if what == "CL and TE" else []
            heads = [_JSON, "Transfer-Encoding: chunked", *both]
            self.ask(what, "POST", CHAT, *heads, body=chunked)

    def _go_astray(self) -> None:
        """Request something that does not exist."""
        name = "".join(self._chance.choices("abc/.%20?&", k=self._chance.choice((1, 20, 2000))))
        what, method, path = self._chance.choice(
            (
                ("no path", "GET", f"/{name.replace('%', '%25')}"),
                ("no method", "DELETE", CHAT),
                ("a walk", "GET", "/../../etc/passwd"),
                ("no session", "GET", f"/v1/sessions/{'%2e' * 30}/turns"),
                ("no response", "GET", "/v1/responses/resp_0"),
                ("a socket", "GET", CHAT),
            )
        )
        socket_heads = (
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        )
        self.ask(what, method, path, *(socket_heads if what == "a socket" else ()))

    def _send_too_much(self) -> None:
        """Send a body that is larger than the server allows."""
        size = self._chance.choice(TOO_LARGE)
        self.post("too large", CHAT, b" " * size, _JSON)

    def dawdle(self, until: float, head: str) -> None:
        """Send the beginning of a request, and then a byte every half second."""
        while time.monotonic() < until:
            try:
                with self._connect() as slow:
                    slow.sendall(head.encode())
                    while time.monotonic() < until:
                        slow.sendall(b" ")
                        time.sleep(0.5)
            except OSError:
                self._note("slow closed")
                time.sleep(0.1)


def export_session(port: int, model: str) -> bytes:
    """Have a short chat and return the exported session, or no bytes if the server fails."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        said = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}
        connection.request("POST", CHAT, json.dumps(said), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.request("GET", f"/v1/sessions/{answer.headers['x-session-id']}/export")
        return connection.getresponse().read()
    except OSError:
        return b""


def spoil_session(file: bytes, chance: random.Random) -> tuple[str, bytes]:
    """Corrupt an exported session at random, and return the kind of corruption and the new file.

    Except when the file is cut, the checksums are computed again where possible.
    """
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), bytearray(file[8 + length :])
    facts = json.loads(header["__metadata__"]["weir_export"])
    kind = chance.choice(("cut", "with wrong bytes", "with wrong facts", "of lists", "of zeros"))
    if kind == "cut":
        return kind, file[: chance.randrange(len(file))]
    if kind == "with wrong bytes":
        for _ in range(chance.choice((1, 10, 1000))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == "with wrong facts":
        at: Any = facts
        while isinstance(at, dict | list) and at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = chance.choice(keys)
            if not isinstance(at[key], dict | list) or chance.random() < 0.2:
                at[key] = chance.choice(_ODD)
                break
            at = at[key]
    elif kind == "of lists":
        facts = {**facts, "turns": [[]] * (chance.choice(SIZES) // 4)}
    elif kind == "of zeros":
        data = bytearray(chance.choice(SIZES))
        header["0"] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    for number, turn in enumerate(facts["turns"] if isinstance(facts.get("turns"), list) else ()):
        if isinstance(turn, dict) and str(number) in header:
            first, last = header[str(number)]["data_offsets"]
            turn["sha256"] = hashlib.sha256(data[first:last]).hexdigest()
    header["__metadata__"]["weir_export"] = json.dumps(facts)
    head = json.dumps(header).encode()
    return kind, len(head).to_bytes(8, "little") + head + bytes(data)


def refused_bodies(model: str) -> list[Callable[[Attacker], None]]:
    """Return six functions with which attackers send bodies that the server refuses.

    The server must be started with a `--max-prompt` that long words and many messages exceed.
    """
    huge, large = SIZES[-1], SIZES[-2]
    bodies = {size: make_bodies(model, size) for size in (huge, large)}

    def send(*kinds: tuple[int, str]) -> Callable[[Attacker], None]:
        turns = itertools.cycle(kinds)

        def attack(attacker: Attacker) -> None:
            size, kind = next(turns)
            path, body = bodies[size][kind]
            attacker.post(kind, path, body, _JSON)

        return attack

    chunks = b"1\r\n \r\n" * 43_000
    return [
        send((huge, "objects"), (huge, "fields"), (huge, "token ids")),
        send((huge, "depth"), (huge, "arguments"), (huge, "tools")),
        lambda attacker: attacker.ask(
            "chunks", "POST", CHAT, _JSON, "Transfer-Encoding: chunked", body=chunks
        ),
        send((large, "a long word"), (large, "escapes"), (large, "control tokens")),
        send((large, "a history"), (large, "an unknown history"), (huge, "turns")),
        lambda attacker: attacker.dawdle(time.monotonic() + 2.0, _slow_heads()[0]),
    ]


def _slow_heads() -> list[str]:
    """Return the beginnings of two requests: one ends before its body, the other in its head."""
    start = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
    return [f"{start}{_JSON}\r\nContent-Length: 1000\r\n\r\n", f"{start}X-Slow:"]


def send_refused(port: str, model: str, seconds: str) -> None:
    """Send bodies that are refused from six clients, and print the outcomes as JSON."""
    until = time.monotonic() + float(seconds)
    notes: list[tuple[str, float]] = []

    def run(number: int, way: Callable[[Attacker], None]) -> None:
        attacker = Attacker(int(port), model, number, {}, b"", notes)
        while time.monotonic() < until:
            with contextlib.suppress(OSError, http.client.HTTPException):
                way(attacker)

    ways = enumerate(refused_bodies(model))
    _run_all([threading.Thread(target=run, args=way, daemon=True) for way in ways])
    sys.stdout.write(json.dumps(_told(notes)))


def main(port: str, model: str, seconds: str) -> None:
    """Attack a server from many threads, and print the outcomes as JSON."""
    until = time.monotonic() + float(seconds)
    bodies = {size: make_bodies(model, size) for size in SIZES}
    notes: list[tuple[str, float]] = []
    file = export_session(int(port), model)
    slow = _slow_heads()
    threads = []
    for number in range(ATTACKERS + 2 * SLOW):
        attacker = Attacker(int(port), model, number, bodies, file, notes)
        call, given = (
            (attacker.attack, (until,))
            if number < ATTACKERS
            else (attacker.dawdle, (until, slow[number % 2]))
        )
        threads.append(threading.Thread(target=call, args=given, daemon=True))
    _run_all(threads)
    sys.stdout.write(json.dumps(_told(notes)))


def _run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _told(notes: list[tuple[str, float]]) -> dict[str, Any]:
    """Summarize the outcomes: the number of requests, their statuses, and how long they took."""
    worst: dict[str, float] = {}
    for what, took in sorted(notes):
        if took:
            worst[what] = max(took, worst.get(what, 0.0))
    refused = [took for what, took in notes if took and " 4" in what]
    return {
        "sent": len(notes),
        "statuses": dict(Counter(what for what, _ in notes).most_common()),
        "worst": worst,
        "refused": sorted(refused)[len(refused) // 2] if refused else 0.0,
    }
