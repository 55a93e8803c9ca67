"""A minimal HTTP client that records when each event of an answer arrives.

The client and the server share the machine, so the client's work adds to the measured times.
Therefore this file implements only the part of HTTP that servers with OpenAI's API need.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from weir.errors import WeirError, quote


class Wire:
    """A connection to a server on this machine, which is opened again if it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def events(self, path: str, body: bytes) -> AsyncIterator[tuple[float, Any]]:
        """Post a JSON body that asks for a stream, and yield each event's arrival time and data."""
        reader, status, headers = await self._asked("POST", path, body)
        if status != 200 or "event-stream" not in headers.get("content-type", ""):
            raise WeirError(f"{path} answers {status}: {quote(await _whole(reader, headers))}")
        rest, whole = b"", False
        try:
            async for part in _chunks(reader):
                now = time.perf_counter()
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    for line in event.split(b"\n"):
                        data = line.removeprefix(b"data:").strip()
                        if line.startswith(b"data:") and data != b"[DONE]":
                            yield now, json.loads(data)
            whole = True
        finally:
            if not whole:  # the rest of this answer would be read as the next one
                self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._open is not None:
            self._open[1].close()
        self._open = None

    async def _asked(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        """Send a request, and return the reader of its answer, the status and the headers."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        for again in (True, False):
            new = self._open is None
            try:
                if self._open is None:
                    self._open = await asyncio.open_connection("127.0.0.1", self._port)
                reader, writer = self._open
                writer.write(head.encode() + body)
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                break
            except (OSError, asyncio.IncompleteReadError) as error:
                self.close()
                if new or not again:  # retry once: the server may have closed a kept connection
                    raise WeirError(f"the server does not answer: {error}") from None
        named = [line.partition(":") for line in lines if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in named}
        return reader, int(first.split()[1]), headers


async def _whole(reader: asyncio.StreamReader, headers: dict[str, str]) -> str:
    try:
        if "content-length" in headers:
            return (await reader.readexactly(int(headers["content-length"]))).decode()
        return b"".join([part async for part in _chunks(reader)]).decode()
    except asyncio.IncompleteReadError:
        raise WeirError("the answer breaks off") from None


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of a body (RFC 9112, section 7.1)."""
    try:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    except (OSError, asyncio.IncompleteReadError):
        raise WeirError("the answer breaks off") from None
