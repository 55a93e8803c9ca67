"""Facts said in book text and asked for again later, each answered in place by the right answer.

Knows nothing about how a fact is worded, or where it is said: that is in `forms.py`, and drawn by
each task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weir.errors import WeirError
from weir.evals.measures import counted
from weir.evals.task import Progress, Subject
from weir.evals.tasks.forms import Fact, Form
from weir.evals.tasks.layout import Layout, answers_in_place, lay_out
from weir.stream import read_stream
from weir.train import passage

BOOK_TOKENS = 200_000
"""Tokens of the text from which passages are taken."""


@dataclass(frozen=True)
class Sample:
    """Streams to be read side by side, and what is asked of them.

    Attributes:
        facts: of each stream, for each question what was said of it, the newest last.
        layout: where it all stands, in every stream.
        opening: ids that stand at the start of every stream, behind its front.
    """

    facts: Sequence[Sequence[Sequence[Fact]]]
    layout: Layout
    opening: tuple[int, ...] = ()

    def ids(self, front: np.ndarray, book: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Book text with the facts in it [streams, length].

        Raises:
            WeirError: the book is too short.
        """
        length = self.layout.length
        if len(book) <= length:
            raise WeirError(
                f"stretches of {length:,} tokens are taken from a text, and this one has "
                f"{len(book):,}"
            )
        rows = []
        for stream in self.facts:
            begin = np.array([*front, *self.opening], dtype=np.int64)
            row = np.concatenate([begin, passage(book, length - len(begin), rng)])
            for facts, places, answer in zip(
                stream, self.layout.statements, self.layout.answers, strict=True
            ):
                for fact, place in zip(facts, places, strict=True):
                    row[place : place + len(fact.said)] = fact.said
                newest = facts[-1]
                place = answer - len(newest.ask)
                row[place : place + len(newest.said)] = newest.said
            rows.append(row)
        return torch.from_numpy(np.stack(rows))


Draw = Callable[[Form, int, np.random.Generator], Sample]
"""CounterRNG so many streams to be read side by side."""


def scattered(
    facts: Sequence[Sequence[Sequence[Fact]]],
    distances: Sequence[int],
    before: int,
    front: int,
    rng: np.random.Generator,
) -> Sample:
    """Facts anywhere in book text, but each said last its distance before the answer is due.

    Args:
        facts: as in `Sample`; those of a question stand in every stream in as many tokens.
        distances, before: as for `lay_out`.
        front: tokens in front of every stream.
        rng: draws the places.

    Raises:
        WeirError: there is no room for all that is to be said.
    """
    every = [fact for stream in facts for question in stream for fact in question]
    layout = lay_out(
        distances,
        before,
        rng,
        said=max(len(fact.said) for fact in every),
        asks=[len(question[-1].ask) for question in facts[0]],
        times=len(facts[0][0]),
        front=front,
    )
    return Sample(facts, layout)


def ask_facts(
    subject: Subject,
    form: Form,
    draw: Draw,
    distances: Sequence[int],
    samples: int,
    text: str | None,
    progress: Progress,
) -> dict[str, Any]:
    """Read streams and ask all their questions, each answered in place by the right answer.

    Args:
        subject: who is asked.
        form: how facts are worded.
        draw: what is said where; its questions are in the order of `distances`.
        distances: what each question is recorded under.
        samples: streams in all.
        text: a file of books; None takes the packaged one.
        progress: told of the share that is done.

    Returns:
        "accuracy" with "right", "asked", "low" and "high" (95 %), and the same "by_distance";
        "stale", the share of answers that are as an earlier fact has it where the two first differ;
        "token_accuracy", the share of the answers' tokens that are right; "tokens"
        of one stream, "kv_bytes" of one, "format".
    """
    book = read_stream(subject.tokenizer, text, BOOK_TOKENS).ids.numpy()
    rng = np.random.default_rng(subject.seed)
    right, stale, tokens_right, tokens_asked = [0] * len(distances), 0, 0, 0
    kv_bytes = tokens = done = 0
    while done < samples:
        rows = min(form.at_once, samples - done)
        sample = draw(form, rows, rng)
        ids = sample.ids(form.front, book, rng)
        stream = subject.stream()
        newest = [[facts[-1] for facts in row] for row in sample.facts]
        sizes = [len(fact.answer) for fact in newest[0]]
        found = answers_in_place(stream, ids, sample.layout.answers, sizes)
        for question, said in enumerate(found):
            for row, answer in enumerate(said.numpy()):
                wanted = newest[row][question].answer
                right[question] += bool((answer == wanted).all())
                tokens_right += int((answer == wanted).sum())
                tokens_asked += len(wanted)
                earlier = sample.facts[row][question][:-1]
                stale += any(_begins_as(answer, fact.answer, wanted) for fact in earlier)
            progress((done + rows * stream.seen / sample.layout.length) / samples)
        done += rows
        kv_bytes, tokens = max(kv_bytes, stream.nbytes // rows), sample.layout.length
    asked = samples * len(distances)
    return {
        **counted(sum(right), asked),
        "stale": stale / asked,
        "token_accuracy": tokens_right / tokens_asked,
        "by_distance": [
            {"distance": distance, **counted(hits, samples)}
            for distance, hits in zip(distances, right, strict=True)
        ],
        "tokens": tokens,
        "kv_bytes": kv_bytes,
        "format": form.name,
    }


def _begins_as(answer: np.ndarray, old: np.ndarray, new: np.ndarray) -> bool:
    """Whether an answer is the old one's where the old and the new one first differ.

    The new one was fed, so that only there it is known what would have been said.
    """
    short = min(len(old), len(new))
    differ = np.flatnonzero(old[:short] != new[:short])
    if not len(differ):
        return False
    first = int(differ[0])
    return bool((answer[: first + 1] == old[: first + 1]).all())
