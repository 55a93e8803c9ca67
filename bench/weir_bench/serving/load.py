"""Many conversations at once, as fast as each is answered.

N clients, each of which says the next thing when it has its answer.
"""

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
"""Numbers that are added up to see how busy the machine is; some two milliseconds."""


@dataclass(frozen=True)
class Manner:
    """How clients talk.

    Attributes:
        words: of each thing said; the tokenizers of the figures make some four tokens of one.
        tokens: of each answer.
        seed: of what is said and when.
    """

    words: int = 4
    tokens: int = 128
    seed: int = 0


@dataclass
class Heard:
    """What all clients of a run heard.

    Attributes:
        what: the run, in words.
        clients: at once.
        spans: (since, until) of what is measured, by `time.perf_counter`; one for each round.
        replies: answers of which a part came then.
        errors: what went wrong, each time.
        memory: (seconds since the start, bytes) of the server.
        worked: seconds that processors worked for the server, with what was done before and after
            it was measured.
        work: (seconds since the start, seconds) that some work of always the same size took beside
            it: what else the machine was doing.
        processor: (when, seconds) that processors had worked for the server until then.
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
        """How long was measured, all rounds together."""
        return sum(until - since for since, until in self.spans)

    @property
    def pace(self) -> float:
        """Tokens of answers a second, all clients together."""
        tokens = 0.0
        for reply in self.replies:
            inside = sum(self._within(when) for when in reply.arrived)
            tokens += reply.tokens * inside / len(reply.arrived)
        return tokens / self.seconds

    @property
    def worked_a_token(self) -> float:
        """Seconds that processors worked for each token of an answer."""
        return self.worked / max(1, sum(reply.tokens for reply in self.replies))

    @property
    def first(self) -> list[float]:
        """Seconds to the first token of each turn that was asked for meanwhile."""
        return [reply.first for reply in self.replies if self._within(reply.asked)]

    @property
    def between(self) -> list[float]:
        """Seconds between tokens."""
        return [
            after - before
            for reply in self.replies
            for before, after in zip(reply.arrived, reply.arrived[1:], strict=False)
            if self._within(before) and self._within(after)
        ]

    @property
    def worked_between(self) -> list[float]:
        """Seconds that processors worked for the server between two tokens of an answer."""
        return self._worked(
            pair
            for reply in self.replies
            for pair in zip(reply.arrived, reply.arrived[1:], strict=False)
        )

    @property
    def worked_first(self) -> list[float]:
        """Seconds that they worked until the first token of each turn."""
        return self._worked((reply.asked, reply.arrived[0]) for reply in self.replies)

    def _worked(self, pairs: Iterable[tuple[float, float]]) -> list[float]:
        inside = [pair for pair in pairs if all(map(self._within, pair))]
        when, worked = np.array(self.processor).T
        spent = np.diff(np.interp(np.array(inside).reshape(-1, 2), when, worked))
        return [float(seconds) for (seconds,) in spent]

    def third(self, number: int) -> Heard:
        """The first, second or third third of a run of one round: 0, 1 or 2."""
        ((since, until),) = self.spans
        third = (until - since) / 3
        return replace(self, spans=[(since + number * third, since + (number + 1) * third)])

    @property
    def worked_within(self) -> float | None:
        """Seconds that processors worked for each token, from the first look at them to the last.

        None where nobody looked twice, no token came meanwhile or the system does not tell.
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
        """The measurements as JSON values."""
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
    """Rounds of one contender as one run."""
    lists = ("spans", "replies", "errors", "memory", "work")
    joined: dict[str, list[Any]] = {
        name: [item for each in rounds for item in getattr(each, name)] for name in lists
    }
    worked = sum(each.worked for each in rounds)
    return Heard(what, rounds[0].clients, **joined, worked=worked)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds; none of nothing."""
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
    """Every client talks without a pause; conversations go on where they stand, and then rest.

    `warm` seconds come before the `seconds` that are measured. Every `every` seconds the server's
    memory is read, and `on_sample` is called.
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
                await asyncio.sleep(0.05)  # a server that refuses all is not asked without a pause
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
            talk.close()  # a connection is of one event loop
    heard.worked = server.worked - before
    heard.memory.append((time.perf_counter() - start, server.memory))
    return heard
