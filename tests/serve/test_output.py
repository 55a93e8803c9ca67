"""A mailbox holds so much and no more, and never makes the engine wait."""

from __future__ import annotations

import asyncio
import threading

from weir.serve import FailureEvent, OutputQueue, SampledToken, TokenEvent
from weir.serve.engine import Notifier


def piece(number: int) -> TokenEvent:
    return TokenEvent(0, str(number), SampledToken(number), 0.0)


def test_events_come_in_order_from_any_thread():
    async def read() -> list[str]:
        mailbox = OutputQueue(asyncio.get_running_loop(), 1000)

        def post() -> None:
            for number in range(500):
                mailbox.post(piece(number))
            mailbox.post(FailureEvent(0, ValueError("the end")))

        thread = threading.Thread(target=post)
        thread.start()
        found: list[str] = []
        while True:
            for event in await mailbox.take():
                if isinstance(event, FailureEvent):
                    thread.join()
                    return found
                found.append(event.text)

    assert asyncio.run(read()) == [str(number) for number in range(500)]


def test_a_wake_that_comes_late_does_not_hold_the_loop():
    async def read() -> None:
        mailbox = OutputQueue(asyncio.get_running_loop(), 9)
        mailbox.post(piece(0))
        assert len(await mailbox.take()) == 1  # and the wake for it is still to come
        waiting = asyncio.ensure_future(mailbox.take())
        rescue = threading.Timer(1.0, mailbox.post, [piece(1)])  # ends a loop that is held
        rescue.start()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        rescue.cancel()
        mailbox.post(piece(2))
        assert [e.text for e in await waiting if isinstance(e, TokenEvent)] == ["2"]

    asyncio.run(read())


def test_many_mailboxes_are_woken_together_and_not_before():
    async def read() -> None:
        bell, loop = Notifier(), asyncio.get_running_loop()
        mailboxes = [OutputQueue(loop, 9) for _ in range(3)]
        waiting = [asyncio.ensure_future(mailbox.take()) for mailbox in mailboxes]
        await asyncio.sleep(0)
        for number, mailbox in enumerate(mailboxes):
            assert mailbox.put(piece(number))
            bell.add(mailbox)
            assert not mailbox.put(piece(number))  # whoever is woken for one finds both
        for _ in range(3):
            await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        bell.ring()
        bell.ring()  # for nobody
        assert [len(await each) for each in waiting] == [2, 2, 2]

    asyncio.run(read())


def test_a_client_that_is_cut_off_is_told_so_by_the_bell_too():
    async def read() -> None:
        bell, mailbox = Notifier(), OutputQueue(asyncio.get_running_loop(), 1)
        assert mailbox.put(piece(0))
        assert mailbox.put(piece(1))
        assert not mailbox.put(piece(2))
        bell.add(mailbox)
        bell.ring()
        await asyncio.wait_for(mailbox.overrun.wait(), 5)

    asyncio.run(read())


def test_what_is_too_much_is_lost_and_known_to_be():
    async def read() -> None:
        mailbox = OutputQueue(asyncio.get_running_loop(), 3)
        for number in range(3):
            mailbox.post(piece(number))
        assert not mailbox.full
        mailbox.post(piece(3))
        mailbox.post(FailureEvent(0, ValueError("cancelled")))
        assert mailbox.full
        await asyncio.wait_for(mailbox.overrun.wait(), 5)
        events = await mailbox.take()
        assert [e.text for e in events if isinstance(e, TokenEvent)] == ["0", "1", "2"]
        assert isinstance(events[-1], FailureEvent)

    asyncio.run(read())


def test_posting_to_a_loop_that_has_ended_hurts_nobody():
    async def make() -> OutputQueue:
        return OutputQueue(asyncio.get_running_loop(), 3)

    asyncio.run(make()).post(piece(0))
