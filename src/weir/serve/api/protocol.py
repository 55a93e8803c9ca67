"""HTTP/1.1 connections: uvicorn's, but no client can hold them all, nor one without a request."""

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
"""Connections that may be open at once; further requests get 503."""
HEAD_SECONDS = 10.0
"""Seconds in which the head of a request must come; it may take twice as long."""
SMALL_CHUNK = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}\r\n")
"""The head of a chunk with fewer than 256 bytes, after another one."""
SMALL_CHUNKS = 2048
"""Small chunks that a body may have. Each takes as much time as a large one, and other requests
wait for it.
"""
PROBES = 3
PROBE_SECONDS = 0.05
"""Writes, and seconds between them, after a client has ended its side of the connection."""
LATER_SECONDS = 5.0
"""Seconds between such writes from then on."""
PROBE = "probe"
"""The key, in the state of a request, of the function that writes something into its response."""
_open: Counter[str] = Counter()  # connections by address


class BoundedConnection(H11Protocol):
    """A connection, which is closed where its address has a share of all, or its head is slow.

    Attributes:
        bounded: whether an address may have a share of the connections only, and a body so many
            small chunks.
    """

    bounded = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and begin to wait for a request."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        _open[self._address] += 1
        self._known = self.scope
        self._small = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._end_slow)
        if self.bounded and _open[self._address] > share_of(MAX_CONNECTIONS):
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no longer."""
        super().connection_lost(exc)
        self._timer.cancel()
        _open[self._address] -= 1
        if not _open[self._address]:
            del _open[self._address]

    def data_received(self, data: bytes) -> None:
        """Take data from the client, unless its body comes in too many small pieces."""
        begins = self.conn.their_state is not h11.SEND_BODY
        if begins:
            self._small = 0
        # The first data of a request may have its head and much of its body.
        if begins or any(name == b"transfer-encoding" for name, _ in self.headers):
            self._small += len(SMALL_CHUNK.findall(data))
        if self.bounded and self._small > SMALL_CHUNKS:
            self._refuse(f"a body may have {SMALL_CHUNKS:,} chunks of fewer than 256 bytes")
            return
        super().data_received(data)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Go on with the answer after a client has closed its side of the connection.

        A client may do so when it has sent its request, but a client that has hung up looks the
        same. Two writes tell them apart: if it has hung up, its machine resets the connection after
        the first, and the second fails.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.conn.their_state is h11.SEND_BODY:
            return None
        self._probe(PROBES)
        return True

    def _probe(self, left: int) -> None:
        """Write something that the client ignores, if it is there."""
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

    def _refuse(self, why: str) -> None:
        """End the request, with an error if there is no response yet, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.send_400_response(why)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request of HTTP/1.1, in OpenAI's form, and close the connection."""
        error = APIError(400, f"this is not a request that HTTP/1.1 or this server allows: {msg}")
        body = json.dumps(error.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _end_slow(self) -> None:
        """Close the connection if no request has come since the last look, and none is read."""
        if self.conn.their_state is h11.IDLE and self.scope is self._known:
            self.transport.close()
            return
        self._known = self.scope
        self._small = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._end_slow)
