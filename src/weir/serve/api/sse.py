"""Server-sent events to a client who may hang up, or stop reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.serve.api.generation import hung_up

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
        self._since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client who is cut off gets no end of it."""
        writing = asyncio.ensure_future(self._write(send))
        watching = {
            asyncio.ensure_future(hung_up(receive)),
            asyncio.ensure_future(self._overrun.wait()),
            asyncio.ensure_future(self._stalled()),
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
        clock = asyncio.get_running_loop().time
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for frame in self._frames:
            self._since = clock()
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            self._since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stalled(self) -> None:
        """Returns when something that was sent has been left unread for too long.

        One look now and then: to set a timer for every token takes longer than to send it.
        """
        clock = asyncio.get_running_loop().time
        left = self._stall
        while left > 0:
            await asyncio.sleep(left)
            left = self._stall if self._since is None else self._since + self._stall - clock()


def frame(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class TextFrame:
    """Events that are alike but for one text: all else is made once.

    Args:
        data: an event whose text is `mark`, which is nowhere else in it.
        mark: something that nobody says.
    """

    def __init__(self, data: dict[str, Any], mark: str) -> None:
        self._before, self._after = frame(data).split(json.dumps(mark).encode())

    def saying(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + json.dumps(text).encode() + self._after
