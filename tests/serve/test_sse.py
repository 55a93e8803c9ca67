"""Server-sent events: no client can leave an event unread forever."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi")

from weir.serve.api.sse import EventStream


def sent(pauses: list[float], stall: float) -> tuple[int, float]:
    """Send events to a client with these pauses. Return how many it took, and the time."""
    taken = 0

    async def frames():
        for _ in pauses:
            yield b"."

    async def run() -> float:
        async def send(message) -> None:
            nonlocal taken
            if message.get("body"):
                await asyncio.sleep(pauses[taken])
                taken += 1

        async def receive():
            await asyncio.sleep(3600)

        loop = asyncio.get_running_loop()
        began, closed = loop.time(), []
        stream = EventStream(
            frames(), asyncio.Event(), stall, lambda: closed.append(loop.time()), {}
        )
        await stream({}, receive, send)
        return closed[0] - began

    seconds = asyncio.run(run())
    return taken, seconds


def test_a_client_is_cut_off_that_leaves_one_event_unread_for_too_long():
    taken, seconds = sent([0.0, 0.3, 3600.0], stall=1.0)
    assert taken == 2
    assert seconds >= 1.3 - 0.01


def test_a_client_that_reads_slowly_but_reads_is_not():
    assert sent([0.3] * 5, stall=1.2)[0] == 5
