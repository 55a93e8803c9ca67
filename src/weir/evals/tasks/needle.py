"""`needle`: hides a needle in a haystack, by the length of the hay and the depth of the needle.

BalanceKV (Kochetkova et al. 2025), section 4.3 and Figure 4, after Kamradt 2023 and Fu et al. 2024:
one sentence is hidden in a long text and asked for at its end; a heat map shows where it was found.
The text format needs a model that answers questions. For nano the needle is an exercise, "Anna has
482.", and the question is "Anna has".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.answers import ask
from weir.evals.scores import words_found
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.exercises import BOOK_TOKENS
from weir.pools import Bounds, Count
from weir.stream import read_stream
from weir.train import DIGITS, Words, passage, practiced

SHORTEST = 64
MOST = 50
"""Largest number of tokens of an answer in words."""


@task("needle")
@dataclass(frozen=True)
class Needle(Task):
    """Hides needles in hay of several lengths up to `longest`, each at depths from 0 to 1.

    Attributes:
        longest: number of tokens of the longest hay; the others are shorter by equal steps. With
            `format=exercises`, this includes the needle and the question.
        lengths: how many lengths; 1 means only the longest.
        depths: how many depths, from the beginning to the end; 2 or more.
        samples: number of prompts of each length and depth, in different hay.
        format: `exercises`, nano's own; `text`, in words; with `none`, `exercises` for a model
            that was trained on them, and `text` for others.
        needle, question, answer: the texts for `format=text`.
        chat: put the prompt into the model's chat template, for `format=text`.
    """

    longest: int = 1024
    lengths: Count = 4
    depths: Annotated[int, Bounds(2)] = 5
    samples: Count = 8
    format: Literal["exercises", "text"] | None = None
    needle: str = "The miller's secret is a spoonful of chestnut honey in the dough."
    question: str = "What is the miller's secret?"
    answer: str = "a spoonful of chestnut honey in the dough"
    text: str | None = None
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def __post_init__(self) -> None:
        if self.longest // self.lengths < SHORTEST:
            raise WeirError(
                f"the shortest of {self.lengths} lengths up to {self.longest} would be "
                f"{self.longest // self.lengths} tokens, but hay must have at least {SHORTEST}"
            )

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Hide the needle and ask for it, at every length and depth.

        Returns:
            "accuracy", the mean of all "cells"; each cell has a "length", a "depth", its "accuracy"
            (the share of needles found, or with `format=text` the share of the right answer's words
            that were found) and how many needles were "asked" for; "kv_bytes", "format".
        """
        form = self.format or ("exercises" if practiced(subject.model.config) else "text")
        seek = self._exercises if form == "exercises" else self._words
        lengths = [self.longest * (i + 1) // self.lengths for i in range(self.lengths)]
        size = max(BOOK_TOKENS, 2 * self.longest)
        hay = read_stream(subject.tokenizer, self.text, size).ids
        if len(hay) <= self.longest:
            raise WeirError(
                f"hay of {self.longest:,} tokens needs a longer text, got {len(hay):,} tokens"
            )
        rng = np.random.default_rng(subject.seed)
        cells, largest = [], 0
        for length in lengths:
            for depth in np.linspace(0, 1, self.depths):
                found, kv_bytes = seek(subject, hay, length, float(depth), rng)
                largest = max(largest, kv_bytes)
                cell = {"length": length, "depth": float(depth)}
                cells.append({**cell, "accuracy": mean(found), "asked": len(found)})
                progress(len(cells) / (len(lengths) * self.depths))
        return {
            "accuracy": mean(cell["accuracy"] for cell in cells),
            "cells": cells,
            "kv_bytes": largest,
            "format": form,
        }

    def _exercises(
        self, subject: Subject, hay: Tensor, length: int, depth: float, rng: np.random.Generator
    ) -> tuple[Sequence[float], int]:
        """Ask in nano's format, with all samples in one batch; return 1 for each right answer."""
        try:
            words = Words.of(subject.tokenizer)
        except WeirError as error:
            raise WeirError(f"{error} Or use format=text, which hides a needle in words.") from None
        rows, numbers = zip(
            *(exercise(words, hay.numpy(), length, depth, rng) for _ in range(self.samples)),
            strict=True,
        )
        wanted = torch.from_numpy(np.stack(numbers))
        stream = subject.stream(length, DIGITS)
        first = stream.feed(torch.from_numpy(np.stack(rows)))[:, None]
        # Greedy decoding gives all digits if, and only if, each is the likeliest after the right
        # digits before it.
        rest = stream.feed(wanted[:, :-1], all_logits=True)
        predicted = torch.cat([first, rest], dim=1).argmax(-1).cpu()
        return (predicted == wanted).all(1).float().tolist(), stream.nbytes // self.samples

    def _words(
        self, subject: Subject, hay: Tensor, length: int, depth: float, rng: np.random.Generator
    ) -> tuple[Sequence[float], int]:
        """Ask in words; return the share of the right answer's words in each answer."""
        found, kv_bytes = [], 0
        for _ in range(self.samples):
            piece = passage(hay.numpy(), length, rng).tolist()
            context = hide_needle(subject.tokenizer, piece, self.needle, depth)
            prompt = (
                f"Read the following book.\n\n{context}\n\nAnswer from what the book says.\n"
                f"Question: {self.question}\nAnswer:"
            )
            stops = () if self.chat else ("\n",)
            answer = ask(subject, prompt, MOST, stops, self.chat)
            found.append(words_found(answer.text, self.answer))
            kv_bytes = max(kv_bytes, answer.kv_bytes)
        return found, kv_bytes


def exercise(
    words: Words, hay: np.ndarray, length: int, depth: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Make a prompt [length] that ends with a question, and the number it asks for [digits]."""
    name = int(rng.choice(words.names))
    number = rng.choice(words.digits, size=DIGITS)
    statement, question = words.statement(name, number), words.question(name)
    front = len(words.front)
    row = np.concatenate([words.front, passage(hay, length - front, rng)])
    place = front + round(depth * (length - front - len(statement) - len(question)))
    row[place : place + len(statement)] = statement
    row[length - len(question) :] = question
    return row, number


def hide_needle(
    tokenizer: PreTrainedTokenizerBase, hay: Sequence[int], needle: str, depth: float
) -> str:
    """Return the hay as text, with the needle after the last sentence that ends at `depth` or
    before it, or at the beginning if there is none. With a depth of 1, the needle comes last, even
    if the hay does not end with a sentence.
    """
    texts = [str(tokenizer.decode([token])) for token in hay]
    place = round(depth * len(hay))
    while 0 < place < len(hay) and not texts[place - 1].rstrip().endswith((".", "!", "?")):
        place -= 1
    before = str(tokenizer.decode(list(hay[:place]), skip_special_tokens=True)).strip()
    after = str(tokenizer.decode(list(hay[place:]), skip_special_tokens=True)).strip()
    return " ".join(part for part in (before, needle, after) if part)
