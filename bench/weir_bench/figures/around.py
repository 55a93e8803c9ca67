"""The time that a decode step spends outside its native kernel, where more threads do not help."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch

from weir.native import dispatch
from weir_bench.caches import Weir, full_compiled
from weir_bench.figure import Row, Setting, Skipped, compare, figure
from weir_bench.figures.decode import PLAIN
from weir_bench.model import twin_of
from weir_bench.timing import undisturbed


@figure("around")
def around(setting: Setting) -> Iterator[Row]:
    """Compare a step as streams and servers run it with a step through a call of the model."""
    sizes = setting.sizes
    cache = full_compiled(setting, twin_of(setting), PLAIN, sizes.slots)
    if cache is None or cache.cache.steps["run"] != "native":
        raise Skipped("steps are not native here")
    called = partial(cache.feed, cache.token)
    ways: dict[str, Callable[[], object]] = {"whole": cache.step, "called": called}
    with undisturbed():
        for way in (*ways.values(), cache.step):  # the first call builds the table of operations
            way()
        calls = {name: median(_count(way) for _ in range(3)) for name, way in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(sizes.steps):
            for name, way in ways.items():
                times[name].append(_seconds_around(way, cache))
    own, peer = (float(calls[name]) for name in ways)
    what = "function calls in a step, as in streams ÷ through a call of the model"
    yield Row(what, own, peer, "calls", own / peer)
    own, peer = (median(times[name]) for name in ways)
    what = "processor time of a step outside the native kernel, as in streams ÷ through a call"
    yield compare(what, own, peer)


def _count(step: Callable[[], object]) -> int:
    """Return how many calls of Python and C functions a step makes."""
    found = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def _seconds_around(step: Callable[[], object], cache: Weir) -> float:
    """Return this thread's processor seconds in a step without a fold, minus the native kernel."""
    if cache.waiting + 1 >= cache.cache.chunk:
        step()
    with _timed_table() as inner:
        start = time.thread_time()
        step()
        return time.thread_time() - start - sum(inner)


@contextmanager
def _timed_table() -> Iterator[list[float]]:
    """Yield a list to which each run of the native kernel adds its processor seconds."""
    table: Any = dispatch.decode_step(torch.device("cpu"))
    own, taken = table.run, list[float]()

    def run(*given: Any) -> None:
        start = time.thread_time()
        own(*given)
        taken.append(time.thread_time() - start)

    table.run = run
    try:
        yield taken
    finally:
        table.run = own
