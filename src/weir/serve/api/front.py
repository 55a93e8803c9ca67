"""The front of a cluster: one address that forwards each request to one of several servers.

Every server is like that of `weir serve`, with all its limits. The front limits connections and
request heads, chooses a server, and copies bytes as fast as the receiver takes them. It does not
use Ray, and does not parse bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Protocol

import h11
from starlette.types import ASGIApp, Receive, Scope, Send

from weir.errors import WeirError
from weir.serve.api.dependencies import find_key
from weir.serve.api.errors import APIError, anthropic_error, ollama_error
from weir.serve.api.middleware import check_http
from weir.serve.api.protocol import MAX_CONNECTIONS, BoundedConnection
from weir.serve.api.sse import encode_event

LOG = logging.getLogger("weir.serve")
SECRET, ADDRESS = b"x-weir-front", b"x-weir-client"
"""Headers from the front to a server: the front's secret, and the client's address."""
AT_HOME = ("/v1/responses", "/v1/conversations")
SESSIONS = "/v1/sessions"
"""`AT_HOME`: the paths of responses and conversations. All requests to them with the same API key
go to the same server, the server of the key. `SESSIONS`: the paths of sessions.

Every server can read all sessions. A request that changes a session goes to the server of its key,
because it may also change responses.
"""
OF_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade")
)
"""Headers that are about one connection and are not forwarded."""
CHECKED = 2.0
"""Seconds between checks of the servers."""
PATIENCE = 10.0
"""Seconds to wait for a server to accept a connection, or to report its health."""
READ = 65_536
BUFFER = 65_536
"""How many bytes of an answer the operating system buffers between a server and the front.

The buffer is small so that a server soon notices a client that does not read.
"""


class Locate(Protocol):
    """Finds a server's address. A lost or `failed` server is started again first. May block."""

    def __call__(self, number: int, *, failed: bool) -> tuple[str, int]:
        """Return the host and port of a server."""


class FrontConnection(BoundedConnection):
    """A connection from the front, which already limits the client's connections and small
    chunks.
    """

    bounded = False


class OnlyFront:
    """Lets an application answer only requests from the front.

    Args:
        secret: the secret that the front sends.
    """

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request on behalf of the client that the front names."""
        if scope["type"] == "http":
            headers: list[tuple[bytes, bytes]] = list(scope["headers"])
            told = dict(headers)
            if not hmac.compare_digest(told.get(SECRET, b""), self._secret):
                error = APIError(
                    403,
                    "this server answers only requests from the front of its cluster. Send the "
                    "request to the front.",
                    code="not_the_front",
                )
                await error.response(scope["path"])(scope, receive, send)
                return
            rest = [one for one in headers if one[0] not in (SECRET, ADDRESS)]
            client = told.get(ADDRESS, b"").decode("latin-1"), 0
            scope = {**scope, "headers": rest, "client": client}
        await self._app(scope, receive, send)


def listen_for_front(host: str) -> socket.socket:
    """Listen on a free port of an address, for the front of a cluster."""
    is_ipv6 = isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    bound.bind((host, 0))
    bound.listen(MAX_CONNECTIONS)  # the front may connect as soon as it knows the port
    return bound


class Lost(WeirError):
    """A server does not answer."""


class Front:
    """An ASGI application that forwards requests to servers.

    Args:
        servers: number of servers.
        locate: finds the address of each server.
        secret: the secret by which servers recognize the front.
        has_keys: whether the servers accept only requests with an API key.
    """

    def __init__(self, servers: int, locate: Locate, secret: str, *, has_keys: bool = True) -> None:
        self._places: list[tuple[str, int] | None] = [None] * servers
        self._locate = locate
        self._secret = secret.encode()
        self._has_keys = has_keys
        self._busy: Counter[int] = Counter()
        self._is_ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or run the front from its start to its end."""
        if scope["type"] == "lifespan":
            await self._run(receive, send)
        elif scope["type"] == "http":
            error = check_http(scope)
            if error is None:
                error = await self._serve(scope, receive, send)
            if error is not None:
                await error.response(scope["path"])(scope, receive, send)

    def end(self) -> None:
        """Start no server again from now on, because all of them are shutting down."""
        self._is_ending = True

    # --- servers

    async def _run(self, receive: Receive, send: Send) -> None:
        await receive()
        for number in range(len(self._places)):
            await self._find(number, failed=False)
        await send({"type": "lifespan.startup.complete"})
        watching = [asyncio.ensure_future(self._watch(n)) for n in range(len(self._places))]
        await receive()
        for task in watching:
            task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch(self, number: int) -> None:
        """Check a server repeatedly. A server that is lost or has failed is started again."""
        while True:
            await asyncio.sleep(CHECKED)
            place, status = self._places[number], 0
            if place is not None:
                try:
                    status = await asyncio.wait_for(self._ask(place, "/health"), PATIENCE)
                except TimeoutError:
                    continue  # it is busy
                except (Lost, OSError, h11.ProtocolError):
                    self._places[number] = None
            if status != 200 and not self._is_ending:
                await self._find(number, failed=status == 503)

    async def _find(self, number: int, *, failed: bool) -> None:
        if failed:
            self._places[number] = None
        try:
            found = await asyncio.to_thread(self._locate, number, failed=failed)
        except Exception as error:
            if self._is_ending:
                return
            # The next check tries again, whatever has failed.
            unexpected = None if isinstance(error, WeirError) else error
            LOG.error("replica %d cannot be reached: %s", number, error, exc_info=unexpected)
            return
        self._places[number] = found

    async def _ask(self, place: tuple[str, int], path: str) -> int:
        """Return the status with which a server answers."""
        heads = [(b"host", b"localhost")]
        async with _connected(place) as link:
            await link.send(h11.Request(method="GET", target=path, headers=self._named(heads, "")))
            await link.send(h11.EndOfMessage())
            async for event in link.events():
                if isinstance(event, h11.Response):
                    return int(event.status_code)
        return 0

    def _named(self, headers: list[tuple[bytes, bytes]], address: str) -> list[tuple[bytes, bytes]]:
        own = (SECRET, self._secret), (ADDRESS, address.encode("latin-1", "replace"))
        return [*headers, *own, (b"connection", b"close")]

    def _choose(self, scope: Scope) -> list[int]:
        """Return the servers that may answer a request, the best first."""
        headers = dict(scope["headers"])
        numbers = range(len(self._places))
        key = b""
        if self._has_keys:  # without keys, all clients share their responses and sessions
            sent = (headers.get(name, b"") for name in (b"authorization", b"x-api-key"))
            key = find_key(*(value.decode("latin-1") for value in sent)).encode("latin-1")
        path: str = scope["path"]
        at_home = _is_below(path, *AT_HOME)
        session = headers.get(b"x-session-id")
        if _is_below(path, SESSIONS):
            at_home = scope["method"] != "GET"
            session = path.split("/")[3].encode() if path.count("/") > 2 else session
        if at_home:
            home = min(numbers, key=lambda n: _rank(key, n))
            return [home] if self._places[home] is not None else []
        if session is not None:
            chosen = sorted(numbers, key=lambda n: _rank(key + b"\0" + session, n))
        else:
            chosen = sorted(numbers, key=lambda n: self._busy[n])
        return [number for number in chosen if self._places[number] is not None]

    # --- requests

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> APIError | None:
        """Forward a request. Returns the error if no server could be reached."""
        for number in self._choose(scope):
            place = self._places[number]
            if place is None:
                continue
            self._busy[number] += 1
            try:
                async with _connected(place) as link:
                    await self._forward(link, scope, receive, send)
                return None
            except Lost:
                self._places[number] = None  # the server received nothing of the request
            finally:
                self._busy[number] -= 1
        return APIError(
            503,
            "the server for this request is being started. Try again in a moment.",
            code="server_closing",
            kind="server_error",
            headers={"Retry-After": "5"},
        )

    async def _forward(self, link: Link, scope: Scope, receive: Receive, send: Send) -> None:
        address = scope["client"][0] if scope.get("client") else ""
        target = scope["raw_path"] + (
            b"?" + scope["query_string"] if scope["query_string"] else b""
        )
        headers = [one for one in scope["headers"] if one[0] not in (*OF_HOP, SECRET, ADDRESS)]
        if not any(name == b"host" for name, _ in headers):
            headers.append((b"host", b""))
        request = h11.Request(
            method=scope["method"], target=target, headers=self._named(headers, address)
        )
        await link.send(request)
        feeding = asyncio.ensure_future(_feed(link, receive))
        answering = asyncio.ensure_future(_answer(link, scope, send))
        try:
            await asyncio.wait({feeding, answering}, return_when=asyncio.FIRST_COMPLETED)
            # The request ends when the client disconnects, not when its body ends.
            if not answering.done() and feeding.exception() is None:
                return
            await answering
        finally:
            for task in (feeding, answering):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await feeding


class Link:
    """A connection to a server, for one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, event: h11.Event) -> None:
        """Send a part of a request, as fast as the server accepts it."""
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()

    async def events(self) -> AsyncIterator[h11.Event]:
        """Yield the parts of the answer. Raises OSError or h11.ProtocolError if it breaks off."""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(READ))
                continue
            if isinstance(event, h11.ConnectionClosed):
                raise ConnectionResetError
            assert isinstance(event, h11.Event)  # PAUSED occurs only in servers
            yield event
            if isinstance(event, h11.EndOfMessage):
                return

    def close(self) -> None:
        """Disconnect at once, so that the server gives up unfinished work."""
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def _connected(place: tuple[str, int]) -> AsyncIterator[Link]:
    try:
        streams = await asyncio.wait_for(asyncio.open_connection(*place), PATIENCE)
    except (OSError, TimeoutError) as error:
        raise Lost(f"{place[0]}:{place[1]} does not answer: {error}") from None
    streams[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    link = Link(*streams)
    try:
        yield link
    finally:
        link.close()


async def _feed(link: Link, receive: Receive) -> None:
    """Send a request's body to a server. Return when the client disconnects."""
    more = True
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not more:
            continue
        more = message.get("more_body", False)
        if message.get("body"):
            await link.send(h11.Data(data=message["body"]))
        if not more:
            await link.send(h11.EndOfMessage())


async def _answer(link: Link, scope: Scope, send: Send) -> None:
    """Send a server's answer to the client, or report that it broke off."""
    kind: bytes | None = None
    try:
        async for event in link.events():
            if isinstance(event, h11.Response):
                left_out = (*OF_HOP, b"transfer-encoding", b"date")
                headers = [(name, value) for name, value in event.headers if name not in left_out]
                kind = dict(headers).get(b"content-type", b"")
                status = event.status_code
                start = {"type": "http.response.start", "status": status, "headers": headers}
                await send(start)
            elif isinstance(event, h11.Data):
                data = bytes(event.data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
    except (OSError, h11.ProtocolError):
        error = APIError(
            503,
            "the server stopped while it was answering. The unfinished answer is not saved. Send "
            "the request again.",
            code="server_error",
            kind="server_error",
            headers={"Retry-After": "1"},
        )
        if kind is None:
            await error.response(scope["path"])(scope, _nothing, send)
        elif kind.startswith((b"text/event-stream", b"application/x-ndjson")):
            data = encode_failure(error, scope["path"])
            await send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            raise  # the client sees from the length that the answer is incomplete


async def _nothing() -> Any:
    return {"type": "http.disconnect"}


def encode_failure(error: APIError, path: str) -> bytes:
    """Encode the failure of a stream in the format of the API that a path belongs to."""
    if path.startswith("/api/"):
        return json.dumps(ollama_error(error)).encode() + b"\n"
    if path.startswith("/v1/messages"):
        return encode_event(anthropic_error(error))
    if path.startswith("/v1/responses"):
        facts = error.body["error"]
        told = {name: facts[name] for name in ("code", "message", "param")}
        return encode_event({"type": "error", **told})
    return encode_event(error.body)


def _is_below(path: str, *places: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in places)


def _rank(what: bytes, number: int) -> bytes:
    """Rank a server for a key by rendezvous hashing.

    The order of the servers stays the same as long as their number does not change. If it changes,
    most keys keep their server.
    """
    return hashlib.sha256(b"%d\0" % number + what).digest()
