"""`babi`: questions of bAbI whose facts are scattered in a novel.

Built like BABILong (Kuratov et al. 2024, section 2): the sentences of a story are inserted in order
at random places of a long text, and the question comes at its end. The model completes the sentence
of the answer, so it needs no instructions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from weir.errors import WeirError
from weir.evals.scores import count_right
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.exercises import BOOK_TOKENS
from weir.evals.tasks.natural_facts import AT_ONCE, Wording, likeliest_answers
from weir.pools import Bounds, Count
from weir.stream import read_stream, read_text
from weir.train import passage

BEGINNINGS = (
    (r"Where is ((?:the )?\w+)\?", r"{0} is in the"),
    (r"Where was the (\w+) before the (\w+)\?", r"Before the {1} the {0} was in the"),
    (r"What is (\w+) of the (\w+)\?", r"{0} of the {1} is the"),
    (r"What is the (\w+) (\w+) of\?", r"The {0} is {1} of the"),
)
"""Patterns of questions, and the beginnings of their answers."""


@dataclass(frozen=True)
class Story:
    """A question, the sentences before it, and its answer."""

    sentences: tuple[str, ...]
    question: str
    answer: str


def read_stories(path: str, most: int) -> list[Story]:
    """Read the first questions of a file, at most one of each story."""
    found: list[Story] = []
    sentences: list[str] = []
    answered = False
    for number, line in enumerate(read_text(Path(path).expanduser()).splitlines(), 1):
        parts = re.split(r"[|\t]", line)
        count, _, text = parts[0].strip().partition(" ")
        if not count.isdecimal() or not text or len(parts) not in (1, 3):
            raise WeirError(
                f"{path}, line {number}, is not in the format of bAbI: a number and a sentence, or "
                "a number, a question, an answer and the numbers of the sentences with the facts, "
                "separated by tabs or |"
            )
        if count == "1":
            sentences, answered = [], False
        if len(parts) == 1:
            sentences.append(text)
        elif not answered:
            found.append(Story(tuple(sentences), text.strip(), parts[1].strip()))
            answered = True
            if len(found) == most:
                break
    return found


@task("babi")
@dataclass(frozen=True)
class Babi(Task):
    """Hides the facts of bAbI in a novel, and asks a question at its end.

    Attributes:
        file: a file of bAbI, such as `qa1_single-supporting-fact_test.txt`.
        length: tokens of the novel and the facts in it.
        samples: largest number of questions, one from each of the first stories.
    """

    file: str
    length: Annotated[int, Bounds(100)] = 1000
    samples: Count = 64
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask all questions; several streams are read at once, in one batch.

        Returns:
            "accuracy" with "right", "asked", "low" and "high" (the ends of its 95 % interval);
            "tokens" and "kv_bytes" of one stream.
        """
        rng = np.random.default_rng(subject.seed)
        wording = Wording(subject.tokenizer, chat=False)
        book = read_stream(subject.tokenizer, self.text, max(BOOK_TOKENS, 2 * self.length)).ids
        stories = read_stories(self.file, self.samples)
        right = kv_bytes = 0
        for done in range(0, len(stories), AT_ONCE):
            some = stories[done : done + AT_ONCE]
            rows = [self._scatter(story, wording, book.numpy(), rng) for story in some]
            stream = subject.stream()
            stream.feed(torch.from_numpy(np.stack(rows)))
            prompts = [
                wording.ids(f"\n\n{s.question} {answer_beginning(s.question)}") for s in some
            ]
            answers = [wording.ids(f" {story.answer}") for story in some]
            predicted = likeliest_answers(stream, prompts, answers)
            right += sum(map(np.array_equal, predicted, answers))
            kv_bytes = max(kv_bytes, stream.nbytes // len(some))
            progress((done + len(some)) / len(stories))
        return {**count_right(right, len(stories)), "tokens": self.length, "kv_bytes": kv_bytes}

    def _scatter(
        self, story: Story, wording: Wording, book: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Return the ids of one stream: the novel with the sentences at random places."""
        sentences = [wording.ids(f"\n{sentence}\n") for sentence in story.sentences]
        room = self.length - len(wording.front) - sum(map(len, sentences))
        if room < 0:
            raise WeirError(
                f"the {len(sentences)} facts of a babi story take more than {self.length} tokens. "
                "Use a larger length."
            )
        if len(book) <= room:
            raise WeirError(
                f"length of babi is {self.length:,}, but the text has only {len(book):,} tokens. "
                "Use a longer text or a smaller length."
            )
        cuts = np.sort(rng.integers(0, room + 1, size=len(sentences)))
        parts = np.split(passage(book, room, rng), cuts)
        mixed = [piece for pair in zip(parts, sentences, strict=False) for piece in pair]
        return np.concatenate([wording.front, *mixed, parts[-1]])


def answer_beginning(question: str) -> str:
    """Return how a sentence that answers a question begins; the answer is its last word."""
    for asked, begun in BEGINNINGS:
        if match := re.fullmatch(asked, question):
            words = begun.format(*(group or "" for group in match.groups()))
            return words[:1].upper() + words[1:]
    return "Answer:"
