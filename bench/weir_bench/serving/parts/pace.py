"""Many sessions beside one, sessions that come by chance, and what of a step is not the model's."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from statistics import median

from weir.models import load
from weir_bench.figure import Row
from weir_bench.figures.rows import RaggedRows
from weir_bench.serving.load import Heard, Manner, opened, together
from weir_bench.serving.part import Plan, compare_pace, loop, part, ratio, take_turns
from weir_bench.serving.server import Server, weir_serves
from weir_bench.serving.talk import Talk
from weir_bench.serving.wire import Wire
from weir_bench.timing import undisturbed

BUSY = 0.7
"""The share of what a closed loop answers that arrives in the open loop."""
CHUNK = 64
"""Tokens between two folds, as `weir serve` has it."""
LONG = 2048
"""Tokens of answers while steps are counted, so that hardly any prompt is read meanwhile."""
CALLS = "weir_decode_calls_total"


@part("pace", "--sessions at once beside one, in turns; then as many turns by chance")
def pace(plan: Plan) -> Iterator[Row | Heard]:
    """Tokens per second through HTTP, closed loop, and the open loop at 70 % of them."""
    many = plan.sessions
    with weir_serves(plan.folder, *plan.options, "--rows", many) as server:
        alone, crowd = _talks(server, 1), _talks(server, many)
        rounds: list[tuple[Heard, Heard]] = []
        plan.say(f"{many} sessions beside one")
        loop(plan, server, crowd, "warming up")
        for _ in range(plan.rounds):
            one = loop(plan, server, alone, "one session")
            rounds.append((one, loop(plan, server, crowd, "all")))
        ones, alls = ([each[at] for each in rounds] for at in (0, 1))
        yield together("one session, closed loop", ones)
        every = together(f"{many} sessions, closed loop", alls)
        yield every
        what = f"tokens per second of {many} sessions ÷ of one, through HTTP"
        yield compare_pace(what, alls, ones, 8.0 if many == 16 else None, least=True)
        if all(each.worked and each.replies for each in (*ones, *alls)):
            ours, peer = ([each.worked_a_token for each in rounds] for rounds in (alls, ones))
            what = f"processor time a token of one session ÷ of {many}, prompts and HTTP included"
            note = "all threads of the server; what else the machine does counts less in it"
            own, other = median(ours) * 1e3, median(peer) * 1e3
            yield Row(what, own, other, "ms", ratio(peer, ours), note=note)
        rate = BUSY * median(each.pace for each in alls) / plan.manner.tokens
        plan.say(f"{rate:.2g} turns a second by chance")
        yield asyncio.run(
            opened(
                server,
                crowd,
                plan.manner,
                what=f"open loop, {rate:.2g} turns a second",
                seconds=plan.seconds * plan.rounds,
                rate=rate,
            )
        )


@part("share", "scheduler and HTTP as a share of a step of --sessions rows")
def share(plan: Plan) -> Iterator[Row | Heard]:
    """The time of a step through HTTP beside a bare call of the model over as many ragged rows."""
    model, _ = load(str(plan.folder), dtype="float32")
    rows, later = plan.sessions, [row * 37 % CHUNK for row in range(plan.sessions)]
    bare = RaggedRows(model, plan.policy, CHUNK, later, plan.budget)
    manner = Manner(plan.manner.words, LONG, plan.manner.seed)
    steps: list[float] = []
    calls: list[float] = []
    with weir_serves(plan.folder, *plan.options, "--rows", rows) as server:
        plan.say(f"steps of {rows} rows, bare and through HTTP")
        for _ in range(plan.rounds):
            calls.append(_bare(bare, plan.seconds))
            steps.append(asyncio.run(_step(server, _talks(server, rows), manner, plan.seconds)))
    yield Row(
        f"a step of {rows} sessions through HTTP ÷ the model's call alone, as a share of the step",
        median(steps) * 1e3,
        median(calls) * 1e3,
        "ms",
        median(1 - call / step for call, step in zip(calls, steps, strict=True)),
        0.1,
        note="folds in both; clients run beside the server",
    )


@part("alone", "--sessions clients on as many rows, beside one request at a time")
def alone(plan: Plan) -> Iterator[Row | Heard]:
    """A server of one row answers the same clients one after the other."""
    many = plan.sessions
    with (
        weir_serves(plan.folder, *plan.options, "--rows", many) as wide,
        weir_serves(plan.folder, *plan.options, "--rows", 1) as narrow,
    ):
        servers = {"rows": (wide, _talks(wide, many)), "one": (narrow, _talks(narrow, many))}
        plan.say(f"{many} clients on {many} rows and on one")
        heards = take_turns(plan, servers)
    yield together(f"{many} clients, {many} rows", heards["rows"])
    yield together(f"{many} clients, one request at a time", heards["one"])
    what = f"tokens per second of {many} clients on {many} rows ÷ one request at a time"
    yield compare_pace(what, heards["rows"], heards["one"])


def _talks(server: Server, number: int) -> list[Talk]:
    return [Talk(server.port, server.model) for _ in range(number)]


def _bare(rows: RaggedRows, seconds: float) -> float:
    """Seconds of a decode call over all rows, its folds in it."""
    with undisturbed():
        rows.step()
        done, since = 0, time.perf_counter()
        while time.perf_counter() < since + seconds:
            rows.step()
            done += 1
        return (time.perf_counter() - since) / done


async def _step(server: Server, talks: list[Talk], manner: Manner, seconds: float) -> float:
    """Seconds of a step while every client hears a long answer; then all hang up."""
    answers = [asyncio.ensure_future(talk.turn("Say on.", manner.tokens)) for talk in talks]
    wire = Wire(server.port)
    try:
        while (await _counted(wire, "weir_rows")) < len(talks):
            await asyncio.sleep(0.05)
        await asyncio.sleep(min(1.0, seconds / 4))  # until all prompts are read
        began, since = await _counted(wire, CALLS), time.perf_counter()
        await asyncio.sleep(seconds)
        done, until = await _counted(wire, CALLS), time.perf_counter()
        return (until - since) / max(1.0, done - began)
    finally:
        for answer, talk in zip(answers, talks, strict=True):
            answer.cancel()
            talk.close()
        await asyncio.gather(*answers, return_exceptions=True)
        while await _counted(wire, "weir_rows"):
            await asyncio.sleep(0.05)
        wire.close()


async def _counted(wire: Wire, name: str) -> float:
    """A number of the server's metrics; of its rows those that are busy."""
    said = name + ('{state="busy"}' if name == "weir_rows" else "")
    found = re.search(rf"^{re.escape(said)} (\S+)$", await wire.get("/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0
