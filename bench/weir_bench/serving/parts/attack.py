"""Measure whether hostile requests make the server fail, or its honest clients wait."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weir.errors import WeirError
from weir.serve.limits import Limits
from weir_bench.figure import Row, compare
from weir_bench.serving.attackers import START
from weir_bench.serving.load import Heard, closed
from weir_bench.serving.part import Plan, part
from weir_bench.serving.server import Server, weir_serves
from weir_bench.serving.talk import Talk

HONEST = 4
ALLOWED = 0.25
"""Processor seconds between two tokens that attackers may add."""
PROMPT = 4000
"""The server's `--max-prompt`, so that attackers cannot keep the model busy with long prompts."""


@part("attack", asked=True)
def attack(plan: Plan) -> Iterator[Row | Heard]:
    """Measure honest clients alone, and then while a separate process attacks the server."""
    seconds = plan.minutes * 60
    with weir_serves(plan.folder, *plan.options, "--rows", 8, "--max-prompt", PROMPT) as server:
        with _asking_health(server) as health_alone:
            alone = _honest(server, plan, min(30.0, seconds / 4), "honest clients alone")
        yield alone
        if not alone.between:
            raise WeirError(
                "without attackers, no honest client got two tokens: is the machine too busy?"
            )
        command = [sys.executable, "-c", START, str(server.port), server.model, str(seconds + 20)]
        plan.say(f"attacks for {plan.minutes:g} minutes")
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
            _asking_health(server) as health,
        ):
            try:
                beside = _honest(server, plan, seconds, "honest clients beside attackers")
                said, _ = process.communicate(timeout=seconds + 300)
            finally:
                process.kill()
        yield beside
        told: dict[str, Any] = json.loads(said)
    wrong = {name: count for name, count in told["statuses"].items() if " 5" in name}
    if wrong or beside.errors or not told["sent"] or not beside.between:
        raise WeirError(
            f"under attack, the server answered {wrong or 'nothing wrong'}, {told['sent']} hostile "
            f"requests were sent, and honest clients got {beside.errors[:3] or 'no errors'}"
        )
    note = f"{told['sent']} hostile requests: {told['statuses']}"
    what = "longest time between two tokens, beside attackers ÷ alone"
    yield compare(what, max(beside.between), max(alone.between), note=note, unit="ms")
    worked = sorted(beside.worked_between)
    tail = ", ".join(
        f"{share:g} % within {worked[int(len(worked) * share / 100)] * 1e3:.0f} ms"
        for share in (99, 99.9)
    )
    note = f"target: {ALLOWED * 1e3:g} ms more than alone, summed over processors; {tail}"
    what = "most processor time of the server between two tokens, beside attackers ÷ alone"
    most, before = worked[-1], max(alone.worked_between)
    yield compare(what, most, before, 1 + ALLOWED / before, note=note, unit="ms")
    what = "most processor time until a first token, beside attackers ÷ alone"
    yield compare(what, max(beside.worked_first), max(alone.worked_first), unit="ms")
    note = "by kind, in seconds: " + ", ".join(f"{k} {v:.2g}" for k, v in told["worst"].items())
    what = "median wait of a refused body ÷ median time to an honest client's first token"
    first = sorted(beside.first)[len(beside.first) // 2]
    yield compare(what, told["refused"], first, note=note, unit="ms")
    what = "longest wait for /health, beside attackers ÷ alone"
    yield compare(what, max(health), max(health_alone), unit="ms")
    most, before = (max(size for _, size in heard.memory) for heard in (beside, alone))
    promised = Limits().memory + Limits().parcel
    note = f"weir serve says at its start that it can take {promised / 1e6:,.0f} MB more"
    what = "most memory of the server, beside attackers ÷ alone"
    yield compare(what, most, before, 1 + promised / before, note=note, unit="MB")


def _honest(server: Server, plan: Plan, seconds: float, what: str) -> Heard:
    talks = [Talk(server.port, server.model) for _ in range(HONEST)]
    run = closed(server, talks, plan.manner, what=what, seconds=seconds, warm=3.0, every=0.05)
    return asyncio.run(run)


@contextmanager
def _asking_health(server: Server) -> Iterator[list[float]]:
    """Request /health four times a second, and yield a list of the seconds each answer took."""
    took, over = [], threading.Event()

    def ask() -> None:
        while not over.wait(0.25):
            began = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                took.append(time.perf_counter() - began)
            connection.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()
