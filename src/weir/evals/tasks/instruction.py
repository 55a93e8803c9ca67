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
    FactFormat,
    FactStreams,
    StreamLayout,
    ask_facts,
    check_format,
    distances_to,
    format_of,
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
        format: `exercises`, nano's own; `text`, in words; none takes exercises where the tokenizer
            has their words as single tokens.
        text: a file of books that follow; none takes the packaged one.
    """

    samples: int = 32
    farthest: int = 1024
    format: str | None = None
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def __post_init__(self) -> None:
        check_format(self.name, self.format)
        if self.samples < 1:
            raise WeirError(f"instruction takes 1 sample or more, not {self.samples}")
        if self.farthest < NEAREST:
            raise WeirError(f"the distances of instruction begin at 32, past {self.farthest}")

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question once; returns the figures of `ask_facts`."""
        form = format_of(subject.tokenizer, self.format)
        distances = distances_to(self.farthest, NEAREST)

        def draw(form: FactFormat, rows: int, rng: np.random.Generator) -> FactStreams:
            facts = [form.people(len(distances), 1, rng) for _ in range(rows)]
            # The order of the statements is independent of the order of the questions.
            order = rng.permutation(len(distances))
            places = np.zeros(len(distances), dtype=np.int64)
            place = len(form.front) + len(form.opening)
            for question in order:
                places[question] = place
                place += len(facts[0][question][0].said)
            answers = [place + distance for distance in distances]
            last = facts[0][-1][0]
            layout = StreamLayout(
                tuple((int(place),) for place in places),
                tuple(answers),
                answers[-1] + len(last.said) - len(last.ask),
            )
            return FactStreams(facts, layout, tuple(form.opening.tolist()))

        found = ask_facts(subject, form, draw, distances, self.samples, self.text, progress)
        del found["stale"]
        return found
