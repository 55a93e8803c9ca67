"""Figures of policies: a decode step of each beside `streaming_llm`, and what its folds cost."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import mean, median

import torch

from weir.policies import NAMED
from weir_bench.caches import Weir
from weir_bench.figure import Row, Setting, Skipped, compare, figure
from weir_bench.figures.decode import PLAIN
from weir_bench.model import model_of, walk_path
from weir_bench.timing import in_turns

EASED = ("balancekv", "kcenter", "subgen")
"""Policies whose folds were the dearest, and have a target of their own."""
TIMED = 4
"""Steps that are timed between two folds; the others are fed at once."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a step that does not fold (median) and of a fold of all layers (mean)."""

    step: float
    fold: float
    chunk: int

    @property
    def token(self) -> float:
        """Seconds per token."""
        return self.step + self.fold / self.chunk


@figure("policies")
def policies(setting: Setting) -> Iterator[Row]:
    """Every policy of the same slots against `streaming_llm`."""
    names = wanted(setting, comparable())
    if not names:
        raise Skipped(f"{PLAIN} is the policy that others are compared with. Name another policy.")
    for name in names:
        ours, plain, mass = _beside_plain(setting, name)
        yield compare(
            f"decode step, `{name}` ÷ `{PLAIN}`, {setting.sizes.slots:,} slots, folds included",
            ours.token,
            plain.token,
            1.10 if mass else 1.05,
            note="reads attention" if mass else "",
        )


@figure("folds")
def folds(setting: Setting) -> Iterator[Row]:
    """The time of folds over the tokens between two of them, over that of a step."""
    for name in wanted(setting, [PLAIN, *comparable()]):
        ours, _, _ = _beside_plain(setting, name)
        yield compare(
            f"folds of `{name}` per token ÷ decode step, {setting.sizes.slots:,} slots, "
            f"chunk {setting.sizes.chunk}",
            ours.fold / ours.chunk,
            ours.step,
            0.03 if name in EASED else 0.05,
            note=f"walk: {walk_path()}" if name == "balancekv" else "",
        )


def wanted(setting: Setting, names: list[str]) -> list[str]:
    """The names that a run asked for; all, where it named none."""
    return [name for name in names if not setting.policies or name in setting.policies]


def comparable() -> list[str]:
    """The named policies with a budget, without the one they are compared with."""
    return [name for name in budgeted() if name != PLAIN]


def budgeted() -> list[str]:
    """The named policies with a budget, without those that only a `Stream` runs."""
    return [
        name
        for name, policy in NAMED.items()
        if "budget" in inspect.signature(policy.make).parameters
        and name not in ("recompute", "kvzip")
    ]


@cache
def _beside_plain(setting: Setting, name: str) -> tuple[Pace, Pace, bool]:
    """(the policy's pace, that of `streaming_llm`, whether the policy reads attention).

    Timed once for both figures of a run.
    """
    sizes, model = setting.sizes, model_of(setting)
    setting.say(f"{name} compared with {PLAIN}")
    both = [Weir(model, f"{of}(budget={sizes.slots})", sizes.chunk) for of in (name, PLAIN)]
    for each in both:
        each.fill(sizes.slots + sizes.chunk)
        each.start_afresh()
    tokens = torch.ones(1, sizes.chunk - TIMED - 1, dtype=torch.int64)
    taken: list[list[float]] = [[], []]
    for _ in range(sizes.folds):
        for each in both:
            with torch.no_grad():
                each.feed(tokens)
        times = in_turns(dict(zip("ab", both, strict=True)), TIMED, warm=0)
        for mine, more in zip(taken, times.values(), strict=True):
            mine += more
        for each in both:
            with torch.no_grad():
                each.step()
    ours, plain = (
        Pace(median(times), mean(each.folds), sizes.chunk)
        for times, each in zip(taken, both, strict=True)
    )
    pipes = [layer.spec.pipe for layer in both[0].cache.stack]
    return ours, plain, any(pipe.needs_mass or pipe.needs_queries for pipe in pipes)
