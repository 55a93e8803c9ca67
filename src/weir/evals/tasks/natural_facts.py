"""`facts`: facts in natural sentences or chat turns, asked for some hundred tokens later.

For real models. Every fact of a stream is of another kind (a code, an animal, a city ...), since a
small model mixes up facts of one kind even where it holds the whole text. A question is asked
beside the stream and taken back: it leaves nothing there that a later question could copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.answers import check_template, feed_aside
from weir.evals.scores import count_right
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.lines import ADJECTIVES, NOUNS
from weir.stream import read_stream, render_chat
from weir.train import NAMES, front_of, passage

Form = Literal["sentence", "chat", "changed", "several"]

BLOCK = 100
"""Tokens of a block of a stream. Facts end and questions begin where blocks end."""
TOGETHER = 3
"""Facts of one sentence under `form=several`."""
AT_ONCE = 8
"""Streams that are read side by side."""
BOOK_TOKENS = 200_000
"""Tokens of the text from which passages are taken."""

CITIES = """Athens Berlin Boston Brussels Budapest Cairo Chicago Delhi Denver Dublin Geneva Hamburg
    Havana Lima Lisbon Madrid Milan Munich Naples Oslo Prague Seattle Tokyo Venice Vienna
    Warsaw""".split()
ANIMALS = """badger camel crow donkey falcon ferret fox goat goose hedgehog horse lizard monkey
    otter owl parrot peacock pony rabbit raven snake spider swan tiger turtle wolf""".split()

KINDS = (
    ("The secret access code of {} is", "What is the secret access code of {}?", "code"),
    ("The password of {} is", "What is the password of {}?", "words"),
    ("The house number of {} is", "What is the house number of {}?", "number"),
    ("The favourite animal of {} is the", "What is the favourite animal of {}?", "animal"),
    ("{} now lives in the city of", "In which city does {} live now?", "city"),
    (
        "The meeting with {} will take place in room number",
        "In which room number will the meeting with {} take place?",
        "number",
    ),
    ("The treasure of {} is buried under the", "Where is the treasure of {} buried?", "words"),
    ("The boat of {} was built in the year", "In which year was the boat of {} built?", "year"),
)
"""Kinds of facts: how each begins and is asked for, and what its answer is."""


def _draw_answer(kind: str, rng: np.random.Generator) -> str:
    match kind:
        case "code":
            return f" {rng.integers(10_000, 100_000)}"
        case "number":
            return f" {rng.integers(100, 1000)}"
        case "year":
            return f" {rng.integers(1700, 1900)}"
        case "animal":
            return f" {rng.choice(ANIMALS)}"
        case "city":
            return f" {rng.choice(CITIES)}"
    return f" {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


@dataclass(frozen=True)
class NaturalFact:
    """A fact in words: how it begins, its question, and its answers, the newest last."""

    begun: str
    question: str
    answers: tuple[str, ...]


def draw_facts(count: int, times: int, rng: np.random.Generator) -> list[NaturalFact]:
    """Draw facts of different people and kinds, each with `times` different answers."""
    found = []
    for kind, name in zip(
        rng.permutation(len(KINDS))[:count], rng.permutation(NAMES)[:count], strict=True
    ):
        begun, question, answer = KINDS[kind]
        answers: dict[str, None] = {}
        while len(answers) < times:
            answers[_draw_answer(answer, rng)] = None
        found.append(NaturalFact(begun.format(name), question.format(name), tuple(answers)))
    return found


class Wording:
    """The ids of statements, questions and the text between them, in a book or in a chat.

    Args:
        tokenizer: of the model.
        chat: whether in turns of the model's chat template.

    Attributes:
        front: ids at the start of every stream.

    Raises:
        WeirError: there is no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.front = front_of(tokenizer)
        if chat:
            check_template(tokenizer)
            hello = [{"role": "user", "content": "Hello! I will read to you from a book today."}]
            self.front = self.ids(render_chat(tokenizer, hello) + "I am listening.")
            said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "@ANSWER@"}]
            asked = [*said, {"role": "user", "content": "@TURN@"}]
            after = render_chat(tokenizer, asked).partition("@ANSWER@")[2]
            self._opening, _, self._closing = after.partition("@TURN@")

    def ids(self, text: str) -> np.ndarray:
        """Encode a text without special tokens in front."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int64)

    def statement(self, sentence: str) -> np.ndarray:
        """The ids that tell a sentence."""
        if self.chat:
            told = f"{self._opening}Please remember this: {sentence}{self._closing}"
            return self.ids(f"{told}I will remember it.")
        return self.ids(f"\n\n{sentence}\n\n")

    def question(self, fact: NaturalFact) -> np.ndarray:
        """The ids that ask for a fact, up to where its answer begins."""
        if self.chat:
            return self.ids(f"{self._opening}{fact.question}{self._closing}{fact.begun}")
        return self.ids(f"\n\n{fact.begun}")

    def between(self, length: int, book: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Exactly `length` ids of book text; in a chat, a turn that is read out and thanked for.

        Raises:
            WeirError: there is no room for a turn.
        """
        if not self.chat:
            return passage(book, length, rng)
        opening = self.ids(self._opening)
        closing = self.ids(f"{self._closing}Thank you. Please go on.")
        if (room := length - len(opening) - len(closing)) < 1:
            raise WeirError(f"a statement leaves {length} tokens of {BLOCK} for a turn before it")
        return np.concatenate([opening, passage(book, room, rng), closing])


@task("facts")
@dataclass(frozen=True)
class Facts(Task):
    """Facts in natural words, told in a book or a chat and asked for at each of some distances.

    Attributes:
        form: `sentence`, a paragraph of its own in a book; `chat`, a turn among turns that read out
            a book; `changed`, told twice with different answers, of which the newest counts;
            `several`, three facts in one sentence.
        distances: tokens between a statement and its question, multiples of 100 with spaces
            between them.
        samples: streams.
        facts: in each stream, each of another kind and about somebody else.
        every: tokens from one statement to the next, a multiple of 100.
        before: tokens in front of the first statement's end, a multiple of 100.
        text: a file of books; none takes the packaged one.
    """

    form: Form = "sentence"
    distances: str | int = "200 400 800 1600"
    samples: int = 8
    facts: int = 8
    every: int = 100
    before: int = 300
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise WeirError(f"form of facts is {', '.join(get_args(Form))}, not {self.form!r}")
        if not 1 <= self.facts <= len(KINDS) or self.samples < 1:
            raise WeirError(f"facts takes 1 to {len(KINDS)} facts and 1 sample or more")
        if not self.tokens_back or any(
            n < BLOCK or n % BLOCK for n in (self.every, self.before, *self.tokens_back)
        ):
            raise WeirError(
                f"distances, every and before of facts are multiples of {BLOCK} tokens, with "
                "spaces between them: facts(distances='200 800')"
            )

    @property
    def tokens_back(self) -> tuple[int, ...]:
        """The distances as numbers; empty if they are no numbers."""
        words = str(self.distances).split()
        return tuple(map(int, words)) if all(word.isdecimal() for word in words) else ()

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask for every fact at every distance.

        Returns:
            "accuracy" with "right", "asked", "low" and "high" (95 %), and the same "by_distance";
            for `changed` "stale", the share of answers that are the old one; "tokens" of one
            stream, "kv_bytes" of one.
        """
        rng = np.random.default_rng(subject.seed)
        wording = Wording(subject.tokenizer, self.form == "chat")
        book = read_stream(subject.tokenizer, self.text, BOOK_TOKENS).ids.numpy()
        right = dict.fromkeys(self.tokens_back, 0)
        asked = dict.fromkeys(self.tokens_back, 0)
        stale = done = kv_bytes = tokens = 0
        while done < self.samples:
            rows = [
                ToldFacts(wording, self, book, rng)
                for _ in range(min(AT_ONCE, self.samples - done))
            ]
            stream = subject.stream()
            ids = torch.from_numpy(np.stack([row.ids for row in rows]))
            for place, number, distance in rows[0].schedule:
                if place > stream.seen:
                    stream.feed(ids[:, stream.seen : place])
                prompts, answers = [], []
                for row in rows:
                    fact = row.facts[number]
                    prompts.append(wording.question(fact))
                    answers.append([wording.ids(answer) for answer in fact.answers])
                newest = [several[-1] for several in answers]
                for row, likeliest in enumerate(_likeliest(stream, prompts, newest)):
                    right[distance] += bool((likeliest == newest[row]).all())
                    asked[distance] += 1
                    stale += any(_follows(likeliest, old, newest[row]) for old in answers[row][:-1])
                progress((done + len(rows) * place / rows[0].length) / self.samples)
            done += len(rows)
            kv_bytes, tokens = max(kv_bytes, stream.nbytes // len(rows)), stream.seen
        return {
            **count_right(sum(right.values()), sum(asked.values())),
            **({"stale": stale / sum(asked.values())} if self.form == "changed" else {}),
            "by_distance": [
                {"distance": distance, **count_right(hits, asked[distance])}
                for distance, hits in right.items()
            ],
            "tokens": tokens,
            "kv_bytes": kv_bytes,
        }


@dataclass
class ToldFacts:
    """One stream and its facts.

    Attributes:
        facts: what is asked for.
        ids: of the stream [length].
        schedule: of every question the place where it comes, the fact's number and the distance;
            the same in every stream of a task.
    """

    wording: Wording
    task: Facts
    book: np.ndarray
    rng: np.random.Generator
    facts: list[NaturalFact] = field(init=False)
    ids: np.ndarray = field(init=False)
    schedule: list[tuple[int, int, int]] = field(init=False)

    def __post_init__(self) -> None:
        task, times = self.task, 2 if self.task.form == "changed" else 1
        self.facts = draw_facts(task.facts, times, self.rng)
        size = TOGETHER if task.form == "several" else 1
        groups = [range(task.facts)[i : i + size] for i in range(0, task.facts, size)]
        told: dict[int, str] = {}
        self.schedule = []
        for time in range(times):
            for group in groups:
                place = task.before + len(told) * task.every
                told[place] = _sentence([self.facts[n] for n in group], time)
                if time == times - 1:
                    self.schedule += [(place + d, n, d) for n in group for d in task.tokens_back]
        self.schedule.sort()
        self.ids = np.concatenate(list(self._blocks(told)))

    @property
    def length(self) -> int:
        """Tokens of the stream, up to the last question."""
        return self.schedule[-1][0]

    def _blocks(self, told: dict[int, str]) -> Iterator[np.ndarray]:
        """The stream in blocks; `told` has the sentences by the places where they end."""
        for end in range(BLOCK, self.length + 1, BLOCK):
            front = self.wording.front if end == BLOCK else self.wording.front[:0]
            said = self.wording.statement(told[end]) if end in told else front[:0]
            room = BLOCK - len(front) - len(said)
            yield np.concatenate([front, self.wording.between(room, self.book, self.rng), said])


def _sentence(facts: list[NaturalFact], time: int) -> str:
    """One sentence of some facts, with the answers that are told at this time."""
    parts = [f"{fact.begun}{fact.answers[time]}" for fact in facts]
    parts[1:] = [f"the{p[3:]}" if p.startswith("The ") else p for p in parts[1:]]
    *first, last = parts
    return f"{', '.join(first)}, and {last}." if first else f"{last}."


def _likeliest(stream: Any, prompts: list[np.ndarray], answers: list[np.ndarray]) -> list[Any]:
    """The likeliest token in each place of the answers, given the right ones before it.

    All of an answer's are right exactly if greedy decoding gives the answer.
    """
    asked = [np.concatenate(pair) for pair in zip(prompts, answers, strict=True)]
    longest = max(map(len, asked))
    # What stands behind an answer is not looked at, and all of it is taken back.
    ids = np.stack([np.pad(one, (0, longest - len(one)), mode="edge") for one in asked])
    logits: Tensor = feed_aside(stream, torch.from_numpy(ids))
    found = logits.argmax(-1).cpu().numpy()
    return [
        row[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
        for row, prompt, answer in zip(found, prompts, answers, strict=True)
    ]


def _follows(likeliest: np.ndarray, old: np.ndarray, new: np.ndarray) -> bool:
    """Whether an answer is the old one up to where old and new differ; later tokens say nothing."""
    short = min(len(old), len(new))
    differ = np.flatnonzero(old[:short] != new[:short])
    first = int(differ[0]) + 1 if len(differ) else 0
    return bool(first and (likeliest[:first] == old[:first]).all())
