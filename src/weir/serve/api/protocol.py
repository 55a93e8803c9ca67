"""HTTP/1.1 connections: uvicorn's, with limits on each client.

No client can take all connections, or keep one without sending a request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from weir.serve.api.errors import APIError
from weir.serve.limits import share_of

MAX_CONNECTIONS = 1024
"""From this many open connections on, every new request gets status 503."""
HEAD_SECONDS = 10.0
"""Seconds in which the head of a request should arrive. It may take up to twice as long."""
SMALL_CHUNK = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}\r\n")
"""The head of a chunk with fewer than 256 bytes, after another chunk."""
SMALL_CHUNKS = 2048
"""The most small chunks in a body, counted from zero again every `HEAD_SECONDS`.

Each takes as much time as a large one, and other requests wait for it.
"""
PROBES = 3
"""Number of probe writes that follow each other quickly."""
PROBE_SECONDS = 0.05
"""Seconds between two probe writes after a client has closed its side of the connection."""
LATER_SECONDS = 5.0
"""Seconds between later probe writes."""
PROBE = "probe"
"""The key, in a request's state, of a function that writes something into the response."""
_open: Counter[str] = Counter()  # connections by address


class BoundedConnection(H11Protocol):
    """A connection that is closed if its address has too many, or if the head of a request is slow.

    Attributes:
        bounded: whether there are limits on the connections of an address and on small chunks of a
            body.
    """

    bounded = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and wait for a request."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        _open[self._address] += 1
        self._known = self.scope
        self._small = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._end_slow)
        if self.bounded and _open[self._address] > share_of(MAX_CONNECTIONS):
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        super().connection_lost(exc)
        self._timer.cancel()
        _open[self._address] -= 1
        if not _open[self._address]:
            del _open[self._address]

    def data_received(self, data: bytes) -> None:
        """Receive data from the client, unless its body comes in too many small pieces."""
        begins = self.conn.their_state is not h11.SEND_BODY
        if begins:
            self._small = 0
        # The first data of a request may contain its head and much of its body.
        if begins or any(name == b"transfer-encoding" for name, _ in self.headers):
            self._small += len(SMALL_CHUNK.findall(data))
        if self.bounded and self._small > SMALL_CHUNKS:
            self._refuse(
                f"a body can have at most {SMALL_CHUNKS:,} chunks of fewer than 256 bytes in "
                f"{HEAD_SECONDS:.0f} seconds. Send larger chunks"
            )
            return
        super().data_received(data)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Continue the answer after a client has closed its side of the connection.

        A client may close its side after sending its request, but a client that disconnected looks
        the same. Two writes tell them apart: if the client is gone, its machine resets the
        connection after the first write, and the second one fails.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.conn.their_state is h11.SEND_BODY:
            return None
        self._probe(PROBES)
        return True

    def _probe(self, left: int) -> None:
        """Write something that clients ignore, and again later, until the response is complete or
        the connection is closed.

        `left` is the number of writes that follow each other quickly, including this one.
        """
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            if self.scope["http_version"] != "1.0":
                going_on = h11.InformationalResponse(
                    status_code=102, headers=[], reason=b"Processing"
                )
                self.transport.write(self.conn.send(going_on))
        elif (write := self.scope["state"].get(PROBE)) is not None:
            write()
        if left > 1:
            self.loop.call_later(PROBE_SECONDS, self._probe, left - 1)
        else:
            self.loop.call_later(LATER_SECONDS, self._probe, 1)

    def _should_upgrade(self) -> bool:
        """Never change the protocol: answer the request as plain HTTP, which RFC 9110 allows.

        uvicorn's method logs that a library for WebSockets is missing.
        """
        return False

    def _refuse(self, why: str) -> None:
        """End the request, with an error if there is no response yet, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(APIError(400, f"{why}."))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not valid HTTP/1.1, in OpenAI's format, and close the
        connection.
        """
        self._send_error(APIError(400, f"this is not a valid HTTP/1.1 request: {msg}"))

    def _send_error(self, error: APIError) -> None:
        """Send an error before there is any response, and close the connection."""
        body = json.dumps(error.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _end_slow(self) -> None:
        """Close the connection if no request has arrived since the last check, and none is being
        read. A client that has sent a part of a request's head gets status 408.
        """
        if self.conn.their_state is h11.IDLE and self.scope is self._known:
            if self.conn.trailing_data[0]:  # a part of a head
                self._send_error(
                    APIError(408, "the head of the request did not arrive in time. Send it faster.")
                )
            self.transport.close()
            return
        self._known = self.scope
        self._small = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._end_slow)
