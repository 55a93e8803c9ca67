"""Server-sent events to a client who may hang up, or stop reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.serve.app.answering import hung_up

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A response that is sent while it comes to be.

    Args:
        frames: what is sent; many events at a time where many are there.
        overrun: set when more waits for the client than may.
        stall: seconds that the client may leave what is sent unread.
        close: called when it is over, however.
        headers: beside those of an event stream.
        kind: its media type.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        overrun: asyncio.Event,
        stall: float,
        close: Callable[[], None],
        headers: dict[str, str],
        kind: str = "text/event-stream",
    ) -> None:
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type=kind, headers={**fixed, **headers})
        if "content-length" not in headers:
            del self.headers["content-length"]
        self._frames = frames
        self._overrun = overrun
        self._stall = stall
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client who is cut off gets no end of it."""
        writing = asyncio.ensure_future(self._write(send))
        watching = {
            asyncio.ensure_future(hung_up(receive)),
            asyncio.ensure_future(self._overrun.wait()),
        }
        try:
            await asyncio.wait({writing, *watching}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, *watching):
                task.cancel()
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for frame in self._frames:
            try:
                async with asyncio.timeout(self._stall):
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except TimeoutError:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def frame(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
