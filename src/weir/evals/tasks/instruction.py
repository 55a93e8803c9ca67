"""`instruction`: recall of what was stated at the very start of a stream.

The first tokens of a stream are attention sinks, often hold instructions, and are what a window
loses first. For nano an instruction is an exercise, a name's number; in words a sentence in front
says that the numbers hold to the end of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from weir.errors import WeirError
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.facts import (
    ExerciseFacts,
    FactStreams,
    StreamLayout,
    ask_facts,
    distances_to,
)

NEAREST = 32


@task("instruction")
@dataclass(frozen=True)
class Instruction(Task):
    """Numbers given at the start of a stream, each asked for once, 32, 64, 128 ... tokens on.

    Attributes:
        samples: streams, each with one question per distance.
        farthest: the largest distance, in tokens from the end of the instructions to the place of
            the answer.
        text: a file of books that follow; none takes the packaged one.
    """

    samples: int = 32
    farthest: int = 1024
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise WeirError(f"instruction takes 1 sample or more, not {self.samples}")
        if self.farthest < NEAREST:
            raise WeirError(f"the distances of instruction begin at 32, past {self.farthest}")

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question once; returns the figures of `ask_facts`."""
        distances = distances_to(self.farthest, NEAREST)

        def draw(form: ExerciseFacts, rows: int, rng: np.random.Generator) -> FactStreams:
            facts = [form.people(len(distances), 1, rng) for _ in range(rows)]
            # The order of the statements is independent of the order of the questions.
            order = rng.permutation(len(distances))
            places = np.zeros(len(distances), dtype=np.int64)
            place = len(form.front)
            for question in order:
                places[question] = place
                place += len(facts[0][question][0].statement)
            answers = [place + distance for distance in distances]
            last = facts[0][-1][0]
            layout = StreamLayout(
                tuple((int(place),) for place in places),
                tuple(answers),
                answers[-1] + len(last.statement) - len(last.ask),
            )
            return FactStreams(facts, layout)

        found = ask_facts(subject, draw, distances, self.samples, self.text, progress)
        del found["stale"]
        return found
