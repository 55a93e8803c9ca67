"""Figures of policies: a decode step of each compared with `streaming_llm`, and its folds."""

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
"""The policies whose folds used to take longest. They have a stricter target."""
TIMED = 4
"""Steps that are timed between two folds. The tokens before them are fed in one call."""


@dataclass(frozen=True)
class Pace:
    """The median seconds of a step without a fold, and the mean seconds of a fold of all layers."""

    step: float
    fold: float
    chunk: int

    @property
    def token(self) -> float:
        """Seconds per token, including its share of a fold."""
        return self.step + self.fold / self.chunk


@figure("policies")
def policies(setting: Setting) -> Iterator[Row]:
    """Compare a decode step of every policy with `streaming_llm`, at the same number of slots."""
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
    """Compare the time of folds per token with the time of a decode step."""
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
    """Return those of `names` that the setting asks for, or all if it names no policies."""
    return [name for name in names if not setting.policies or name in setting.policies]


def comparable() -> list[str]:
    """Return the names of policies with a budget, without `streaming_llm`."""
    return [name for name in budgeted() if name != PLAIN]


def budgeted() -> list[str]:
    """Return the names of policies with a budget, without those that only a `Stream` can run."""
    return [
        name
        for name, policy in NAMED.items()
        if "budget" in inspect.signature(policy.make).parameters
        and name not in ("recompute", "kvzip")
    ]


@cache
def _beside_plain(setting: Setting, name: str) -> tuple[Pace, Pace, bool]:
    """Return the pace of a policy, that of `streaming_llm`, and if the policy reads attention.

    The result is cached, because two figures of a run use it.
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
