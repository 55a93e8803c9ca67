"""Output queues: bounded, and never blocking the engine."""

from __future__ import annotations

import asyncio
import threading

from weir.serve import FailureEvent, OutputQueue, SampledToken, TokenEvent
from weir.serve.engine import Notifier


def token_event(number: int) -> TokenEvent:
    return TokenEvent(0, str(number), SampledToken(number), 0.0)


def test_events_come_in_order_from_any_thread():
    async def read() -> list[str]:
        queue = OutputQueue(asyncio.get_running_loop(), 1000)

        def post() -> None:
            for number in range(500):
                queue.put_now(token_event(number))
            queue.put_now(FailureEvent(0, ValueError("the end")))

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


def test_a_wake_that_comes_late_does_not_hold_the_loop():
    async def read() -> None:
        queue = OutputQueue(asyncio.get_running_loop(), 9)
        queue.put_now(token_event(0))
        assert len(await queue.take()) == 1  # and the wake for it is still to come
        waiting = asyncio.ensure_future(queue.take())
        rescue = threading.Timer(1.0, queue.put_now, [token_event(1)])  # ends a loop that is held
        rescue.start()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        rescue.cancel()
        queue.put_now(token_event(2))
        assert [e.text for e in await waiting if isinstance(e, TokenEvent)] == ["2"]

    asyncio.run(read())


def test_many_queues_are_woken_together_and_not_before():
    async def read() -> None:
        notifier, loop = Notifier(), asyncio.get_running_loop()
        queues = [OutputQueue(loop, 9) for _ in range(3)]
        waiting = [asyncio.ensure_future(queue.take()) for queue in queues]
        await asyncio.sleep(0)
        for number, queue in enumerate(queues):
            assert queue.put(token_event(number))
            notifier.add(queue)
            assert not queue.put(token_event(number))  # whoever is woken for one finds both
        for _ in range(3):
            await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        notifier.notify()
        notifier.notify()  # for nobody
        assert [len(await each) for each in waiting] == [2, 2, 2]

    asyncio.run(read())


def test_a_client_that_is_cut_off_is_told_so_by_the_notifier_too():
    async def read() -> None:
        notifier, queue = Notifier(), OutputQueue(asyncio.get_running_loop(), 1)
        assert queue.put(token_event(0))
        assert queue.put(token_event(1))
        assert not queue.put(token_event(2))
        notifier.add(queue)
        notifier.notify()
        await asyncio.wait_for(queue.overrun.wait(), 5)

    asyncio.run(read())


def test_what_is_too_much_is_lost_and_known_to_be():
    async def read() -> None:
        queue = OutputQueue(asyncio.get_running_loop(), 3)
        for number in range(3):
            queue.put_now(token_event(number))
        assert not queue.full
        queue.put_now(token_event(3))
        queue.put_now(FailureEvent(0, ValueError("cancelled")))
        assert queue.full
        await asyncio.wait_for(queue.overrun.wait(), 5)
        events = await queue.take()
        assert [e.text for e in events if isinstance(e, TokenEvent)] == ["0", "1", "2"]
        assert isinstance(events[-1], FailureEvent)

    asyncio.run(read())


def test_posting_to_a_loop_that_has_ended_hurts_nobody():
    async def make() -> OutputQueue:
        return OutputQueue(asyncio.get_running_loop(), 3)

    asyncio.run(make()).put_now(token_event(0))
