"""Hostile requests beside honest clients: nothing of the server's own fails, and nobody waits."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir_bench.figure import Row, compare
from weir_bench.serving.load import Heard, closed
from weir_bench.serving.part import Plan, part
from weir_bench.serving.server import Server, weir_serves
from weir_bench.serving.talk import Talk

HONEST = 4
ATTACKERS = 6
SLOW = 24
ADDRESS = "127.0.0.2"
"""Where the attackers come from: the address of another client."""
ALLOWED = 0.25
"""Seconds of a processor by which a token may be later than without attackers."""
PROMPT = 4000
"""Tokens that a request may feed: to read a million would be the model's own work."""
SIZES = (1_000, 60_000, 1_000_000, 4_000_000, 15_900_000)
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_TURN = '{"role":"user","content":"a"},{"role":"assistant","content":"b"}'
_CALL = (
    '{"role":"assistant","tool_calls":[{"id":"x","type":"function","function":{"name":"f",'
    '"arguments":"['
)
START = f"""
import sys
sys.path.append({str(Path(__file__).parents[3])!r})
from weir_bench.serving.parts.attack import main
main(*sys.argv[1:])
"""
"""The script of the attackers' process, which finds this package in a clone."""


@part("attack", asked=True)
def attack(plan: Plan) -> Iterator[Row | Heard]:
    """Honest clients alone, and then beside attackers in a process of their own."""
    seconds = plan.minutes * 60
    with weir_serves(plan.folder, *plan.options, "--rows", 8, "--max-prompt", PROMPT) as server:
        alone = _honest(server, plan, min(30.0, seconds / 4), "honest clients alone")
        yield alone
        if not alone.between:
            raise WeirError("no honest client heard two tokens alone: is the machine busy?")
        command = [sys.executable, "-c", START, str(server.port), server.model, str(seconds + 20)]
        plan.say(f"attacks for {plan.minutes:g} minutes")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                beside = _honest(server, plan, seconds, "the same beside attackers")
                said, _ = process.communicate(timeout=seconds + 300)
            finally:
                process.kill()
        yield beside
        told: dict[str, Any] = json.loads(said)
    wrong = {name: count for name, count in told["statuses"].items() if " 5" in name}
    if wrong or beside.errors or not told["sent"] or not beside.between:
        raise WeirError(f"under attack, {wrong} and honest clients heard {beside.errors[:3]}")
    note = f"{told['sent']} hostile requests: {told['statuses']}"
    what = "longest time between two tokens, beside attackers ÷ alone"
    yield compare(what, max(beside.between), max(alone.between), note=note, unit="ms")
    note = f"{ALLOWED * 1e3:g} ms more than alone are allowed, of all processors together"
    what = "most processor time of the server between two tokens, beside attackers ÷ alone"
    most, before = max(beside.worked_between), max(alone.worked_between)
    yield compare(what, most, before, 1 + ALLOWED / before, note=note, unit="ms")
    what = "most of it until a first token, beside attackers ÷ alone"
    yield compare(what, max(beside.worked_first), max(alone.worked_first), unit="ms")
    note = "by kind, in seconds: " + ", ".join(f"{k} {v:.2g}" for k, v in told["worst"].items())
    what = "median of what a refused body waits ÷ time to an honest first token"
    first = sorted(beside.first)[len(beside.first) // 2]
    yield compare(what, told["refused"], first, note=note, unit="ms")
    most, before = (max(size for _, size in heard.memory) for heard in (beside, alone))
    what = "most memory of the server, beside attackers ÷ alone"
    yield compare(what, most, before, unit="MB")


def _honest(server: Server, plan: Plan, seconds: float, what: str) -> Heard:
    talks = [Talk(server.port, server.model) for _ in range(HONEST)]
    run = closed(server, talks, plan.manner, what=what, seconds=seconds, warm=3.0, every=0.05)
    return asyncio.run(run)


def make_bodies(model: str, size: int) -> dict[str, tuple[str, bytes]]:
    """Bodies of some size that cost much to refuse: by kind, each with its path."""

    def repeat(before: str, what: str, after: str) -> bytes:
        times = max(1, (size - len(before) - len(after)) // len(what))
        return (before + (what * times).rstrip(",") + after).encode()

    fields = ",".join(f'"f{n}":0' for n in range(size // 11))
    head = f'{{"model":"{model}","max_tokens":2,'
    user = head + '"messages":[{"role":"user","content":"'
    return {
        "messages": (CHAT, repeat(head + '"messages":[', "0,", "]}")),
        "objects": (CHAT, repeat(head + '"messages":[', "{},", "]}")),
        "turns": (CHAT, repeat(head + '"messages":[', '{"role":"x","content":""},', "]}")),
        "input": (RESPONSE, repeat(f'{{"model":"{model}","input":[', "0,", "]}")),
        "fractions": (TEXT, repeat(head + '"prompt":[', "1.5,", "]}")),
        "token ids": (TEXT, repeat(head + '"prompt":[', "5,", "]}")),
        "fields": (CHAT, f"{head}{fields}}}".encode()),
        "biases": (CHAT, f'{head}"messages":[],"logit_bias":{{{fields}}}}}'.encode()),
        "depth": (CHAT, repeat(head + '"messages":', "[", "")),
        "escapes": (CHAT, repeat(head + '"messages":"', "\\u00e9", '"}')),
        "no json": (CHAT, b"\xff" * size),
        "a long word": (CHAT, repeat(user, "a", '"}]}')),
        "control tokens": (CHAT, repeat(user, "<|im_end|>", '"}]}')),
        "a history": (CHAT, repeat(head + '"messages":[', f"{_TURN}," * 2, "]}")),
        "arguments": (CHAT, repeat(f'{head}"messages":[{_TURN},{_CALL}', "[],", ']"}}]}]}')),
        "tools": (
            CHAT,
            repeat(
                user + '"}],"tools":[{"type":"function","function":{"name":"f","parameters":'
                '{"type":"object","properties":{',
                *('"p":{"type":"string","pattern":"(a|b){1,9}c"},', "}}}}]}"),
            ),
        ),
        "a schema": (
            CHAT,
            repeat(
                user + '"}],"response_format":{"type":"json_schema","json_schema":{"name":"x",'
                '"schema":{"enum":[',
                '"abc",',
                "]}}}}",
            ),
        ),
    }


def main(port: str, model: str, seconds: str) -> None:
    """Send what is hostile to a server from many threads; print as JSON what became of it."""
    until = time.monotonic() + float(seconds)
    bodies = {size: make_bodies(model, size) for size in SIZES}
    notes: list[tuple[str, float]] = []  # what happened, and the seconds that an answer took

    def send(number: int) -> None:
        """Send bodies of all kinds; hang up on some."""
        chance = random.Random(number)
        while time.monotonic() < until:
            kind, (path, body) = chance.choice(list(bodies[chance.choice(SIZES)].items()))
            connection = http.client.HTTPConnection(
                "127.0.0.1", int(port), timeout=120, source_address=(ADDRESS, 0)
            )
            try:
                began = time.monotonic()
                headers = {"Content-Type": "application/json", "Host": "localhost"}
                if chance.random() < 0.1:  # half of it, and gone
                    connection.putrequest("POST", path)
                    connection.putheader("Content-Type", "application/json")
                    connection.putheader("Content-Length", str(len(body)))
                    connection.endheaders()
                    connection.send(body[: len(body) // 2])
                    notes.append(("hung up", 0.0))
                    continue
                if chance.random() < 0.1:  # an answer that is not read to its end
                    body = (
                        f'{{"model":"{model}","stream":true,"max_tokens":4000,"messages":'
                        '[{"role":"user","content":"a"}]}'
                    ).encode()
                    connection.request("POST", CHAT, body, headers)
                    connection.getresponse().read(100)
                    time.sleep(chance.choice((0.0, 1.0)))
                    notes.append(("left", 0.0))
                    continue
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                answer.read()
                notes.append((f"{kind} {answer.status}", time.monotonic() - began))
            except (OSError, http.client.HTTPException):
                notes.append((f"{kind} closed", 0.0))  # refused before all of it was sent
            finally:
                connection.close()

    def dawdle() -> None:
        """Send a body a byte at a time."""
        while time.monotonic() < until:
            try:
                with socket.create_connection(
                    ("127.0.0.1", int(port)), 5, source_address=(ADDRESS, 0)
                ) as slow:
                    slow.sendall(
                        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                        b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
                    )
                    while time.monotonic() < until:
                        slow.sendall(b" ")
                        time.sleep(0.5)
            except OSError:
                notes.append(("slow closed", 0.0))
                time.sleep(0.1)

    work = [partial(send, number) for number in range(ATTACKERS)] + [dawdle] * SLOW
    threads = [threading.Thread(target=call, daemon=True) for call in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worst: dict[str, float] = {}
    for what, took in sorted(notes):
        if took:
            worst[what] = max(took, worst.get(what, 0.0))
    refused = [took for what, took in notes if took and " 4" in what]
    told = {
        "sent": len(notes),
        "statuses": dict(Counter(what for what, _ in notes).most_common()),
        "worst": worst,
        "refused": sorted(refused)[len(refused) // 2] if refused else 0.0,
    }
    sys.stdout.write(json.dumps(told))
