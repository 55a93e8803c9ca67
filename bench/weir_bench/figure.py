"""Figures of `weir bench`: their names, the functions that measure them, and their rows.

A row compares a measurement of weir with one of a peer, the library it is compared with. This file
does not depend on what is measured.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from weir.errors import WeirError


@dataclass(frozen=True)
class Sizes:
    """Sizes of models, caches and prompts, and numbers of repetitions.

    The defaults are the sizes of the published figures.

    Attributes:
        layers, width, inner, vocabulary: shape of the model, by default that of SmolLM2-135M.
        slots: slots of a policy, and tokens in its peers' caches.
        many_slots: the larger number of slots at which recomputation is timed.
        prompts: lengths in tokens of the prompts that are timed under each policy, in rising order.
        far: length of a longer prompt, whose time is extrapolated from `prompts`.
        fed: length of the prompt whose peak memory is measured.
        chunk: tokens between two folds.
        steps: timed decode steps of each contender.
        folds: timed folds of each policy.
        slow: repetitions of slow measurements.
        copied: bytes that are copied to measure the bandwidth.
        backend: the backend of `torch.compile`.
        nano: whether the figure `rows` also times batches on the packaged model nano, whose steps
            must be compiled for this, and whether `start` also times the commands that load nano.
    """

    layers: int = 30
    width: int = 576
    inner: int = 1536
    vocabulary: int = 49152
    slots: int = 1024
    many_slots: int = 4096
    prompts: tuple[int, ...] = (2048, 8192)
    far: int = 32768
    fed: int = 32768
    chunk: int = 64
    steps: int = 96
    folds: int = 16
    slow: int = 5
    copied: int = 1 << 28
    backend: str = "inductor"
    nano: bool = True


QUICK = Sizes(
    layers=2,
    width=192,
    inner=256,
    vocabulary=512,
    slots=128,
    many_slots=256,
    prompts=(256, 512),
    far=2048,
    fed=2048,
    chunk=16,
    steps=4,
    folds=2,
    slow=1,
    copied=1 << 24,
    backend="eager",
    nano=False,
)
"""Sizes so small that everything runs in a minute. The resulting figures are meaningless."""


@dataclass(frozen=True)
class Setting:
    """How figures are measured.

    Attributes:
        sizes: sizes and numbers of repetitions.
        dtype: dtype of models and caches.
        flat: length of the long stream in tokens.
        policies: the policies to measure in figures that have a row for each policy. If empty, all.
        say: called with a description of what is being measured.
        on_mark: called with all measurements of the long stream so far, after each new one.
    """

    sizes: Sizes = field(default_factory=Sizes)
    dtype: torch.dtype = torch.float32
    flat: int = 1_000_000
    policies: tuple[str, ...] = ()
    say: Callable[[str], None] = lambda what: None
    on_mark: Callable[[list[dict[str, Any]]], None] = lambda marks: None


@dataclass(frozen=True)
class Row:
    """A measurement of weir, one of a peer, and their ratio.

    Attributes:
        what: what was divided by what, in words.
        ours, peer: the two measurements, in `unit`.
        unit: the unit of both.
        ratio: ours ÷ peer, or peer ÷ ours, as `what` says.
        target: the limit of the ratio, or None if there is no target.
        least: whether the target is a lower limit. Otherwise it is an upper limit.
        note: which kernel ran, or another remark.
    """

    what: str
    ours: float
    peer: float
    unit: str
    ratio: float
    target: float | None = None
    least: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target was met, or None if there is no target."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.least else self.ratio <= self.target

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and whether the target was met, as JSON values."""
        return {**vars(self), "met": self.met}


def compare(
    what: str,
    ours: float,
    peer: float,
    target: float | None = None,
    *,
    unit: str = "ms",
    inverse: bool = False,
    least: bool = False,
    note: str = "",
) -> Row:
    """Return a row of two measurements in seconds or bytes, converted to `unit`.

    The ratio is ours ÷ peer, or peer ÷ ours if `inverse` is true.
    """
    scale = {"s": 1.0, "ms": 1e3, "MB": 1e-6}[unit]
    ratio = peer / ours if inverse else ours / peer
    return Row(what, ours * scale, peer * scale, unit, ratio, target, least, note=note)


class Skipped(Exception):
    """A figure cannot be measured on this machine. The message says why."""


def run_python(code: str, *arguments: str, said: str = "", name: str = "") -> str:
    """Run Python code in a separate process, and return its standard output.

    Args:
        code: the Python code.
        arguments: arguments of the process's command line.
        said: the process's standard input.
        name: how the error message names the process. By default, its arguments.

    Raises:
        Skipped: the process failed. The message has the last line of its standard error.
    """
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, input=said, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise Skipped(f"{name or ' '.join(arguments) or 'a script'} failed: {last}")
    return done.stdout


M = TypeVar("M", bound=Callable[..., Iterator[Any]])


@dataclass(frozen=True)
class Figure:
    """A group of rows that are measured together.

    Attributes:
        measure: measures and yields the rows, given a `Setting`.
        by_dtype: whether to measure once for each dtype, instead of once.
        asked: whether to measure only when the figure is requested by name.
    """

    measure: Callable[..., Iterator[Any]]
    by_dtype: bool = True
    asked: bool = False


ORDER = (
    *("decode", "around", "recompute", "policies", "folds"),
    *("weights", "slots", "prefill", "kvpress"),
    *("batches", "deterministic", "flat", "kernel", "rows", "products", "prompts", "start"),
)
"""The order in which figures are measured, and listed in the table."""
FIGURES: dict[str, Figure] = {}
"""Every figure by its name."""


def register(figures: dict[str, Figure], name: str, **how: bool) -> Callable[[M], M]:
    """Return a decorator that registers a function as a figure. `how` has fields of `Figure`."""

    def add(measure: M) -> M:
        figures[name] = Figure(measure, **how)
        return measure

    return add


figure = partial(register, FIGURES)


def chosen(names: Sequence[str]) -> Sequence[str]:
    """Return the named figures. Without names, return all except those with `asked`."""
    known = sorted(FIGURES, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    check_names("figure", names, known)
    return names or [name for name in known if not FIGURES[name].asked]


def check_names(kind: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raise an error if one of the names is not a known figure or part."""
    for name in names:
        if name not in known:
            raise WeirError(f"unknown {kind} {name!r}. Use one of {', '.join(known)}.")
