"""`recall`: names with numbers stated in book text and asked for after a distance.

What the packaged model practices (`weir.train.exercises`), streamed: "Anna has 482." somewhere in a
book, and much later "Anna has". Inside its window nano always answers right, so a wrong answer
means that the cache lost the number. Other models can be asked if their tokenizer has the digits
and enough of the names as single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from weir.errors import WeirError
from weir.evals.scores import count_right
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.facts import NEAREST, StreamLayout, answers_in_place, distances_to, lay_out
from weir.stream import read_stream
from weir.train import DIGITS, Words, passage

STATEMENT = 4 + DIGITS
"""Tokens of a statement: name, verb, space, digits, stop."""
ASK = 3
"""Tokens of a question: name, verb, space."""
BOOK_TOKENS = 200_000
"""Tokens of the text from which passages are taken."""


@task("recall")
@dataclass(frozen=True)
class Recall(Task):
    """Nano's exercises on a stream: numbers asked for after 16, 32, 64 ... tokens.

    Attributes:
        samples: streams, each with one question per distance; all are read side by side.
        farthest: the largest distance, in tokens between a number and the place of the answer.
        before: tokens in front of the statement that stands farthest back.
        text: a file of books from which the text between is taken; none takes the packaged one.
    """

    samples: int = 32
    farthest: int = 1024
    before: int = 256
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"recall": "higher"}

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise WeirError(f"recall takes 1 sample or more, not {self.samples}")
        if self.farthest < NEAREST:
            raise WeirError(f"the distances of recall begin at {NEAREST}, past {self.farthest}")
        if self.before < 1:
            raise WeirError(f"recall has 1 token or more before its statements, not {self.before}")

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question once.

        The right number is fed after each question, as in the exercises; an answer is right exactly
        if greedy decoding would give all its digits.

        Returns:
            "recall" (share of right answers), "right", "asked", "low" and "high" (95 %), and the
            same "by_distance"; "tokens" of one stream, "kv_bytes" of one.
        """
        words = Words.of(subject.tokenizer)
        book = read_stream(subject.tokenizer, self.text, BOOK_TOKENS).ids.numpy()
        rng = np.random.default_rng(subject.seed)
        distances = distances_to(self.farthest)
        asks = [ASK] * len(distances)
        layout = lay_out(distances, self.before, rng, statement=STATEMENT, asks=asks)
        if len(book) <= layout.length:
            raise WeirError(
                f"recall takes stretches of {layout.length:,} tokens from a text, and this one has "
                f"{len(book):,}"
            )
        rows, numbers = zip(
            *(sample(words, book, layout, rng) for _ in range(self.samples)), strict=True
        )
        ids, wanted = torch.from_numpy(np.stack(rows)), torch.from_numpy(np.stack(numbers))
        stream = subject.stream()
        right = []
        predicted = answers_in_place(stream, ids, layout.answers, [DIGITS] * len(distances))
        for question, digits in enumerate(predicted):
            right.append(int((digits == wanted[:, question]).all(dim=-1).sum()))
            progress(stream.seen / layout.length)
        total = count_right(sum(right), self.samples * len(right))
        return {
            "recall": total.pop("accuracy"),
            **total,
            "by_distance": [
                {"distance": distance, **count_right(hits, self.samples)}
                for distance, hits in zip(distances, right, strict=True)
            ],
            "tokens": layout.length,
            "kv_bytes": stream.nbytes // self.samples,
        }


def sample(
    words: Words, book: np.ndarray, layout: StreamLayout, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A stream [length] and the numbers that are asked for [questions, digits]."""
    count = len(layout.answers)
    names = rng.choice(words.names, size=count, replace=False)
    numbers = rng.choice(words.digits, size=(count, DIGITS))
    row = np.concatenate([words.front, passage(book, layout.length - len(words.front), rng)])
    for name, number, stated, asked in zip(
        names, numbers, layout.statements, layout.answers, strict=True
    ):
        for place in (*stated, asked - ASK):
            row[place : place + STATEMENT] = words.statement(name, number)
    return row, numbers
