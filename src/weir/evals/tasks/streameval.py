"""`streameval`: lines with numbers on one endless stream, and a query every ten lines.

StreamingLLM (Xiao et al. 2024), section 4.3, Figures 8 and 9, and Table 7: what is asked for stood
a given number of lines back; nothing is ever reset, and the model's own answers stay in the stream.
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
"""Table 7's, in lines."""

Query = tuple[int, int]
"""After how many lines it comes, and how many lines back it asks."""


@task("streameval")
@dataclass(frozen=True)
class StreamEval(Task):
    """Lines with numbers on one stream, and after every few a question for one some lines back.

    Attributes:
        distance: of the questions, in lines; none asks at each of Table 7's, 20 to 1,000, in random
            order on the same stream.
        samples: streams; the paper has 100.
        queries: per stream and distance; the paper has 100.
        every: lines between two queries.
        format: `exercises` has lines as nano knows them, "table has 482." for any word; `text` has
            those of the paper, "line quiet-lamp: REGISTER_CONTENT is <24169>"; none takes
            exercises for a model that was trained on them, as nano was, and text for others.
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
            "accuracy" with "right", "asked", "low" and "high" (95 %), and the same "by_distance"
            (in lines, with the "tokens" that is on average); "tokens" of one stream, "kv_bytes" of
            one, "format".
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
    """Schedule the queries, once there are lines enough: in random order, no line twice."""
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
    """Lines as nano's exercises have them, with any word for a name.

    Attributes:
        at_once: number of streams that can be read side by side.
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
        # Names repeat once all are used: the last line of a name is the one asked for.
        rounds = -(-count // len(names))
        drawn = [rng.permutation(names) for _ in range(rows * rounds)]
        self.names = np.concatenate(drawn).reshape(rows, -1)[:, :count]
        self.numbers = rng.choice(self.words.digits, size=(rows, count, DIGITS))
        self.after = torch.full((rows, 1), self.words.stop)

    def line(self, number: int) -> Tensor:
        """A statement, "table has 482."; the start token stands in front of the first."""
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
    """Lines as the paper has them; they differ in length, so a stream is read by itself."""

    at_once = 1

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, rows: int, count: int, rng: np.random.Generator
    ) -> None:
        self.tokenizer = tokenizer
        places = np.concatenate([rng.permutation(NAMES) for _ in range(-(-count // NAMES))])
        self.names = list(map(line_name, places))
        self.numbers = rng.integers(1, LARGEST, endpoint=True, size=count).tolist()
        self.after = self._ids("\n")
        # The first line has the start token.
        sizes = [self._ids(self._said(number)).shape[1] for number in range(min(count, 50))]
        self.per_line = float(np.mean(sizes))

    def line(self, number: int) -> Tensor:
        """A line like "line quiet-lamp: REGISTER_CONTENT is <24169>"."""
        return self._ids(self._said(number), special=number == 0)

    def question(self, number: int) -> Tensor:
        """The question in words, and the beginning of the line."""
        name = self.names[number]
        asked = f"Which number is the REGISTER_CONTENT of the line {name}?"
        return self._ids(f"{asked}\n{line_start(name)}")

    def answer_length(self, number: int) -> int:
        """The tokens of the number and the bracket after it."""
        return self._ids(f"{self.numbers[number]}>").shape[1]

    def right(self, number: int, answer: Tensor) -> int:
        """1 if the answer begins with the number and its bracket."""
        text = str(self.tokenizer.decode(answer[0].tolist())).strip()
        return int(text.startswith(f"{self.numbers[number]}>"))

    def _said(self, number: int) -> str:
        return f"{line_start(self.names[number])}{self.numbers[number]}>\n"

    def _ids(self, text: str, special: bool = False) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return torch.tensor([ids])
