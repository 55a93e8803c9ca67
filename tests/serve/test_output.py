"""Output queues are bounded, keep the order of events, and never block the engine."""

from __future__ import annotations

import asyncio
import threading
import time

from weir.serve import SampledToken
from weir.serve.engine.output import EventSender, FailureEvent, OutputQueue, TokenEvent


def token_event(number: int) -> TokenEvent:
    return TokenEvent(0, str(number), SampledToken(number), 0.0)


def test_events_come_in_order_from_any_thread():
    async def read() -> list[str]:
        queue, sender = OutputQueue(asyncio.get_running_loop(), 1000), EventSender()

        def post() -> None:
            for number in range(500):
                sender.add(queue, token_event(number))
                if number % 3 == 0:
                    sender.send()
            sender.send_now(queue, FailureEvent(0, ValueError("the end")))

        thread = threading.Thread(target=post)
        thread.start()
        found: list[str] = []
        while True:
            for event in await queue.take():
                if isinstance(event, FailureEvent):
                    thread.join()
                    return found
                found.append(event.text)

    assert asyncio.run(read()) == [str(number) for number in range(500)]


def test_events_that_two_threads_send_come_in_the_order_they_were_added():
    came: list[int] = []
    waking = threading.Event()

    class Loop:
        def call_soon_threadsafe(self, put: object, events: list) -> None:
            if not waking.is_set():
                waking.set()
                time.sleep(0.1)  # enough time for the other thread to come first
            came.extend(event.answer for _, event in events)

    queue, sender = OutputQueue(Loop(), 9), EventSender()
    sender.add(queue, FailureEvent(0, ValueError()))
    thread = threading.Thread(target=sender.send)
    thread.start()
    assert waking.wait(60)
    sender.send_now(queue, FailureEvent(1, ValueError()))
    thread.join()
    assert came == [0, 1]


def test_the_events_of_many_queues_come_together_and_not_before():
    async def read() -> None:
        sender, loop = EventSender(), asyncio.get_running_loop()
        queues = [OutputQueue(loop, 9) for _ in range(3)]
        waiting = [asyncio.ensure_future(queue.take()) for queue in queues]
        for number, queue in enumerate(queues):
            sender.add(queue, token_event(number))
            # A reader that wakes up for one of them finds both.
            sender.add(queue, token_event(number))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        sender.send()
        sender.send()  # has nothing left to send
        assert [len(await each) for each in waiting] == [2, 2, 2]
        again = asyncio.ensure_future(queues[0].take())
        await asyncio.sleep(0)
        assert not again.done()
        again.cancel()

    asyncio.run(read())


def test_what_is_too_much_is_lost_and_known_to_be():
    async def read() -> None:
        sender, queue = EventSender(), OutputQueue(asyncio.get_running_loop(), 3)
        for number in range(3):
            sender.send_now(queue, token_event(number))
        await asyncio.sleep(0)
        assert not queue.overrun.is_set()
        sender.send_now(queue, token_event(3))
        sender.send_now(queue, FailureEvent(0, ValueError("cancelled")))
        await asyncio.wait_for(queue.overrun.wait(), 5)
        events = await queue.take()
        assert [e.text for e in events if isinstance(e, TokenEvent)] == ["0", "1", "2"]
        assert isinstance(events[-1], FailureEvent)

    asyncio.run(read())


def test_sending_to_a_loop_that_has_ended_hurts_nobody():
    async def make() -> OutputQueue:
        return OutputQueue(asyncio.get_running_loop(), 3)

    EventSender().send_now(asyncio.run(make()), token_event(0))
