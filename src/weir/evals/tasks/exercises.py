"""Tasks in the form of nano's exercises: names with numbers in book text, which are asked for
later.

The tasks are `recall`, `repeated`, `changed`, `verbatim` and `instruction`. All parts of "Anna has
482." are single tokens, so all statements have the same length and many streams can be read in one
batch. Within its window nano always answers right, so a wrong answer means that the cache lost the
number. Other models can be asked if their tokenizer has the digits and enough of the names as
single tokens. The task `facts` has facts in words.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch

from weir.errors import WeirError
from weir.evals.scores import count_by_distance
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.pools import Bounds, Count
from weir.stream import read_stream
from weir.train import DIGITS, Words, passage

NEAREST = 16
PATIENCE = 200
"""Number of failed draws of places after which they are drawn farther apart."""
BOOK_TOKENS = 200_000
"""Number of tokens of the text from which passages are taken."""
AT_ONCE = 32
"""Number of streams that are read in one batch."""
MOST = 9
"""Largest number of numbers for one name, each with a different first digit."""
ASK = 3
"""Tokens of a question: name, verb, space."""
STATEMENT = ASK + DIGITS + 1
"""Tokens of a statement: a question, digits, stop."""


class StreamLayout(NamedTuple):
    """The places where statements and answers begin, and the stream's length. All streams of a
    batch have the same layout.

    `statements` has the places for each question, the newest last.
    """

    statements: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    length: int


def distances_to(farthest: int, nearest: int = NEAREST) -> list[int]:
    """Return the distances from `nearest` to `farthest`, each twice the one before; only the last
    step can be smaller.
    """
    found = [nearest]
    while 2 * found[-1] <= farthest:
        found.append(2 * found[-1])
    return found if found[-1] == farthest else [*found, farthest]


def draw_layout(
    distances: Sequence[int],
    before: int,
    rng: np.random.Generator,
    *,
    statement: int = STATEMENT,
    times: int = 1,
    front: int = 0,
) -> StreamLayout:
    """Draw positions so that each answer comes at its distance, and nothing overlaps.

    Each fact is stated `times` times, with `statement` tokens each, and its earlier statements can
    be anywhere before its newest. `distances` are the numbers of tokens from the number in the
    newest statement of a fact to its answer, the largest last. In front of the newest statement of
    every fact are at least `before` tokens of the stream. The first `front` tokens of the stream
    have no statements.
    """
    if distances[0] < statement:
        raise WeirError(
            f"the shortest distance must be at least the {statement} tokens of a statement, got "
            f"{distances[0]}"
        )
    for tries in itertools.count():
        # Long statements at many distances need more space between them.
        widest = 48 * (1 + tries // PATIENCE)
        gaps = rng.integers(8, widest, size=len(distances))
        answers = before + distances[-1] + np.cumsum(gaps + statement)
        last = answers - np.array(distances) - ASK
        begins = np.sort(np.concatenate([last, answers - ASK]))
        if (np.diff(begins) >= statement).all():
            break
    length = int(answers[-1]) + statement - ASK
    free = np.ones(length, dtype=bool)
    free[:front] = False
    for begin in begins:
        free[begin : begin + statement] = False
    statements = [[int(place)] for place in last]
    for places in statements:
        for _ in range(times - 1):
            places.insert(0, _room(free[: places[-1]], statement, rng))
            free[places[0] : places[0] + statement] = False
        places.sort()
    return StreamLayout(tuple(map(tuple, statements)), tuple(answers.tolist()), length)


def _room(free: np.ndarray, size: int, rng: np.random.Generator) -> int:
    """Draw a position where `size` tokens are free."""
    found = np.array([], dtype=np.int64)
    if len(free) >= size:
        windows = np.lib.stride_tricks.sliding_window_view(free, size)
        found = np.flatnonzero(windows.all(axis=1))
    if not len(found):
        raise WeirError(
            "the text has no room for all statements. Increase the number of tokens `before`."
        )
    return int(rng.choice(found))


class Fact(NamedTuple):
    """A person's number: the ids of the answer [n] and of the whole statement."""

    answer: np.ndarray
    statement: np.ndarray


StreamFacts = list[list[Fact]]
"""The stated facts of one stream, for each question, newest last."""


class Material(NamedTuple):
    """Sources of streams: words, the ids of a book [tokens], and a generator of random numbers."""

    words: Words
    book: np.ndarray
    rng: np.random.Generator


def draw_facts(
    material: Material, count: int, times: int = 1, length: int = DIGITS, distinct: bool = True
) -> StreamFacts:
    """Draw numbers of `length` digits for people; with `distinct`, the numbers of a person have
    different first digits.
    """
    words, rng = material.words, material.rng
    if count > len(words.names):
        raise WeirError(
            f"{count} names are needed, but there are only {len(words.names)}. Use fewer "
            "distances, with a smaller farthest."
        )
    found = []
    for name in rng.choice(words.names, size=count, replace=False):
        numbers = rng.choice(words.digits, size=(times, length))
        if distinct:
            numbers[:, 0] = rng.choice(words.digits, size=times, replace=False)
        found.append([Fact(number, words.statement(name, number)) for number in numbers])
    return found


def fill_in(material: Material, facts: StreamFacts, layout: StreamLayout) -> np.ndarray:
    """Return a passage of the book [length] with facts in it; the newest statement of each is
    repeated where it is asked for.
    """
    length, front = layout.length, material.words.front
    if len(material.book) <= length:
        raise WeirError(
            f"a text of more than {length:,} tokens is needed, but this one gives only "
            f"{len(material.book):,}. Use a longer text or a smaller farthest."
        )
    row = np.concatenate([front, passage(material.book, length - len(front), material.rng)])
    for told, places, answer in zip(facts, layout.statements, layout.answers, strict=True):
        for fact, place in zip((*told, told[-1]), (*places, answer - ASK), strict=True):
            row[place : place + len(fact.statement)] = fact.statement
    return row


def follows(likeliest: np.ndarray, old: np.ndarray, new: np.ndarray) -> bool:
    """Whether an answer is the old one up to where old and new first differ.

    The new answer was fed, so predictions after the first difference do not tell anything.
    """
    pairs = zip(old, new, strict=False)
    first = next((n for n, (one, other) in enumerate(pairs, 1) if one != other), 0)
    return bool(first and (likeliest[:first] == old[:first]).all())


class ExerciseTask(Task):
    """A task that asks for facts of the exercises. Subclasses are dataclasses of the parameters.

    Attributes:
        samples: number of streams, each with one question per distance.
        farthest: the largest distance, in tokens from the last statement of a number to its answer.
        before: least number of tokens in front of the first of the facts' newest statements.
        times: how often each name is stated with a number.
        length: tokens of an answer.
        at_once: number of streams that are read in one batch.
        left_out: figures that do not apply to this task.
    """

    samples: Count
    farthest: int
    before: Count = 1
    text: str | None
    times: int = 1
    length: int = DIGITS
    at_once: ClassVar[int] = AT_ONCE
    left_out: ClassVar[tuple[str, ...]] = ("stale",)
    metrics: ClassVar[Mapping[str, Better]] = {"accuracy": "higher"}

    def __post_init__(self) -> None:
        if self.farthest < self.nearest:
            raise WeirError(
                f"farthest of {self.name} must be at least its nearest distance, {self.nearest}, "
                f"got {self.farthest}"
            )

    @property
    def nearest(self) -> int:
        """The first of the distances 16, 32, 64 ... that is long enough for two statements."""
        return max(NEAREST, 1 << (2 * self.length + 7).bit_length())

    def draw(
        self, material: Material, distances: Sequence[int], rows: int
    ) -> tuple[Iterable[StreamFacts], StreamLayout]:
        """Draw the facts of some streams, and the positions in all of them."""
        several = self.times > 1
        facts = [
            draw_facts(material, len(distances), self.times, self.length, distinct=several)
            for _ in range(rows)
        ]
        size, front = ASK + self.length + 1, len(material.words.front)
        return facts, draw_layout(
            distances, self.before, material.rng, statement=size, times=self.times, front=front
        )

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Read streams and ask all questions, with the right answer fed after each.

        Returns:
            "accuracy" with "right", "asked", and its 95 % interval from "low" to "high"; the same
            for each distance in "by_distance";
            "marks", 1 or 0 for each answer in the order of the questions;
            "stale", the share of answers that agree with an earlier fact where old and new first
            differ; "token_accuracy", the share of the answers' tokens that are right; "tokens" of
            one stream, "kv_bytes" of one. Figures in `left_out` are not returned.

        Raises:
            WeirError: the tokenizer lacks the words of the exercises.
        """
        words = Words.of(subject.tokenizer)
        book = read_stream(subject.tokenizer, self.text, BOOK_TOKENS).ids.numpy()
        material = Material(words, book, np.random.default_rng(subject.seed))
        distances = distances_to(self.farthest, self.nearest)
        right = dict.fromkeys(distances, 0)
        stale = tokens_right = kv_bytes = tokens = done = 0
        marks = ""
        while done < self.samples:
            rows = min(self.at_once, self.samples - done)
            drawn, layout = self.draw(material, distances, rows)
            if layout.length >= BOOK_TOKENS:
                sizes = [n for n in ("farthest", "before") if n in vars(self)]
                given = " and ".join(f"{n}={getattr(self, n)}" for n in sizes)
                raise WeirError(
                    f"{self.name} with {given} needs a stream of {layout.length:,} tokens, but at "
                    f"most {BOOK_TOKENS:,} tokens of a text are read. Use a smaller "
                    f"{' or '.join(sizes)}."
                )
            # Facts may be drawn one stream at a time, together with the text of each.
            facts, ids = zip(*((f, fill_in(material, f, layout)) for f in drawn), strict=True)
            stream, text, fed = subject.stream(), torch.from_numpy(np.stack(ids)), 0
            places = zip(distances, layout.answers, strict=True)
            for question, (distance, place) in enumerate(places):
                stream.feed(text[:, fed : place - 1])
                fed = place - 1 + self.length
                # The right answer is fed. Greedy decoding gives all of it if, and only if, each
                # token is the likeliest after the right tokens before it.
                logits = stream.feed(text[:, place - 1 : fed], all_logits=True)
                for told, answer in zip(facts, logits.argmax(-1).cpu().numpy(), strict=True):
                    *earlier, newest = (fact.answer for fact in told[question])
                    known = bool((answer == newest).all())
                    right[distance] += known
                    marks += "01"[known]
                    tokens_right += int((answer == newest).sum())
                    stale += any(follows(answer, old, newest) for old in earlier)
                progress((done + rows * stream.seen / layout.length) / self.samples)
            done += rows
            kv_bytes, tokens = max(kv_bytes, stream.nbytes // rows), layout.length
        asked = self.samples * len(distances)
        figures = {
            **count_by_distance(right, self.samples),
            "marks": marks,
            "stale": stale / asked,
            "token_accuracy": tokens_right / (asked * self.length),
            "tokens": tokens,
            "kv_bytes": kv_bytes,
        }
        return {name: each for name, each in figures.items() if name not in self.left_out}


@task("recall")
@dataclass(frozen=True)
class Recall(ExerciseTask):
    """Asks for numbers after 16, 32, 64 ... tokens, as in nano's exercises."""

    samples: Count = 32
    farthest: int = 1024
    before: Count = 256
    text: str | None = None

    at_once: ClassVar[int] = sys.maxsize
    left_out: ClassVar[tuple[str, ...]] = ("stale", "token_accuracy")
    metrics: ClassVar[Mapping[str, Better]] = {"recall": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question once; "recall" is the share of right answers."""
        found = super().run(subject, progress)
        return {"recall": found.pop("accuracy"), **found}

    def draw(
        self, material: Material, distances: Sequence[int], rows: int
    ) -> tuple[Iterable[StreamFacts], StreamLayout]:
        """Draw positions, and facts one stream at a time."""
        layout = draw_layout(distances, self.before, material.rng)
        return (draw_facts(material, len(distances), distinct=False) for _ in range(rows)), layout


@dataclass(frozen=True)
class _RepeatedFacts(ExerciseTask):
    """Names that are stated several times before the question, with equal or different numbers."""

    times: Annotated[int, Bounds(2, MOST)] = 3
    samples: Count = 32
    farthest: int = 1024
    before: Count = 512
    text: str | None = None


@task("repeated")
@dataclass(frozen=True)
class Repeated(_RepeatedFacts):
    """Asks for numbers that are stated several times.

    Questions come 16, 32, 64 ... tokens after the last statement.

    A repeated fact has several chances to stay in the cache, and a cache that merges similar tokens
    has to keep it only once.
    """

    def draw(
        self, material: Material, distances: Sequence[int], rows: int
    ) -> tuple[Iterable[StreamFacts], StreamLayout]:
        """Draw a number for each name, which is said several times."""
        facts, layout = super().draw(material, distances, rows)
        return [[told[:1] * self.times for told in stream] for stream in facts], layout


@task("changed")
@dataclass(frozen=True)
class Changed(_RepeatedFacts):
    """Asks for numbers that change; the number in the newest statement is right.

    Questions come 16, 32, 64 ... tokens after the newest statement.

    A cache that favors old or average entries gives the old answer. No two numbers of a name begin
    with the same digit, so `stale` answers can be told from guesses: with `times=3`, a guess is
    stale two times in ten.
    """

    left_out: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[Mapping[str, Better]] = {"accuracy": "higher", "stale": "lower"}


@task("verbatim")
@dataclass(frozen=True)
class Verbatim(ExerciseTask):
    """Asks for long numbers, such as passwords, after 16, 32, 64 ... tokens.

    In the other tasks, a number has three digits, which are three tokens. Here it has `length`
    digits, and a cache that keeps only some of the tokens cannot reproduce it. Distances are
    counted from the beginning of the number.
    """

    length: Annotated[int, Bounds(2)] = 6
    samples: Count = 32
    farthest: int = 1024
    before: Count = 256
    text: str | None = None

    metrics: ClassVar[Mapping[str, Better]] = {"accuracy": "higher", "token_accuracy": "higher"}


@task("instruction")
@dataclass(frozen=True)
class Instruction(ExerciseTask):
    """Asks for numbers that are each given once, at the start of a stream.

    Questions come after 32, 64, 128 ... tokens.

    The first tokens of a stream are attention sinks, often hold instructions, and are the first
    that a window loses. Distances are counted from the end of all statements.
    """

    samples: Count = 32
    farthest: int = 1024
    text: str | None = None

    @property
    def nearest(self) -> int:
        """The first distance."""
        return 2 * NEAREST

    def draw(
        self, material: Material, distances: Sequence[int], rows: int
    ) -> tuple[Iterable[StreamFacts], StreamLayout]:
        """Draw facts, and let them begin the stream."""
        facts = [draw_facts(material, len(distances)) for _ in range(rows)]
        # The order of the statements is independent of the order of the questions.
        order = material.rng.permutation(len(distances))
        first = len(material.words.front)
        places = first + STATEMENT * order.argsort()
        end = first + STATEMENT * len(distances)
        answers = tuple(end + distance for distance in distances)
        statements = tuple((int(place),) for place in places)
        return facts, StreamLayout(statements, answers, answers[-1] + STATEMENT - ASK)
