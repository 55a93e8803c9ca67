"""A closed loop of clients: each sends its next message as soon as it has its answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles
from typing import Any

import numpy as np

from weir.errors import WeirError
from weir_bench.serving.server import Server
from weir_bench.serving.talk import Reply, Talk, something

WORK = 100_000
"""The size of a sum that is timed to see how busy the machine is. It takes about 2 ms."""


@dataclass(frozen=True)
class Manner:
    """How clients talk.

    Attributes:
        words: words of each message. The tokenizers of the figures make about four tokens of a
            word.
        tokens: largest number of tokens of each answer.
        seed: part of the seed of each client's messages.
    """

    words: int = 4
    tokens: int = 128
    seed: int = 0


@dataclass
class Heard:
    """The measurements of a run of clients.

    Attributes:
        what: description of the run.
        clients: number of concurrent clients.
        spans: (since, until) of the measured periods, by `time.perf_counter`, one for each round.
        replies: answers of which a part arrived after measuring had begun.
        errors: the message of each failed turn.
        memory: (seconds since the start, bytes) of the server's memory.
        worked: the server's processor seconds in the whole run, including the time before and
            after the measured period.
        work: (seconds since the start, seconds) that a sum of fixed size took. This shows how busy
            the machine was otherwise.
        processor: (time, the server's processor seconds until then).
    """

    what: str
    clients: int
    spans: list[tuple[float, float]]
    replies: list[Reply] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    work: list[tuple[float, float]] = field(default_factory=list)
    worked: float = 0.0
    processor: list[tuple[float, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The length of the measured periods of all rounds, in seconds."""
        return sum(until - since for since, until in self.spans)

    @property
    def pace(self) -> float:
        """Tokens of answers per second, over all clients."""
        tokens = 0.0
        for reply in self.replies:
            inside = sum(self._within(when) for when in reply.arrived)
            tokens += reply.tokens * inside / len(reply.arrived)
        return tokens / self.seconds

    @property
    def worked_a_token(self) -> float:
        """The server's processor seconds for each token of an answer."""
        return self.worked / max(1, sum(reply.tokens for reply in self.replies))

    @property
    def first(self) -> list[float]:
        """Seconds to the first token of each turn that was sent in a measured period."""
        return [reply.first for reply in self.replies if self._within(reply.asked)]

    @property
    def between(self) -> list[float]:
        """Seconds between consecutive tokens of an answer."""
        return [
            after - before
            for reply in self.replies
            for before, after in zip(reply.arrived, reply.arrived[1:], strict=False)
            if self._within(before) and self._within(after)
        ]

    @property
    def worked_between(self) -> list[float]:
        """The server's processor seconds between consecutive tokens of an answer."""
        return self._worked(
            pair
            for reply in self.replies
            for pair in zip(reply.arrived, reply.arrived[1:], strict=False)
        )

    @property
    def worked_first(self) -> list[float]:
        """The server's processor seconds until the first token of each turn."""
        return self._worked((reply.asked, reply.arrived[0]) for reply in self.replies)

    def _worked(self, pairs: Iterable[tuple[float, float]]) -> list[float]:
        inside = [pair for pair in pairs if all(map(self._within, pair))]
        when, worked = np.array(self.processor).T
        spent = np.diff(np.interp(np.array(inside).reshape(-1, 2), when, worked))
        return [float(seconds) for (seconds,) in spent]

    def third(self, number: int) -> Heard:
        """Return the first (0), second (1) or last (2) third of a run of one round."""
        ((since, until),) = self.spans
        third = (until - since) / 3
        return replace(self, spans=[(since + number * third, since + (number + 1) * third)])

    @property
    def worked_within(self) -> float | None:
        """The server's processor seconds per token, from the first to the last reading.

        The readings are the entries of `processor`. Only entries in a measured period count. None
        if there are fewer than two, if no token arrived between them, or if the system has no
        processor times.
        """
        inside = [look for look in self.processor if self._within(look[0])]
        if len(inside) < 2:
            return None
        (since, before), (until, after) = inside[0], inside[-1]
        tokens = replace(self, spans=[(since, until)]).pace * (until - since)
        return (after - before) / tokens if tokens and after > before else None

    def _within(self, when: float) -> bool:
        return any(since <= when < until for since, until in self.spans)

    def as_json(self) -> dict[str, Any]:
        """Return the measurements as JSON values."""
        return {
            "what": self.what,
            "clients": self.clients,
            "seconds": self.seconds,
            "turns": len(self.first),
            "tokens_per_second": self.pace,
            "first_token_ms": percentiles(self.first),
            "between_tokens_ms": percentiles(self.between),
            "errors": len(self.errors),
            "error_kinds": sorted(set(self.errors))[:10],
            "worked_ms_a_token": self.worked_a_token * 1e3,
            "memory": self.memory,
            "work": self.work,
        }


def together(what: str, rounds: Sequence[Heard]) -> Heard:
    """Join the rounds of one contender to one run."""
    lists = ("spans", "replies", "errors", "memory", "work")
    joined: dict[str, list[Any]] = {
        name: [item for each in rounds for item in getattr(each, name)] for name in lists
    }
    worked = sum(each.worked for each in rounds)
    return Heard(what, rounds[0].clients, **joined, worked=worked)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 in milliseconds, or {} if there are no values."""
    if not seconds:
        return {}
    cuts = quantiles([*seconds, *seconds[:1]], n=100, method="inclusive")
    return {f"p{at}": cuts[at - 1] * 1e3 for at in (50, 95, 99)}


async def closed(
    server: Server,
    talks: Sequence[Talk],
    manner: Manner,
    *,
    what: str,
    seconds: float,
    warm: float = 0.0,
    every: float = 1.0,
    on_sample: Callable[[Heard], None] = lambda heard: None,
) -> Heard:
    """Let every client chat without a pause for some time, and return the measurements.

    Conversations continue from their current state, so that later calls can continue them again.

    Args:
        server: the server to measure.
        talks: the conversations, one for each client.
        manner: how clients talk.
        what: description of the run.
        seconds: length of the measured period.
        warm: seconds before the measured period.
        every: seconds between two readings of the server's memory and processor time.
        on_sample: called with the measurements so far after each reading.
    """
    start, before = time.perf_counter(), server.worked
    since = start + warm
    until = since + seconds
    heard = Heard(what, len(talks), [(since, until)])

    async def client(number: int, talk: Talk) -> None:
        chance = random.Random(f"{manner.seed} {number} {time.perf_counter_ns()}")
        while time.perf_counter() < until and server.running:
            try:
                reply = await talk.turn(something(chance, manner.words), manner.tokens)
            except WeirError as error:
                heard.errors.append(str(error))
                await asyncio.sleep(0.05)  # do not flood a server that refuses every request
            else:
                if reply.arrived[-1] >= since:
                    heard.replies.append(reply)

    async def watch() -> None:
        while True:
            now = time.perf_counter()
            heard.memory.append((now - start, server.memory))
            heard.processor.append((now, server.worked))
            sum(range(WORK))
            heard.work.append((now - start, time.perf_counter() - now))
            on_sample(heard)
            await asyncio.sleep(every)

    watching = asyncio.ensure_future(watch())
    try:
        await asyncio.gather(*(client(*each) for each in enumerate(talks)))
    finally:
        watching.cancel()
        for talk in talks:
            talk.close()  # a connection cannot be used in another event loop
    heard.worked = server.worked - before
    heard.memory.append((time.perf_counter() - start, server.memory))
    return heard
