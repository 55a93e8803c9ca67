"""Facts and their forms: as nano's exercises have them, or in words for any model.

In nano's form a fact is one of its exercises, "Anna has 482.", all of one length, so that many
streams are read side by side. In words it is " Anna's number is 4821.", and a stream is read by
itself. Where and how often a fact is said is the business of each task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.tasks.lines import ADJECTIVES, NOUNS
from weir.train import DIGITS, NAMES, Words, front_of


@dataclass(frozen=True)
class Fact:
    """Something that is said, and asked for again by how it began.

    Attributes:
        ask: ids of the question, with which a statement begins too [n].
        answer: ids of what is asked for [m].
        stop: ids behind it [k].
    """

    ask: np.ndarray
    answer: np.ndarray
    stop: np.ndarray

    @property
    def said(self) -> np.ndarray:
        """The whole statement."""
        return np.concatenate([self.ask, self.answer, self.stop])


class Form(ABC):
    """How facts are worded for a tokenizer.

    Attributes:
        name: as a task's `format` says it.
        at_once: how many streams can be read side by side.
        nearest: the shortest distance, in tokens, that leaves room for a statement.
        front: ids in front of every stream [n].
        opening: ids that say that what follows holds to the end [n].
    """

    name: ClassVar[str]
    at_once: ClassVar[int]
    nearest: ClassVar[int]
    front: np.ndarray
    opening: np.ndarray

    @abstractmethod
    def people(self, count: int, times: int, rng: np.random.Generator) -> list[list[Fact]]:
        """For so many people as many facts each; those of one differ where their answers begin."""

    @abstractmethod
    def long(self, count: int, length: int, rng: np.random.Generator) -> list[list[Fact]]:
        """So many facts, each alone, whose answers have `length` tokens, in words a few more."""


class ExerciseForm(Form):
    """Nano's exercises: "Anna has 482.", all in tokens that the tokenizer has."""

    name = "exercises"
    at_once = 32
    nearest = 16

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Words that the tokenizer has as single tokens.

        Raises:
            WeirError: it lacks some.
        """
        self.words = Words.of(tokenizer)
        self.front = self.words.front
        self.opening = np.array([], dtype=np.int64)

    def people(self, count: int, times: int, rng: np.random.Generator) -> list[list[Fact]]:
        """Of one name no two numbers begin with the same digit."""
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
        """Numbers of that many digits."""
        words = self.words
        _check_people(count, len(words.names))
        stop = np.array([words.stop])
        return [
            [Fact(words.question(int(name)), rng.choice(words.digits, size=length), stop)]
            for name in rng.choice(words.names, size=count, replace=False)
        ]


class TextForm(Form):
    """Words: " Anna's number is 4821.", and passwords of several words."""

    name = "text"
    at_once = 1
    nearest = 32

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.front = front_of(tokenizer)
        self.opening = self._ids(
            "Wherever this text asks for somebody's number, to its very end, the answer is the "
            "number that is given here."
        )

    def people(self, count: int, times: int, rng: np.random.Generator) -> list[list[Fact]]:
        """Of one name no two numbers begin with the same digit."""
        _check_people(count, len(NAMES))
        found = []
        for name in rng.choice(NAMES, size=count, replace=False):
            firsts = rng.choice(np.arange(1, 10), size=times, replace=False)
            numbers = 1000 * firsts + rng.integers(0, 1000, size=times)
            found.append([self._fact(f" {name}'s number is", f" {number}") for number in numbers])
        return found

    def long(self, count: int, length: int, rng: np.random.Generator) -> list[list[Fact]]:
        """Adjectives and nouns in turn, as many as make up the length."""
        _check_people(count, len(NAMES))
        found = []
        for name in rng.choice(NAMES, size=count, replace=False):
            words = ""
            while len(self._ids(words)) < length:
                words += f" {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
            found.append([self._fact(f" {name}'s password is", words)])
        return found

    def _fact(self, ask: str, answer: str) -> Fact:
        return Fact(self._ids(ask), self._ids(answer), self._ids("."))

    def _ids(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int64)


FORMS: dict[str, type[Form]] = {form.name: form for form in (ExerciseForm, TextForm)}


def form_of(tokenizer: PreTrainedTokenizerBase, format: str | None) -> Form:
    """The form of a name; of None nano's where the tokenizer has its words, and text elsewhere.

    Raises:
        WeirError: the tokenizer lacks the words that nano's form is made of.
    """
    if format is not None:
        return FORMS[format](tokenizer)  # type: ignore[call-arg]
    try:
        return ExerciseForm(tokenizer)
    except WeirError:
        return TextForm(tokenizer)


def check_format(task: str, format: str | None) -> None:
    """Refuse a format there is not.

    Raises:
        WeirError: it is none.
    """
    if format is not None and format not in FORMS:
        raise WeirError(f"format of {task} is {' or '.join(FORMS)}, not {format!r}")


def _check_people(wanted: int, there: int) -> None:
    if wanted > there:
        raise WeirError(f"there are {there} names, and {wanted} are asked for: ask less far back")
