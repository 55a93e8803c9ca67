"""Timing in turns: each contender does one step, then the next, so that noise meets all of them.

Knows nothing about what is timed.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch


class Contender:
    """Something that is timed a step at a time."""

    def step(self) -> None:
        """Do the step that is timed."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Get ready for the next step; not timed."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """No gradients, and Python's garbage is collected before instead of now and then."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        if was:
            gc.enable()


@contextmanager
def settled() -> Iterator[None]:
    """Python's collector passes over what is there already: the libraries alone have a million
    objects, and to walk through them takes longer than many a step that is timed.

    Who had it pass over something already keeps just that.
    """
    gc.collect()
    if gc.get_freeze_count():
        # Python thaws everything or nothing: what was frozen here would stay so, and with it the
        # garbage of one figure after the other.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seconds(do: Callable[[], object]) -> float:
    """How long something takes, the work of an accelerator in it."""
    _wait()
    start = time.perf_counter()
    do()
    _wait()
    return time.perf_counter() - start


def in_turns(
    contenders: Mapping[str, Contender | Callable[[], object]], rounds: int, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds of each step of each contender.

    Every round begins with another contender, so that none always follows the same one.

    Args:
        contenders: by name; a function is called.
        rounds: steps of each that are timed.
        warm: steps of each before, which are not.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders.items())
    with undisturbed():
        for turn in range(warm + rounds):
            first = turn % len(order)
            for name, contender in itertools.chain(order[first:], order[:first]):
                if isinstance(contender, Contender):
                    took = seconds(contender.step)
                    contender.rewind()
                else:
                    took = seconds(contender)
                if turn >= warm:
                    times[name].append(took)
    return times


def middle(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each contender's times."""
    return {name: median(taken) for name, taken in times.items()}


def status_bytes(pid: int | str, name: str) -> int:
    """A field of a process's status, in bytes; 0 where the system has no /proc."""
    try:
        text = Path(f"/proc/{pid}/status").read_text("ascii")
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields.get(name, "0 kB").split()[0]) * 1024


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
