"""Measure whether memory or waiting times grow when a server is under load for a long time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from statistics import mean, median

from weir_bench.figure import Row, Skipped, compare
from weir_bench.serving.load import Heard, closed
from weir_bench.serving.part import Plan, part
from weir_bench.serving.server import weir_serves
from weir_bench.serving.talk import Talk

WARM = 1 / 6
"""The share of the run after which memory must not grow any more.

By then, all rows, threads and memory pools have been used.
"""


@part("soak", asked=True)
def soak(plan: Plan) -> Iterator[Row | Heard]:
    """Run endless conversations for `--minutes`, with a row for each. Turns are saved on disk."""
    seconds = plan.minutes * 60
    data = plan.scratch / "soak"
    rows = ("--rows", str(plan.sessions), "--data", str(data), "--disk", "1GB")
    plan.say(f"{plan.sessions} sessions for {plan.minutes:g} minutes")
    with weir_serves(plan.folder, *plan.options, *rows) as server:
        talks = [Talk(server.port, server.model) for _ in range(plan.sessions)]
        heard = asyncio.run(
            closed(
                server,
                talks,
                plan.manner,
                what=f"soak of {plan.minutes:g} minutes, {plan.sessions} sessions",
                seconds=seconds,
                warm=min(10.0, seconds / 10),
                every=max(0.1, seconds / 360),
                on_sample=plan.on_heard,
            )
        )
    yield heard
    if heard.errors:
        raise Skipped(f"{len(heard.errors)} turns failed, the first of them: {heard.errors[0]}")
    thirds = [heard.third(number).between for number in (2, 0)]
    if not all(thirds):
        raise Skipped("in a third of the soak, no two tokens arrived. Use more --minutes.")
    last, first = map(median, thirds)
    third = heard.work[-1][0] / 3
    late, early = (
        mean(took for when, took in heard.work if number * third <= when <= (number + 1) * third)
        for number in (2, 0)
    )
    note = f"a fixed sum, timed in the same process, took {late / early:.3g} times as long"
    what = "median time between tokens, last third of the soak ÷ first"
    yield compare(what, last, first, 1.05, note=note)
    last_work, first_work = (heard.third(number).worked_within for number in (2, 0))
    if last_work and first_work:
        note = "all threads of the server; other load on the machine affects this less"
        what = "processor time a token, last third of the soak ÷ first"
        yield compare(what, last_work, first_work, note=note)
    end = heard.memory[-1][0]
    after = [size for when, size in heard.memory if when > 0.95 * end]
    before = [size for when, size in heard.memory if WARM * end <= when < (WARM + 0.05) * end]
    if after and before and all(before):
        what = "memory of the server at the end of the soak ÷ after its first sixth"
        yield compare(what, mean(after), mean(before), 1.01, unit="MB")
