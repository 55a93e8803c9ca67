"""Measure the time to a turn's first token in long and in short conversations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from statistics import median

from weir_bench.figure import Row, compare
from weir_bench.serving.load import Heard
from weir_bench.serving.part import Plan, part
from weir_bench.serving.server import Server, weir_serves
from weir_bench.serving.talk import ById, Reply, Talk, something

TURNS = 10
"""Turns of each session in a round."""


@part("far")
def far(plan: Plan) -> Iterator[Row | Heard]:
    """Compare the time to the first token after `--far` tokens with that after `--near`.

    The client names the previous response by its id, or sends the whole history. A history that
    the server does not know is measured too.
    """
    with weir_serves(plan.folder, *plan.options, "--rows", 4) as server:
        plan.say(f"reading {plan.far:,} tokens")
        yield asyncio.run(_by(server, plan, Talk, "found by its history", None))
        yield asyncio.run(_by(server, plan, ById, "by id", 1.1))
        plan.say("resending all of it")
        yield asyncio.run(_resent(server, plan))


async def _by(server: Server, plan: Plan, kind: type[Talk], how: str, target: float | None) -> Row:
    """Return a row for the time to the first token in a long ÷ in a short session."""
    chance = random.Random(plan.manner.seed)
    long, short = (kind(server.port, server.model) for _ in range(2))
    try:
        seen, _ = await _begun(long, plan.far, chance), await _begun(short, plan.near, chance)
        times: list[tuple[Talk, list[float]]] = [(long, []), (short, [])]
        for _ in range(plan.rounds * TURNS):
            for talk, first in times:
                first.append((await _said(talk, chance)).first)
    finally:
        long.close()
        short.close()
    after, before = (median(first) for _, first in times)
    what = f"first token after {seen:,} tokens ÷ after {plan.near:,}, {how}"
    return compare(what, after, before, target)


async def _resent(server: Server, plan: Plan) -> Row:
    """Return a row for the time to the first token with an unknown ÷ with a known history."""
    chance = random.Random(plan.manner.seed + 1)
    talk = Talk(server.port, server.model)
    try:
        await _begun(talk, plan.far, chance)
        known = [(await _said(talk, chance)).first for _ in range(TURNS)]
        unknown = []
        for _ in range(plan.rounds):
            changed = {**talk.messages[0], "content": f"{chance.random()} never said. "}
            changed["content"] += talk.messages[0]["content"]
            other = Talk(server.port, server.model, messages=[changed, *talk.messages[1:]])
            unknown.append((await _said(other, chance)).first)
            other.close()
    finally:
        talk.close()
    what = f"first token after {plan.far:,} tokens, all of them read again ÷ found by their history"
    return compare(what, median(known), median(unknown), inverse=True)


async def _begun(talk: Talk, tokens: int, chance: random.Random) -> int:
    """Begin a conversation with about `tokens` tokens, and return how many the server read."""
    sample = (await talk.turn(something(chance, 100), 1)).read
    return (await talk.turn(something(chance, max(1, 100 * tokens // sample)), 1)).read + sample


async def _said(talk: Talk, chance: random.Random) -> Reply:
    return await talk.turn(something(chance, 4), 4)
