"""Measure how long a client waits for the refusal of its body, alone and beside six attackers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

from weir.errors import WeirError
from weir_bench.figure import Row
from weir_bench.serving.attackers import START_REFUSED, Attacker, make_bodies
from weir_bench.serving.load import Heard
from weir_bench.serving.part import Plan, part
from weir_bench.serving.server import weir_serves

PROMPT = 4000
"""The server's `--max-prompt`, which some of the bodies exceed."""
SIZES = (200, 60_000, 1_000_000)
"""Approximate sizes in bytes of the bodies whose answers are timed."""
PAUSE = 0.1
"""Seconds between two of these bodies."""
TARGET = 1.0
"""The target for the longest wait, in seconds."""


@part("refused", asked=True)
def refused(plan: Plan) -> Iterator[Row | Heard]:
    """Time refused bodies, first alone and then while six other clients send refused bodies too."""
    seconds = min(plan.minutes * 60, 60.0)
    with weir_serves(plan.folder, *plan.options, "--rows", 8, "--max-prompt", PROMPT) as server:
        alone = _send(server.port, server.model, seconds / 3)
        plan.say(f"six attackers for {seconds:g} seconds")
        command = [sys.executable, "-c", START_REFUSED, str(server.port), server.model]
        with subprocess.Popen(
            [*command, str(seconds + 5)], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                time.sleep(2.5)  # until the attackers have made their bodies
                beside = _send(server.port, server.model, seconds)
                told = json.loads(process.communicate(timeout=seconds + 300)[0])
            finally:
                process.kill()
    if not told["sent"]:
        raise WeirError("the attackers sent nothing")
    worst: dict[str, float] = {}
    for what, took in sorted(beside):
        worst[what] = max(took, worst.get(what, 0.0))
    shown = sorted(worst.items(), key=lambda one: -one[1])[:6]
    note = (
        f"{len(beside)} answers, longest by kind in seconds: "
        f"{', '.join(f'{k} {v:.2g}' for k, v in shown)}; attackers: {told['sent']} requests, "
        + ", ".join(f"{k} {v:.2g}" for k, v in told["worst"].items())
    )
    times, before = ([took for _, took in notes] for notes in (beside, alone))
    what = "longest time to answer a refused body, beside six attackers; and alone"
    most = max(times)
    yield Row(what, most * 1e3, max(before) * 1e3, "ms", most, TARGET, note=note)
    what = "median time to answer a refused body, beside six attackers; and alone"
    yield Row(what, median(times) * 1e3, median(before) * 1e3, "ms", median(times))


def _send(port: int, model: str, seconds: float) -> list[tuple[str, float]]:
    """Send bodies of every kind in turn, and return the kind and seconds of each refusal."""
    bodies = [
        (f"{kind} of {size:,} bytes", path, body)
        for size in SIZES
        for kind, (path, body) in make_bodies(model, size).items()
    ]
    notes: list[tuple[str, float]] = []
    client = Attacker(port, model, 0, {}, b"", notes, "127.0.0.1")
    until, at = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        what, path, body = bodies[at % len(bodies)]
        client.post(what, path, body, "Content-Type: application/json")
        at += 1
        time.sleep(PAUSE)
    if closed := [what for what, _ in notes if what.endswith("closed")]:
        raise WeirError(f"{len(closed)} requests were not answered, such as {closed[0]}")
    answers = [(what, took) for what, took in notes if " 4" in what]
    if not answers:
        raise WeirError("no body was refused")
    return answers
