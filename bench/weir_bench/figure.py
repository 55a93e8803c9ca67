"""What a figure is: a name, something that measures it, and rows of ours beside a peer's.

Knows nothing about what is measured.
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
    """How large what is measured is; the defaults are those of the figures.

    Attributes:
        layers, width, inner, vocabulary: of the model; the defaults are SmolLM2-135M's shape.
        slots: of a policy, and of its peers' caches.
        many_slots: of a policy in comparison with re-computation.
        prompts: tokens of the prompts that are read under each policy, rising.
        far: tokens of one whose time is worked out from those.
        fed: tokens of the prompt whose memory is measured.
        chunk: tokens between two folds.
        steps: decode steps of each contender where steps are timed.
        folds: folds of each policy where folds are timed.
        slow: times that something slow is done.
        copied: bytes that are copied to measure the bandwidth.
        backend: what `torch.compile` compiles steps with.
        nano: whether rows are timed in the packaged model too, which has to be compiled for that,
            and commands that answer with it.
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
"""A model and caches so small that everything has run in a minute; the figures say nothing."""


@dataclass(frozen=True)
class Setting:
    """How figures are measured.

    Attributes:
        sizes: how large things are.
        dtype: of models and caches.
        flat: tokens of the long stream.
        policies: of the figures that have a row for each policy, only these; none for all.
        say: told what is under way.
        on_mark: told what the long stream has shown, at every mark, so that it can be kept.
    """

    sizes: Sizes = field(default_factory=Sizes)
    dtype: torch.dtype = torch.float32
    flat: int = 1_000_000
    policies: tuple[str, ...] = ()
    say: Callable[[str], None] = lambda what: None
    on_mark: Callable[[list[dict[str, Any]]], None] = lambda marks: None


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: ours ÷ the peer's, or the peer's ÷ ours, in words.
        ours, peer: what was measured, in `unit`.
        unit: of both.
        ratio: of the two, as `what` says.
        target: what the ratio is to reach; None where nobody asked.
        least: whether the ratio is to be at least the target; at most otherwise.
        note: which path ran, or what is to be known beside.
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
        """Whether the target was met; None where there is none."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.least else self.ratio <= self.target

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
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
    """A row of two measurements in seconds or bytes; `inverse` has the peer's ÷ ours."""
    scale = {"s": 1.0, "ms": 1e3, "MB": 1e-6}[unit]
    ratio = peer / ours if inverse else ours / peer
    return Row(what, ours * scale, peer * scale, unit, ratio, target, least, note=note)


class Skipped(Exception):
    """A figure cannot be measured here; the message says why."""


def run_python(code: str, *arguments: str, said: str = "", name: str = "") -> str:
    """Run Python code in a process of its own, and return its standard output.

    Args:
        code: what it runs.
        arguments: of its command line.
        said: its standard input.
        name: what the message calls it; the arguments by default.

    Raises:
        Skipped: it failed, and what it said last.
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
        measure: makes the rows, of a setting.
        by_dtype: measured once for each dtype; otherwise once.
        asked: only measured if asked for by name.
    """

    measure: Callable[..., Iterator[Any]]
    by_dtype: bool = True
    asked: bool = False


ORDER = (
    *("decode", "around", "recompute", "policies", "folds"),
    *("weights", "slots", "prefill", "kvpress"),
    *("batches", "deterministic", "flat", "kernel", "rows", "products", "prompts", "start"),
)
"""The figures as they stand in the table."""
FIGURES: dict[str, Figure] = {}
"""Every figure by its name."""


def register(figures: dict[str, Figure], name: str, **how: bool) -> Callable[[M], M]:
    """Make what measures a figure known under a name; `how` as in `Figure`."""

    def add(measure: M) -> M:
        figures[name] = Figure(measure, **how)
        return measure

    return add


figure = partial(register, FIGURES)


def chosen(names: Sequence[str]) -> Sequence[str]:
    """The figures that are meant; without names, all that need not be asked for."""
    known = sorted(FIGURES, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    check_names("figure", names, known)
    return names or [name for name in known if not FIGURES[name].asked]


def check_names(kind: str, names: Sequence[str], known: Collection[str]) -> None:
    """Refuse names of figures or parts that there are not."""
    for name in names:
        if name not in known:
            raise WeirError(f"unknown {kind} {name!r}. Use one of {', '.join(known)}.")
