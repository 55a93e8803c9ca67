"""Server-sent events to a client that may disconnect or stop reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.serve.api.requests import wait_disconnect

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class KeepAlive:
    """A frame that is sent when nothing else was sent for some seconds."""

    seconds: float
    frame: Callable[[], bytes]


class EventStream(Response):
    """A response that is sent while it is generated.

    Its headers are sent at once, before there is a first frame.

    Args:
        frames: the bytes to send, in parts.
        overrun: set when too much of the answer waits for the client. The response then ends.
        stall: seconds that the client may leave sent data unread.
        close: called at the end, even if the client has disconnected.
        headers: additional headers.
        keep_alive: the frame that is sent when nothing else was sent for some seconds; None for
            no such frame.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        overrun: asyncio.Event,
        stall: float,
        close: Callable[[], None],
        headers: dict[str, str],
        media_type: str = "text/event-stream",
        keep_alive: KeepAlive | None = None,
    ) -> None:
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type=media_type, headers={**fixed, **headers})
        if "content-length" not in headers:
            del self.headers["content-length"]
        self._frames = frames
        self._overrun = overrun
        self._stall = stall
        self._close = close
        self._keep_alive = keep_alive
        self._sending_since: float | None = None
        self._sent = 0.0
        self._started = False
        self._probing: asyncio.Future[None] | None = None  # kept, or it could be garbage-collected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames. A client that does not read is disconnected."""
        writing = asyncio.ensure_future(self._write(send))
        others = set()
        if self._keep_alive is not None:
            scope.setdefault("state", {})["probe"] = partial(self._probe, send, self._keep_alive)
            others = {asyncio.ensure_future(self._keep_open(send, self._keep_alive))}
        watching = {
            asyncio.ensure_future(wait_disconnect(receive)),
            asyncio.ensure_future(self._overrun.wait()),
            asyncio.ensure_future(self._wait_stall()),
        }
        try:
            await asyncio.wait({writing, *watching}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, *watching, *others):
                task.cancel()
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._started = True
        async for frame in self._frames:
            await self._send_frame(send, frame)
        self._started = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frame(self, send: Send, frame: bytes) -> None:
        clock = asyncio.get_running_loop().time
        self._sending_since = clock()
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._sending_since = None
        self._sent = clock()

    def _probe(self, send: Send, keep_alive: KeepAlive) -> None:
        """Send the keep-alive frame, to see whether the client is still there."""
        if self._started and self._sending_since is None:
            self._probing = asyncio.ensure_future(self._send_frame(send, keep_alive.frame()))

    async def _keep_open(self, send: Send, keep_alive: KeepAlive) -> None:
        """Send a frame whenever nothing was sent for some seconds.

        Polls, for the reason given in `_wait_stall`.
        """
        clock = asyncio.get_running_loop().time
        left = keep_alive.seconds
        while True:
            await asyncio.sleep(left)
            left = self._sent + keep_alive.seconds - clock()
            if left > 0:
                continue
            left = keep_alive.seconds
            if self._started and self._sending_since is None:
                await self._send_frame(send, keep_alive.frame())

    async def _wait_stall(self) -> None:
        """Return when a frame has been left unread for too long.

        Polls, because setting a timer for every token would take longer than sending the token.
        """
        clock = asyncio.get_running_loop().time
        left = self._stall
        while left > 0:
            await asyncio.sleep(left)
            since = self._sending_since
            left = self._stall if since is None else since + self._stall - clock()


def encode_event(data: dict[str, Any]) -> bytes:
    """Encode an event with JSON data. The event is named if the data has a type."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {_to_json(data)}\n\n".encode()


_to_json = json.JSONEncoder(separators=(",", ":")).encode
