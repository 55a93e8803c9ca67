"""`loop`: tests whether endless greedy text ends in a loop.

Small models also repeat themselves under exact attention, so compare with the figure of `dense` for
texts that fit into the model's window.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch

from weir.errors import WeirError
from weir.evals.answers import generate_rows
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.mtbench import share_distinct
from weir.pools import Count
from weir.stream import read_stream
from weir.train import front_of, passage

SPAN = 250
"""Tokens of a stretch of text that is judged separately."""
LOOPED = 0.25
"""A stretch is a loop if the share of different runs of four tokens is below this."""
PROMPT = 100
"""Number of tokens of the book in front of each text."""


@task("loop")
@dataclass(frozen=True)
class Loop(Task):
    """Writes greedy text that continues passages of a book, in one batch.

    Attributes:
        tokens: number of tokens of each text, a multiple of 250.
        samples: number of texts.
    """

    tokens: Count = 20_000
    samples: Count = 1
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"looped": "lower"}

    def __post_init__(self) -> None:
        if self.tokens % SPAN:
            raise WeirError(f"tokens of loop must be a multiple of {SPAN}, got {self.tokens}")

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Write the texts, ignoring end tokens.

        Returns:
            "looped", the share of stretches of 250 tokens in which less than a quarter of the runs
            of four tokens are different; "distinct", the share of different runs, averaged over all
            stretches of all texts, and "distinct_by_block", the average over the texts for each
            stretch; "begins", for each text the number of the token (from 0, without the prompt) at
            which its first looped stretch begins, None if no stretch is looped; "tokens" of a text
            and "kv_bytes" of one.
        """
        rng = np.random.default_rng(subject.seed)
        front = front_of(subject.tokenizer)
        book = read_stream(subject.tokenizer, self.text, 200_000).ids.numpy()
        rows = [np.concatenate([front, passage(book, PROMPT, rng)]) for _ in range(self.samples)]
        stream = subject.stream()
        stream.feed(torch.from_numpy(np.stack(rows))[:, :-1])
        last = torch.from_numpy(np.stack(rows))[:, -1:]
        shares: list[list[float]] = []
        for written in range(SPAN, self.tokens + 1, SPAN):
            generated = generate_rows(stream, last, SPAN)
            last = generated[:, -1:]
            shares.append([share_distinct(row, gram=4) for row in generated.tolist()])
            progress(written / self.tokens)
        every = [share for block in shares for share in block]
        loops = [[share < LOOPED for share in text] for text in zip(*shares, strict=True)]
        return {
            "looped": fmean(looped for text in loops for looped in text),
            "distinct": fmean(every),
            "distinct_by_block": [fmean(block) for block in shares],
            "begins": [SPAN * text.index(True) if any(text) else None for text in loops],
            "tokens": self.tokens,
            "kv_bytes": stream.nbytes // self.samples,
        }
