"""Parts of `weir bench serve`: each is a function that measures, and yields rows and runs.

This file does not depend on what is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from weir.errors import WeirError
from weir_bench.figure import Figure, Row, check_names, register
from weir_bench.serving.load import Heard, Manner, closed
from weir_bench.serving.server import Server
from weir_bench.serving.talk import Talk


@dataclass(frozen=True)
class Plan:
    """How a server is measured.

    Attributes:
        model: "nano", "135m", "tiny", a folder or a Hub id.
        folder: folder of the model, with a chat template (`models.make_folder`).
        scratch: folder for temporary files. `run.measure` makes both folders.
        budget: slots of `streaming_llm`, the policy of all parts.
        sessions: number of concurrent sessions.
        seconds: length of each run.
        rounds: how often the contenders take turns.
        far, near: tokens of the long and the short session.
        minutes: length of the parts soak, attack and refused.
        manner: how clients talk.
        say: called with a description of what is being measured.
        on_heard: called with the measurements of a long run so far.
    """

    model: str
    folder: Path = Path()
    scratch: Path = Path()
    budget: int = 256
    sessions: int = 16
    seconds: float = 10.0
    rounds: int = 3
    far: int = 100_000
    near: int = 1_000
    minutes: float = 30.0
    manner: Manner = field(default_factory=Manner)
    say: Callable[[str], None] = lambda what: None
    on_heard: Callable[[Heard], None] = lambda heard: None

    @property
    def policy(self) -> str:
        """The policy of every `weir serve`."""
        return f"streaming_llm(budget={self.budget})"

    @property
    def options(self) -> list[str]:
        """The options that every `weir serve` has in common."""
        return ["--policy", self.policy]


QUICK: dict[str, Any] = {
    "budget": 32,
    "sessions": 2,
    "seconds": 0.5,
    "rounds": 1,
    "far": 2000,
    "near": 100,
    "minutes": 0.02,
    "manner": Manner(words=2, tokens=8),
}
"""Sizes so small that everything runs in a minute or two. The figures are meaningless."""

PARTS: dict[str, Figure] = {}
"""Every part by its name. Its function yields rows and runs, given a `Plan`."""
part = partial(register, PARTS)


def chosen(names: Sequence[str]) -> Sequence[str]:
    """Return the named parts. Without names, return all except those with `asked`."""
    check_names("part", names, sorted(PARTS))
    return names or [name for name, each in PARTS.items() if not each.asked]


def take_turns(
    plan: Plan, contenders: Mapping[str, tuple[Server, Sequence[Talk]]], *, strict: bool = False
) -> dict[str, list[Heard]]:
    """Run a closed loop of each contender in turn, after one round for warming up.

    With `strict`, an error in the first round is raised.
    """
    heards: dict[str, list[Heard]] = {name: [] for name in contenders}
    for turn in range(plan.rounds + 1):
        for name, (server, talks) in contenders.items():
            heard = asyncio.run(closed(server, talks, plan.manner, what=name, seconds=plan.seconds))
            if turn:
                heards[name].append(heard)
            elif strict and heard.errors:
                raise WeirError(f"a server does not answer the bench: {heard.errors[0]}")
    return heards


def compare_pace(
    what: str,
    ours: Sequence[Heard],
    peer: Sequence[Heard],
    target: float | None = None,
    *,
    least: bool = False,
) -> Row:
    """Return a row that compares the tokens per second of rounds that took turns."""
    own, other = ([heard.pace for heard in rounds] for rounds in (ours, peer))
    return Row(what, median(own), median(other), "tokens/s", ratio(own, other), target, least)


def ratio(ours: list[float], peer: list[float]) -> float:
    """Return the median ratio of values that were measured in the same rounds."""
    return median(a / max(b, 1e-9) for a, b in zip(ours, peer, strict=True))
