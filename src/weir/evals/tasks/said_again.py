"""`repeated` and `changed`: numbers of names, stated several times before the question.

A repeated fact has several chances to stay, and a cache that merges similar tokens needs to keep it
only once. If the number changes, only the newest counts: a cache that favors old or average entries
gives the old answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from weir.errors import WeirError
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.facts import (
    NEAREST,
    ExerciseFacts,
    FactStreams,
    ask_facts,
    distances_to,
    scatter_facts,
)

MOST = 9
"""Numbers of one name, each beginning with another digit."""


@dataclass(frozen=True)
class _RepeatedFacts(Task):
    """Parameters and the loop of both tasks."""

    times: int = 3
    samples: int = 32
    farthest: int = 1024
    before: int = 512
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def __post_init__(self) -> None:
        if not 2 <= self.times <= MOST:
            raise WeirError(f"{self.name} says a number 2 to {MOST} times, not {self.times}")
        if self.samples < 1 or self.before < 1:
            raise WeirError(
                f"{self.name} takes 1 sample and 1 token before its statements, or more"
            )
        if self.farthest < NEAREST:
            raise WeirError(
                f"the distances of {self.name} begin at {NEAREST}, past {self.farthest}"
            )

    def _ask(self, subject: Subject, progress: Progress, *, changing: bool) -> dict[str, Any]:
        distances = distances_to(self.farthest)

        def draw(form: ExerciseFacts, rows: int, rng: np.random.Generator) -> FactStreams:
            streams = [form.people(len(distances), self.times, rng) for _ in range(rows)]
            if not changing:
                streams = [[facts[:1] * self.times for facts in stream] for stream in streams]
            return scatter_facts(streams, distances, self.before, len(form.front), rng)

        return ask_facts(subject, draw, distances, self.samples, self.text, progress)


@task("repeated")
@dataclass(frozen=True)
class Repeated(_RepeatedFacts):
    """Numbers that are said several times, asked for 16, 32, 64 ... tokens after the last.

    Attributes:
        times: how often each name's number is said before it is asked for.
        samples: streams, each with one question per distance.
        farthest: the largest distance, in tokens between a number, where it was said last, and the
            place of the answer.
        before: tokens in front of the newest statement that stands farthest back.
        text: a file of books from which the text between is taken; none takes the packaged one.
    """

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question once; returns the figures of `ask_facts`."""
        found = self._ask(subject, progress, changing=False)
        del found["stale"]
        return found


@task("changed")
@dataclass(frozen=True)
class Changed(_RepeatedFacts):
    """Numbers that change, asked for 16, 32, 64 ... tokens after the newest, which counts.

    No two numbers of a name begin with the same digit, so a `stale` answer differs from
    one that is a guess: guessing is stale twice in ten.

    Attributes:
        times: how many numbers each name has, one after the other.
        samples: streams, each with one question per distance.
        farthest: the largest distance, in tokens between the newest number and the place of the
            answer.
        before: tokens in front of the newest statement that stands farthest back.
        text: a file of books from which the text between is taken; none takes the packaged one.
    """

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher", "stale": "lower"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question once; returns the figures of `ask_facts`."""
        return self._ask(subject, progress, changing=True)
