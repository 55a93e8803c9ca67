"""HTTP/1.1 connections: uvicorn's, but no client can hold them all, nor one without a request."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from weir.serve.api.errors import APIError
from weir.serve.limits import share_of

MAX_CONNECTIONS = 1024
"""Connections that may be open at once; further requests get 503."""
HEAD_SECONDS = 10.0
"""Seconds in which the head of a request must come; it may take twice as long."""
_open: Counter[str] = Counter()  # connections by address


class BoundedConnection(H11Protocol):
    """A connection, which is closed where its address has a share of all, or its head is slow."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and begin to wait for a request."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        _open[self._address] += 1
        self._known = self.scope
        self._timer = self.loop.call_later(HEAD_SECONDS, self._end_slow)
        if _open[self._address] > share_of(MAX_CONNECTIONS):
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no longer."""
        super().connection_lost(exc)
        self._timer.cancel()
        _open[self._address] -= 1
        if not _open[self._address]:
            del _open[self._address]

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request of HTTP/1.1, in OpenAI's form, and close the connection."""
        error = APIError(400, f"this is no request of HTTP/1.1 ({msg})")
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
        self._timer = self.loop.call_later(HEAD_SECONDS, self._end_slow)
