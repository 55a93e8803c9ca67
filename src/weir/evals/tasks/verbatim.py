"""`verbatim`: long answers that must be right in every token.

A number of three digits is three tokens. Answers here have any length: a cache that keeps only some
of the tokens cannot reproduce them. For nano the answer is a number of many digits, in words a
password of many words.
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


@task("verbatim")
@dataclass(frozen=True)
class Verbatim(Task):
    """Long numbers or passwords, given back whole after 16, 32, 64 ... tokens.

    Attributes:
        length: tokens of an answer; in words that many or a few more.
        samples: streams, each with one question per distance.
        farthest: the largest distance, in tokens between the beginning of what is asked for and
            the place of the answer. The nearest is the first that leaves room for the length.
        before: tokens in front of the statement that stands farthest back.
        text: a file of books from which the text between is taken; none takes the packaged one.
    """

    length: int = 6
    samples: int = 32
    farthest: int = 1024
    before: int = 256
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher", "token_accuracy": "higher"}

    def __post_init__(self) -> None:
        if self.length < 2 or self.samples < 1 or self.before < 1:
            raise WeirError(
                "verbatim takes answers of 2 tokens, 1 sample and 1 token before its statements, "
                "or more"
            )
        if self.farthest < self._nearest:
            raise WeirError(
                f"the distances of verbatim with {self.length} tokens begin at "
                f"{self._nearest}, past {self.farthest}"
            )

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question once; returns the figures of `ask_facts`."""
        distances = distances_to(self.farthest, self._nearest)

        def draw(form: ExerciseFacts, rows: int, rng: np.random.Generator) -> FactStreams:
            facts = [form.long(len(distances), self.length, rng) for _ in range(rows)]
            return scatter_facts(facts, distances, self.before, len(form.front), rng)

        found = ask_facts(subject, draw, distances, self.samples, self.text, progress)
        del found["stale"]
        return found

    @property
    def _nearest(self) -> int:
        """The first distance, doubled from 16, that leaves room for a whole statement."""
        least = NEAREST
        while least < 2 * self.length + 8:
            least *= 2
        return least
