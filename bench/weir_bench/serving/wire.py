"""Requests over a plain socket, and when each event of an answer arrived.

A client's own work would be timed as the server's, and both share the machine: so this is as little
of HTTP as a server of OpenAI's API needs. Knows nothing about what is asked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from weir.errors import WeirError, quote


class Wire:
    """One connection to a server on this machine, opened again where it was closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def events(self, path: str, body: bytes) -> AsyncIterator[tuple[float, Any]]:
        """Post a JSON body that asks for a stream; each event's data and when it arrived."""
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
            if not whole:  # what is left of the answer would be taken for the next
                self.close()

    def close(self) -> None:
        """Hang up."""
        if self._open is not None:
            self._open[1].close()
        self._open = None

    async def _asked(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        """Send a request and read the head of its answer."""
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
                if new or not again:  # one that was kept may have been closed meanwhile
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
    """The chunks of a body (RFC 9112, section 7.1)."""
    try:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    except (OSError, asyncio.IncompleteReadError):
        raise WeirError("the answer breaks off") from None
