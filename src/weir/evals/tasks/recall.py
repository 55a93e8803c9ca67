"""`recall`: names with numbers said in book text, asked for again after a distance.

What the packaged model practises (`weir.train.exercises`), streamed: "Anna has 482." somewhere in a
book, and much later "Anna has". Inside its window nano answers without fail, so what is missing in
an answer is missing in the cache. Other models can be asked if their tokenizer has the digits and
enough of the names as single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from weir.errors import WeirError
from weir.evals.measures import counted
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.stream import read_stream
from weir.train import DIGITS, Words, passage

SAID = 4 + DIGITS
"""Tokens of a statement: name, verb, space, digits, stop."""
ASK = 3
"""Tokens of a question: name, verb, space."""
NEAREST = 16
BOOK_TOKENS = 200_000
"""Tokens of the text from which passages are taken."""


@dataclass(frozen=True)
class Layout:
    """Where statements and answers stand, the same in every sample.

    Attributes:
        statements: the place of the first token of each.
        answers: the place of the first digit of each answer, in order.
        length: tokens of the stream, up to the last stop.
    """

    statements: tuple[int, ...]
    answers: tuple[int, ...]
    length: int


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

        The right number is fed after each, as the exercises have it; an answer is right exactly if
        greedy decoding would give all its digits.

        Returns:
            "recall" (share of right answers), "right", "asked", "low" and "high" (95 %), and the
            same "by_distance"; "tokens" of one stream, "kv_bytes" of one.
        """
        words = Words.of(subject.tokenizer)
        book = read_stream(subject.tokenizer, self.text, BOOK_TOKENS).ids.numpy()
        rng = np.random.default_rng(subject.seed)
        distances = distances_to(self.farthest)
        layout = make_layout(distances, self.before, rng)
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
        right, fed = [], 0
        for question, place in enumerate(layout.answers):
            stream.feed(ids[:, fed : place - 1])
            fed = place - 1 + DIGITS
            logits = stream.feed(ids[:, place - 1 : fed], all_logits=True)
            hits = (logits.argmax(-1).cpu() == wanted[:, question]).all(dim=-1)
            right.append(int(hits.sum()))
            progress(fed / layout.length)
        total = counted(sum(right), self.samples * len(right))
        return {
            "recall": total.pop("accuracy"),
            **total,
            "by_distance": [
                {"distance": distance, **counted(hits, self.samples)}
                for distance, hits in zip(distances, right, strict=True)
            ],
            "tokens": layout.length,
            "kv_bytes": stream.nbytes // self.samples,
        }


def distances_to(farthest: int) -> list[int]:
    """16, 32, 64 ... up to `farthest`, which is the last."""
    found = [NEAREST]
    while 2 * found[-1] <= farthest:
        found.append(2 * found[-1])
    return found if found[-1] == farthest else [*found, farthest]


def make_layout(distances: list[int], before: int, rng: np.random.Generator) -> Layout:
    """Places such that each answer is due its distance after its number, and nothing overlaps."""
    while True:
        gaps = rng.integers(8, 48, size=len(distances))
        answers = before + distances[-1] + np.cumsum(gaps + SAID)
        statements = answers - np.array(distances) - ASK
        begins = np.sort(np.concatenate([statements, answers - ASK]))
        if (np.diff(begins) >= SAID).all():
            places = tuple(statements.tolist()), tuple(answers.tolist())
            return Layout(*places, length=int(answers[-1]) + DIGITS + 1)


def sample(
    words: Words, book: np.ndarray, layout: Layout, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A stream [length] and the numbers that are asked for [questions, digits]."""
    count = len(layout.answers)
    names = rng.choice(words.names, size=count, replace=False)
    numbers = rng.choice(words.digits, size=(count, DIGITS))
    row = np.concatenate([words.front, passage(book, layout.length - len(words.front), rng)])
    for name, number, said, asked in zip(
        names, numbers, layout.statements, layout.answers, strict=True
    ):
        for place in (said, asked - ASK):
            row[place : place + SAID] = words.statement(name, number)
    return row, numbers
