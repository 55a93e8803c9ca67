"""Facts of nano's exercises in book text, asked for later; the right answer follows each question.

"Anna has 482." has single tokens of the tokenizer and one length, so many streams are read side
by side. Each task draws where and how often a fact is stated; `natural_facts` has facts in words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.scores import count_right
from weir.evals.task import Progress, Subject
from weir.stream import Stream, read_stream
from weir.train import DIGITS, Words, passage

NEAREST = 16
PATIENCE = 200
"""Draws of places after which they are drawn farther apart."""


@dataclass(frozen=True)
class StreamLayout:
    """Positions of statements and answers, the same in every sample.

    Attributes:
        statements: for each question, the positions of the first tokens of its statements, newest
            last.
        answers: the position of the first token of each answer, in order.
        length: length of the stream, up to the end of the last answer and its stop tokens.
    """

    statements: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    length: int


def distances_to(farthest: int, nearest: int = NEAREST) -> list[int]:
    """Distances 16, 32, 64 ... that end with `farthest`."""
    found = [nearest]
    while 2 * found[-1] <= farthest:
        found.append(2 * found[-1])
    return found if found[-1] == farthest else [*found, farthest]


def lay_out(
    distances: Sequence[int],
    before: int,
    rng: np.random.Generator,
    *,
    statement: int,
    asks: Sequence[int],
    times: int = 1,
    front: int = 0,
) -> StreamLayout:
    """Draw positions so that each answer comes at its distance, and nothing overlaps.

    Args:
        distances: tokens from the newest statement of what is asked for to the position of the
            answer; the farthest last.
        before: tokens in front of the earliest of the newest statements.
        rng: draws the places.
        statement: length of the longest statement.
        asks: for each question, the number of its tokens, with which its statements begin too.
        times: number of statements of each fact. Earlier statements stand anywhere before the last.
        front: reserved tokens at the beginning, where no statement is placed.

    Raises:
        WeirError: there is no room for all statements.
    """
    if distances[0] < statement:
        raise WeirError(
            f"a statement of {statement} tokens cannot be asked for after {distances[0]} tokens"
        )
    for tries in itertools.count():
        # Long statements at many distances need more room between them.
        widest = 48 * (1 + tries // PATIENCE)
        gaps = rng.integers(8, widest, size=len(distances))
        answers = before + distances[-1] + np.cumsum(gaps + statement)
        last = answers - np.array(distances) - np.array(asks)
        begins = np.sort(np.concatenate([last, answers - np.array(asks)]))
        if (np.diff(begins) >= statement).all():
            break
    length = int(answers[-1]) + statement - asks[-1]
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
            "there is no room for all that is to be statement: choose more tokens `before`"
        )
    return int(rng.choice(found))


def answers_in_place(
    stream: Stream, ids: Tensor, places: Sequence[int], sizes: Sequence[int]
) -> Iterator[Tensor]:
    """Feed streams up to their last answer, and yield the predicted answers [rows, size].

    The right answers are part of the streams and are fed: greedy decoding gives a whole answer
    exactly if each token is the likeliest after the right ones before it.

    Args:
        stream: a new one.
        ids: [rows, length].
        places: position where each answer begins, in order.
        sizes: number of tokens of each answer.
    """
    fed = 0
    for place, size in zip(places, sizes, strict=True):
        stream.feed(ids[:, fed : place - 1])
        fed = place - 1 + size
        logits = stream.feed(ids[:, place - 1 : fed], all_logits=True)
        yield torch.as_tensor(logits.argmax(-1).cpu())


@dataclass(frozen=True)
class Fact:
    """A statement that is asked for by its beginning.

    Attributes:
        ask: ids of the question, which is the beginning of the statement [n].
        answer: ids of the answer [m].
        stop: ids after the answer [k].
    """

    ask: np.ndarray
    answer: np.ndarray
    stop: np.ndarray

    @property
    def statement(self) -> np.ndarray:
        """Ids of the whole statement."""
        return np.concatenate([self.ask, self.answer, self.stop])


class ExerciseFacts:
    """Facts as nano's exercises, "Anna has 482.", in single tokens of the tokenizer.

    Attributes:
        words: the tokens.
        front: ids in front of every stream [n].
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Collect the words that the tokenizer has as single tokens.

        Raises:
            WeirError: the tokenizer lacks some.
        """
        self.words = Words.of(tokenizer)
        self.front = self.words.front

    def people(self, count: int, times: int, rng: np.random.Generator) -> list[list[Fact]]:
        """Draw `times` numbers for each of `count` people, which begin with different digits."""
        words = self.words
        _check_people(count, len(words.names))
        stop = np.array([words.stop])
        found = []
        for name in rng.choice(words.names, size=count, replace=False):
            numbers = rng.choice(words.digits, size=(times, DIGITS))
            numbers[:, 0] = rng.choice(words.digits, size=times, replace=False)
            found.append([Fact(words.question(int(name)), number, stop) for number in numbers])
        return found

    def long(self, count: int, length: int, rng: np.random.Generator) -> list[list[Fact]]:
        """Draw `count` facts whose numbers have `length` digits."""
        words = self.words
        _check_people(count, len(words.names))
        stop = np.array([words.stop])
        return [
            [Fact(words.question(int(name)), rng.choice(words.digits, size=length), stop)]
            for name in rng.choice(words.names, size=count, replace=False)
        ]


def _check_people(wanted: int, there: int) -> None:
    if wanted > there:
        raise WeirError(f"there are {there} names, and {wanted} are asked for: ask less far back")


BOOK_TOKENS = 200_000
"""Tokens of the text from which passages are taken."""
AT_ONCE = 32
"""Streams that are read side by side."""


@dataclass(frozen=True)
class FactStreams:
    """Streams to read side by side, and their facts.

    Attributes:
        facts: for each stream and question, the stated facts, newest last.
        layout: positions of statements and answers in every stream.
    """

    facts: Sequence[Sequence[Sequence[Fact]]]
    layout: StreamLayout

    def ids(self, front: np.ndarray, book: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Insert the facts into book text [streams, length].

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
            row = np.concatenate([front, passage(book, length - len(front), rng)])
            for facts, places, answer in zip(
                stream, self.layout.statements, self.layout.answers, strict=True
            ):
                for fact, place in zip(facts, places, strict=True):
                    row[place : place + len(fact.statement)] = fact.statement
                newest = facts[-1]
                place = answer - len(newest.ask)
                row[place : place + len(newest.statement)] = newest.statement
            rows.append(row)
        return torch.from_numpy(np.stack(rows))


Draw = Callable[[ExerciseFacts, int, np.random.Generator], FactStreams]
"""Draws the given number of streams, to be read side by side."""


def scatter_facts(
    facts: Sequence[Sequence[Sequence[Fact]]],
    distances: Sequence[int],
    before: int,
    front: int,
    rng: np.random.Generator,
) -> FactStreams:
    """Scatter facts in book text, with each newest statement at its distance from the answer.

    Args:
        facts: as in `FactStreams`; the facts of a question have the same length in every stream.
        distances, before: as for `lay_out`.
        front: tokens in front of every stream.
        rng: draws the places.

    Raises:
        WeirError: there is no room for all statements.
    """
    every = [fact for stream in facts for question in stream for fact in question]
    layout = lay_out(
        distances,
        before,
        rng,
        statement=max(len(fact.statement) for fact in every),
        asks=[len(question[-1].ask) for question in facts[0]],
        times=len(facts[0][0]),
        front=front,
    )
    return FactStreams(facts, layout)


def ask_facts(
    subject: Subject,
    draw: Draw,
    distances: Sequence[int],
    samples: int,
    text: str | None,
    progress: Progress,
) -> dict[str, Any]:
    """Read streams and ask all questions, with the right answer fed after each.

    Args:
        subject: the model and policy to ask.
        draw: draws the streams; questions are in the order of `distances`.
        distances: distance of each question, under which it is recorded.
        samples: total number of streams.
        text: a file of books; None takes the packaged one.
        progress: called with the share that is done.

    Returns:
        "accuracy" with "right", "asked", "low" and "high" (95 %), and the same "by_distance";
        "stale", the share of answers that agree with an earlier fact where old and new first
        differ; "token_accuracy", the share of the answers' tokens that are right; "tokens" of one
        stream, "kv_bytes" of one.

    Raises:
        WeirError: the tokenizer lacks the words of the exercises.
    """
    form = ExerciseFacts(subject.tokenizer)
    book = read_stream(subject.tokenizer, text, BOOK_TOKENS).ids.numpy()
    rng = np.random.default_rng(subject.seed)
    right, stale, tokens_right, tokens_asked = [0] * len(distances), 0, 0, 0
    kv_bytes = tokens = done = 0
    while done < samples:
        rows = min(AT_ONCE, samples - done)
        sample = draw(form, rows, rng)
        ids = sample.ids(form.front, book, rng)
        stream = subject.stream()
        newest = [[facts[-1] for facts in row] for row in sample.facts]
        sizes = [len(fact.answer) for fact in newest[0]]
        found = answers_in_place(stream, ids, sample.layout.answers, sizes)
        for question, predicted in enumerate(found):
            for row, answer in enumerate(predicted.numpy()):
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
        **count_right(sum(right), asked),
        "stale": stale / asked,
        "token_accuracy": tokens_right / tokens_asked,
        "by_distance": [
            {"distance": distance, **count_right(hits, samples)}
            for distance, hits in zip(distances, right, strict=True)
        ],
        "tokens": tokens,
        "kv_bytes": kv_bytes,
    }


def _begins_as(answer: np.ndarray, old: np.ndarray, new: np.ndarray) -> bool:
    """Whether an answer agrees with the old fact up to where old and new first differ.

    The new answer was fed, so predictions after the first difference say nothing.
    """
    short = min(len(old), len(new))
    differ = np.flatnonzero(old[:short] != new[:short])
    if not len(differ):
        return False
    first = int(differ[0])
    return bool((answer[: first + 1] == old[: first + 1]).all())
