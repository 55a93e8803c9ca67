"""`streameval`: lines with numbers on one endless stream, and a query every ten lines.

StreamingLLM (Xiao et al. 2024), section 4.3, Figures 8 and 9, and Table 7: the line that is asked
for is a given number of lines back. Nothing is ever reset, and the model's own answers stay in the
stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.evals.scores import count_by_distance
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.lines import LARGEST, NAMES, line_name, line_start
from weir.pools import Count
from weir.train import DIGITS, Words, practiced

DISTANCES = (20, 40, 60, 80, 100, 150, 200, 400, 600, 800, 1000)
"""The distances of Table 7, in lines."""

Query = tuple[int, int]
"""A query: after how many lines it comes, and how many lines back the line is that it asks for."""


@task("streameval")
@dataclass(frozen=True)
class StreamEval(Task):
    """Reads lines with numbers on one stream, and after every few lines asks for one that is some
    lines back.

    Attributes:
        distance: the distance of the questions, in lines; with `none`, all distances of Table 7, 20
            to 1,000, are asked in random order on the same stream.
        samples: number of streams; the paper has 100.
        queries: number of queries per stream and distance; the paper has 100.
        every: number of lines between two queries.
        format: `exercises` has lines of the form that nano knows, such as "table has 482.", with
            any word as the name; `text` has those of the paper, "line quiet-lamp: REGISTER_CONTENT
            is <24169>"; with `none`, `exercises` for a model that was trained on them, like nano,
            and `text` for others.
    """

    distance: Count | None = None
    samples: Count = 8
    queries: Count = 10
    every: Count = 10
    format: Literal["exercises", "text"] | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question.

        Returns:
            "accuracy" with "right", "asked", "low" and "high" (the ends of its 95 % interval), and
            the same "by_distance" (in lines, with the average number of "tokens" in as many lines);
            "tokens" of one stream, "kv_bytes" of one, "format".
        """
        rng = np.random.default_rng(subject.seed)
        form = self.format or ("exercises" if practiced(subject.model.config) else "text")
        kind = ExerciseLines if form == "exercises" else TextLines
        distances = DISTANCES if self.distance is None else (self.distance,)
        schedule = make_schedule(distances, self.queries, self.every, rng)
        hits = dict.fromkeys(distances, 0)
        per_line: list[float] = []
        kv_bytes = tokens = done = 0
        while done < self.samples:
            rows = min(kind.at_once, self.samples - done)
            lines = kind(subject.tokenizer, rows, schedule[-1][0], rng)
            stream = subject.stream()
            fed, after = 0, lines.after[:, :0]
            for place, distance in schedule:
                asked = place - distance
                new = [lines.line(number) for number in range(fed, place)]
                logits = stream.feed(torch.cat([after, *new, lines.question(asked)], dim=1))
                answer = []
                for _ in range(lines.answer_length(asked)):
                    answer.append(logits.argmax(-1, keepdim=True).cpu())
                    logits = stream.feed(answer[-1])
                hits[distance] += lines.right(asked, torch.cat(answer, dim=1))
                after, fed = lines.after, place
                progress((done + rows * place / schedule[-1][0]) / self.samples)
            done += rows
            per_line.append(lines.per_line)
            kv_bytes, tokens = max(kv_bytes, stream.nbytes // rows), stream.seen
        found = count_by_distance(hits, self.samples * self.queries)
        for row in found["by_distance"]:
            row["tokens"] = round(row["distance"] * float(np.mean(per_line)))
        return {**found, "tokens": tokens, "kv_bytes": kv_bytes, "format": form}


def make_schedule(
    distances: tuple[int, ...], queries: int, every: int, rng: np.random.Generator
) -> list[Query]:
    """Schedule the queries in random order, beginning when there are enough lines; no line is asked
    for twice.
    """
    left = dict.fromkeys(distances, queries)
    place = -(-max(distances) // every) * every
    asked: set[int] = set()
    schedule = []
    while any(left.values()):
        open_ = [d for d, n in left.items() if n and place - d not in asked]
        if open_:
            distance = int(rng.choice(open_))
            left[distance] -= 1
            asked.add(place - distance)
            schedule.append((place, distance))
        place += every
    return schedule


class ExerciseLines:
    """Lines in the form of nano's exercises, with any word as a name.

    Attributes:
        at_once: number of streams that can be read in one batch.
        after: tokens after an answer [rows, n].
        per_line: tokens of a line, on average.
    """

    at_once = 32
    per_line = 4.0 + DIGITS

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, rows: int, count: int, rng: np.random.Generator
    ) -> None:
        self.words = Words.of(tokenizer)
        used = [*self.words.digits, self.words.verb, self.words.space, self.words.stop]
        names = np.setdiff1d(self.words.plain, used)
        # Names repeat after all have been used. If the name that is asked for has occurred again
        # since, only the number in the line at the given distance counts as right.
        rounds = -(-count // len(names))
        drawn = [rng.permutation(names) for _ in range(rows * rounds)]
        self.names = np.concatenate(drawn).reshape(rows, -1)[:, :count]
        self.numbers = rng.choice(self.words.digits, size=(rows, count, DIGITS))
        self.after = torch.full((rows, 1), self.words.stop)

    def line(self, number: int) -> Tensor:
        """Return a statement, "table has 482."; the first has the start token in front."""
        front = self.words.front[:0] if number else self.words.front
        pairs = zip(self.names[:, number], self.numbers[:, number], strict=True)
        rows = [np.concatenate([front, self.words.statement(*pair)]) for pair in pairs]
        return torch.from_numpy(np.stack(rows))

    def question(self, number: int) -> Tensor:
        """The beginning of the statement, "table has "."""
        asked = [self.words.question(name) for name in self.names[:, number]]
        return torch.from_numpy(np.stack(asked))

    def answer_length(self, number: int) -> int:
        """The number of digits."""
        return DIGITS

    def right(self, number: int, answer: Tensor) -> int:
        """Count the rows whose digits are all right."""
        return int((answer.numpy() == self.numbers[:, number]).all(axis=1).sum())


class TextLines:
    """Lines in the form of the paper. They differ in length, so each stream is read separately."""

    at_once = 1

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, rows: int, count: int, rng: np.random.Generator
    ) -> None:
        self.tokenizer = tokenizer
        places = np.concatenate([rng.permutation(NAMES) for _ in range(-(-count // NAMES))])
        self.names = list(map(line_name, places))
        self.numbers = rng.integers(1, LARGEST, endpoint=True, size=count).tolist()
        self.after = self._ids("\n")
        # The start token, which only the first line has, is not counted.
        sizes = [self._ids(self._said(number)).shape[1] for number in range(min(count, 50))]
        self.per_line = float(np.mean(sizes))

    def line(self, number: int) -> Tensor:
        """Return a line like "line quiet-lamp: REGISTER_CONTENT is <24169>"."""
        return self._ids(self._said(number), special=number == 0)

    def question(self, number: int) -> Tensor:
        """Return the question in words, and the beginning of the line."""
        name = self.names[number]
        asked = f"Which number is the REGISTER_CONTENT of the line {name}?"
        return self._ids(f"{asked}\n{line_start(name)}")

    def answer_length(self, number: int) -> int:
        """Count the tokens of the number and the bracket after it."""
        return self._ids(f"{self.numbers[number]}>").shape[1]

    def right(self, number: int, answer: Tensor) -> int:
        """Return 1 if the answer begins with the number and its bracket."""
        text = str(self.tokenizer.decode(answer[0].tolist())).strip()
        return int(text.startswith(f"{self.numbers[number]}>"))

    def _said(self, number: int) -> str:
        return f"{line_start(self.names[number])}{self.numbers[number]}>\n"

    def _ids(self, text: str, special: bool = False) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return torch.tensor([ids])
