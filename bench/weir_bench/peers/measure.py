"""The parts of `weir bench peers`: steps and prompts, rows, starts, endless chats and quality.

Engines whose weights have the same number of bits take turns of a few steps, so that other load on
the machine slows all of them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from weir.errors import WeirError
from weir_bench.figure import check_names
from weir_bench.peers.chat import endless_chats
from weir_bench.peers.engines import COMPILED, EngineSetup, model_file
from weir_bench.peers.process import PeerProcess
from weir_bench.peers.quality import TASKS, read_tasks
from weir_bench.peers.results import Results

CLOCK = 8
"""Steps of each engine in a turn."""
REST = 0.03
"""Seconds between turns, in which the threads of the engine that has finished go to sleep."""


@dataclass(frozen=True)
class PeerPlan:
    """How peers are measured.

    Attributes:
        engines: the engines to measure.
        threads: numbers of threads to measure with, in rising order.
        ids: token ids of a text that all engines read.
        say: called with a description of what is being measured.
        window: slots of weir's policy, and tokens of the chat's context.
        behind: numbers of tokens before a timed step, in rising order.
        prompt, long: lengths of prompts in tokens. The long one is for main engines only, and
            leaves room for an answer in SmolLM2's window of 8,192 tokens.
        rounds: turns of each engine.
        rows: numbers of concurrent conversations.
        held: tokens of each of these conversations before the timed steps.
        turns: turns of a chat after it has passed the window.
        tasks: tasks of the part quality.
    """

    engines: Sequence[EngineSetup]
    threads: Sequence[int]
    ids: list[int] = field(default_factory=list)
    say: Callable[[str], None] = lambda what: None
    window: int = 1024
    behind: tuple[int, ...] = (1024, 4096)
    prompt: int = 1024
    long: int = 8128
    rounds: int = 3
    rows: tuple[int, ...] = (1, 4, 16)
    held: int = 256
    turns: int = 40
    tasks: tuple[str, ...] = TASKS


QUICK: dict[str, Any] = {
    "window": 256,
    "behind": (128,),
    "prompt": 128,
    "long": 256,
    "rounds": 1,
    "rows": (1, 2),
    "held": 32,
    "turns": 2,
    "tasks": ("near",),
}
"""Sizes for a run of a few minutes."""


def steps(plan: PeerPlan, results: Results) -> None:
    """Measure prompts, decode steps and memory, for each number of threads and of bits."""
    for threads in reversed(plan.threads):  # all threads first: llama.cpp saves long contexts
        most = threads == plan.threads[-1]
        for bits in sorted({each.bits for each in plan.engines}):
            wanted = []
            for each in plan.engines:
                last = each.name + (COMPILED if each.compiles else "")
                done = results.find("memory", who=last, threads=threads)
                if each.bits == bits and (most or each.main or each.compiles) and not done:
                    wanted.append(each)
            with _running(plan, results, wanted, threads) as running:
                asked = {"tokens": plan.prompt}
                for each, taken in _in_turns(results, running, 1 + most, "read", **asked).items():
                    named = {"who": each.name, "threads": threads, **asked}
                    results.add("prompt", named, {"seconds": min(taken), "all": taken})
                for kind in ("", COMPILED):
                    _steps(plan, results, running, threads, kind)


Running = dict[EngineSetup, PeerProcess]


@contextmanager
def _running(
    plan: PeerPlan, results: Results, engines: Sequence[EngineSetup], threads: int, **more: Any
) -> Iterator[Running]:
    """Yield the running processes of some engines, and end them afterwards.

    An engine that cannot start is recorded as missing.
    """
    found: Running = {}
    with ExitStack() as ending:
        for each in engines:
            plan.say(f"{each.name}, {threads} threads")
            try:
                peer = each.start(threads, plan.window, plan.ids, **more)
                found[each] = ending.enter_context(peer)
                results.facts.setdefault("versions", {})[each.home or "weir"] = peer.ask("facts")
                peer.ask("read", tokens=128)  # so that kernels are not compiled while timed
            except WeirError as error:
                found.pop(each, None)
                results.miss(each.name, error)
        yield found


def _in_turns(
    results: Results, running: Running, rounds: int, do: str, **given: Any
) -> dict[EngineSetup, list[Any]]:
    """Call a method of each engine in turn, and return each engine's results of all rounds.

    An engine that fails is recorded as missing and not called again.
    """
    found: dict[EngineSetup, list[Any]] = {each: [] for each in running}
    for _ in range(rounds):
        for each, peer in list(running.items()):
            if each not in found:  # it has failed in an earlier round
                continue
            time.sleep(REST)
            try:
                found[each].append(peer.ask(do, **given))
            except WeirError as error:
                results.miss(f"{each.name}: {do} {given}", error)
                found.pop(each, None)
                if "ended" in str(error):
                    running.pop(each)
    return {each: made for each, made in found.items() if made}


def _steps(plan: PeerPlan, results: Results, running: Running, threads: int, kind: str) -> None:
    """Measure the steps and memory of all engines.

    If `kind` is `COMPILED`, the engines that can compile their steps do so first. The others are
    measured again next to them.
    """
    named = {each: each.name + (kind if each.compiles else "") for each in running}
    if kind and not any(each.compiles for each in running):
        return
    for each, peer in list(running.items()):
        if kind and each.compiles:
            plan.say(f"{named[each]}, {threads} threads")
            try:
                peer.ask("compile")
                peer.ask("steps", behind=plan.behind[0], count=1)
            except WeirError as error:
                results.miss(named[each], error)
                running.pop(each)
    for behind in plan.behind[:: -1 if kind else 1]:  # first the tokens that the cache holds now
        asked = {"behind": behind, "count": CLOCK}
        for each, taken in _in_turns(results, running, plan.rounds, "steps", **asked).items():
            times = [seconds for turn in taken for seconds in turn]
            facts = {
                "who": named[each],
                "threads": threads,
                "behind": behind,
                "compiled": bool(kind),
            }
            measured = {"seconds": median(times), "least": min(times), "of": len(times)}
            results.add("step", facts, measured)
    for each, peer in running.items():
        if each.compiles or not kind:
            sizes = {**peer.ask("sizes"), "peak": peer.peak, "behind": plan.behind[-1]}
            results.add("memory", {"who": named[each], "threads": threads}, sizes)


def long_prompts(plan: PeerPlan, results: Results) -> None:
    """Measure a prompt that nearly fills the model's window, for the main engines."""
    threads = plan.threads[-1]
    for each in plan.engines:
        named = {"who": each.name, "threads": threads, "tokens": plan.long}
        if not each.main or results.find("prompt", **named):
            continue
        with _running(plan, results, [each], threads) as running:
            for taken in _in_turns(results, running, 1, "read", tokens=plan.long).values():
                results.add("prompt", named, {"seconds": taken[0], "all": taken})


def rows(plan: PeerPlan, results: Results) -> None:
    """Measure the tokens per second of several concurrent conversations, for the main engines."""
    threads = plan.threads[-1]
    for each in plan.engines:
        name = each.name + (COMPILED if each.compiles else "")
        wanted = [
            rows
            for rows in plan.rows
            if not results.find("rows", who=name, threads=threads, rows=rows)
        ]
        if not each.main or not wanted:
            continue
        more: dict[str, Any] = {"context": plan.held + 128, "slots": max(plan.rows)}
        if each.compiles:
            more["compiled"] = True
        with _running(plan, results, [each], threads, **more) as running:
            for rows in wanted:
                asked = {"rows": rows, "behind": plan.held, "count": CLOCK}
                for taken in _in_turns(results, running, 1, "rows", **asked).values():
                    pace = rows / median(taken[0])
                    named = {"who": name, "threads": threads, "rows": rows}
                    results.add("rows", named, {"tokens_per_second": pace})


def starts(plan: PeerPlan, results: Results) -> None:
    """Measure the seconds from the command to the first token, of a first and of a next start.

    The first start has no files from earlier ones. The next start has what the first one saved,
    such as compiled kernels.
    """
    threads = plan.threads[-1]
    for each in plan.engines:
        if each.bits == 8:
            continue  # those with 4 and 32 bits start like them
        for kind in ("", COMPILED) if each.compiles else ("",):
            name = each.name + kind
            if not each.main or results.find("start", who=name, kept=True):
                continue
            plan.say(f"{name}, from the command to its first token")
            with tempfile.TemporaryDirectory(prefix="weir-bench-") as kept:
                try:
                    for again in (False, True):
                        if not again:
                            _forget(model_file(each.kind, each.model))
                        seconds = _start(plan, each, threads, Path(kept), compiled=bool(kind))
                        named = {"who": name, "threads": threads, "kept": again}
                        results.add("start", named, {"seconds": seconds})
                except WeirError as error:
                    results.miss(f"{name}: start", error)


def _start(plan: PeerPlan, each: EngineSetup, threads: int, kept: Path, *, compiled: bool) -> float:
    environment = {"XDG_CACHE_HOME": str(kept), "TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor")}
    more: dict[str, Any] = {"environment": environment, "kept": str(kept), "context": plan.window}
    if compiled:
        more["compiled"] = True
    begun = time.perf_counter()
    with each.start(threads, plan.window, **more) as peer:
        peer.ask("first")
        return time.perf_counter() - begun


def _forget(path: Path) -> None:
    """Ask the system to drop a file from its page cache, if it supports that."""
    if hasattr(os, "posix_fadvise"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def chats(plan: PeerPlan, results: Results) -> None:
    """Measure an endless chat through each server, with all threads."""
    for name, chat in endless_chats(plan.engines, plan.threads[-1], plan.window):
        if results.find("chat", who=name):
            continue
        plan.say(f"{name}, a chat of {plan.turns} turns past its window")
        try:
            results.add("chat", {"who": name, "threads": plan.threads[-1]}, chat(plan.turns))
        except WeirError as error:
            results.miss(f"{name}: chat", error)


def quality(plan: PeerPlan, results: Results) -> None:
    """Measure what caches with the same number of slots still know, with all threads."""
    plan.say("what caches with the same number of slots still know")
    read_tasks(results, plan.threads[-1], plan.tasks)


PARTS: dict[str, Callable[[PeerPlan, Results], None]] = {
    "steps": steps,
    "chat": chats,
    "prompts": long_prompts,
    "rows": rows,
    "start": starts,
    "quality": quality,
}
"""The parts in the order of measurement. "steps" also measures short prompts and memory."""


def measured(plan: PeerPlan, results: Results, names: Sequence[str]) -> Iterator[str]:
    """Measure parts, one after the other, and yield their names."""
    check_names("part", names, PARTS)
    for name in names or PARTS:
        PARTS[name](plan, results)
        yield name
