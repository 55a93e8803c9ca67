"""Time contenders in turns, one step each, so that noise affects all of them.

This file does not depend on what is timed.
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
        """Prepare the next step. This is not timed."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disable gradients and the garbage collector, after collecting garbage once."""
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
    """Exclude all existing objects from garbage collection.

    The imported libraries alone have a million objects, and walking through them takes longer than
    many of the timed steps. If some objects are already frozen, nothing else is frozen.
    """
    gc.collect()
    if gc.get_freeze_count():
        # Python can only unfreeze all objects together. Objects frozen here would therefore stay
        # frozen, and the garbage of one figure after the other would pile up.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seconds(do: Callable[[], object]) -> float:
    """Return how many seconds a call takes, including its work on an accelerator."""
    _wait()
    start = time.perf_counter()
    do()
    _wait()
    return time.perf_counter() - start


def in_turns(
    contenders: Mapping[str, Contender | Callable[[], object]], rounds: int, warm: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each step of each contender.

    Every round begins with a different contender.

    Args:
        contenders: contenders or functions by name. A step of a function is a call of it.
        rounds: timed steps of each contender.
        warm: untimed steps of each contender before the timed ones.
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
    """Return the median of each contender's times."""
    return {name: median(taken) for name, taken in times.items()}


def status_bytes(pid: int | str, name: str) -> int:
    """Return a field of a process's status in bytes, or 0 on a system without /proc."""
    try:
        text = Path(f"/proc/{pid}/status").read_text("ascii")
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields.get(name, "0 kB").split()[0]) * 1024


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
