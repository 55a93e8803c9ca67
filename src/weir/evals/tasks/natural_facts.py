"""`facts`: tells facts in natural sentences, chat turns or a system turn, and asks for them much
later.

This task is for real models. Every fact of a stream is of a different kind (a code, an animal, a
city ...), because a small model mixes up facts of one kind even if it holds the whole text. A
question is fed and then removed again, so it leaves nothing that a later question could copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.answers import feed_aside, generate_rows, require_template
from weir.evals.scores import count_by_distance
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.exercises import BOOK_TOKENS, follows
from weir.evals.tasks.lines import ADJECTIVES, NOUNS
from weir.pools import Bounds, Count, Marks
from weir.stream import read_stream, render_chat
from weir.train import NAMES, front_of, passage

Form = Literal["sentence", "chat", "changed", "several", "rule"]

BLOCK = 100
"""Tokens of a block of a stream. Facts end, and questions begin, at the ends of blocks."""
CHANGE = re.compile(r"\b(is|will|was|lives)\b")
"""In the statement of a changed fact, "now" is inserted after this word."""
TOGETHER = 3
"""Largest number of facts in one sentence with `form=several`."""
SHORTEST = 32
"""If the beginning of a stream leaves fewer tokens than this in a block, they are added to the next
block.
"""
AT_ONCE = 8
"""Number of streams that are read in one batch."""

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
"""Kinds of facts: the beginning of the statement, the question, and the kind of the answer."""


RULES = (
    ("Your name is", "My name is", "What is your name?", "name"),
    ("You work at the hotel", "I work at the hotel", "What is your hotel called?", "words"),
    ("You are in the city of", "I am in the city of", "In which city are you?", "city"),
    ("The code of the front door is",) * 2 + ("What is the code of the front door?", "code"),
    ("The price of a night in dollars is",) * 2 + ("What is the price of a night?", "number"),
    ("The hotel was built in the year",) * 2 + ("When was the hotel built?", "year"),
    ("The animal in the garden is a",) * 2 + ("Which animal is in the garden?", "animal"),
    ("The key lies under the",) * 2 + ("Where does the key lie?", "words"),
)
"""Sentences of a system turn.

Each has the beginning of the sentence, the beginning of the answer, the question, and the kind of
the answer.
"""
LEAK = "Please tell me a short story about the sea."
"""A request that is unrelated to the system turn, for `form=rule`."""
LEAK_TOKENS = 32
"""Largest number of tokens of the answer to `LEAK`."""
COPIED = 6
"""An answer that has this many consecutive tokens in common with the beginning of the stream, which
is mostly the system turn, counts as a leak.
"""


NUMBERS = {"code": (10_000, 100_000), "number": (100, 1000), "year": (1700, 1900)}
WORDS = {"name": NAMES, "animal": ANIMALS, "city": CITIES}


def draw_answer(kind: str, rng: np.random.Generator) -> str:
    """Draw an answer of a kind, with the space before it."""
    if kind in NUMBERS:
        return f" {rng.integers(*NUMBERS[kind])}"
    if kind in WORDS:
        return f" {rng.choice(WORDS[kind])}"
    return f" {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


class NaturalFact(NamedTuple):
    """A fact in words: how it begins, its question, and its answers, the newest last.

    `earlier` is how it began before its answer changed.
    """

    begun: str
    question: str
    answers: tuple[str, ...]
    earlier: str = ""


def draw_facts(count: int, times: int, rng: np.random.Generator) -> list[NaturalFact]:
    """Draw facts of different people and kinds, each with `times` different answers."""
    found = []
    for kind, name in zip(
        rng.permutation(len(KINDS))[:count], rng.permutation(NAMES)[:count], strict=True
    ):
        begun, question, answer = KINDS[kind]
        answers: dict[str, None] = {}
        while len(answers) < times:
            answers[draw_answer(answer, rng)] = None
        begun, earlier = begun.format(name), begun.format(name)
        if times > 1:
            earlier = earlier.replace(" now", "")
            begun = CHANGE.sub(r"\1 now", earlier, count=1)
        found.append(NaturalFact(begun, question.format(name), tuple(answers), earlier))
    return found


def draw_rule(count: int, rng: np.random.Generator) -> tuple[str, list[NaturalFact]]:
    """Draw a system turn that says who the model is, and return it with its facts."""
    sentences = ["You are the receptionist of a hotel and answer the questions of guests."]
    facts: list[NaturalFact] = []
    for kind in rng.permutation(len(RULES))[:count]:
        told, begun, question, answer = RULES[kind]
        facts.append(NaturalFact(begun, question, (draw_answer(answer, rng),)))
        sentences.append(f"{told}{facts[-1].answers[0]}.")
    return " ".join(sentences), facts


class Wording:
    """Makes the ids of statements, questions and the text between them, in a book or in a chat.

    In a chat, they are turns of the model's template. `front` has the ids with which a stream
    begins, unless it has a system turn (see `beginning`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.front = front_of(tokenizer)
        if chat:
            require_template(tokenizer)
            self.front = self.beginning()
            said = (("user", "x"), ("assistant", "@ANSWER@"), ("user", "@TURN@"))
            turns = [{"role": role, "content": text} for role, text in said]
            after = render_chat(tokenizer, turns).partition("@ANSWER@")[2]
            self._opening, _, self._closing = after.partition("@TURN@")

    def beginning(self, system: str | None = None) -> np.ndarray:
        """Return the ids of a chat's system turn, if any, and its first two turns."""
        turns = [] if system is None else [{"role": "system", "content": system}]
        turns.append({"role": "user", "content": "Hello! I will read to you from a book today."})
        return self.ids(render_chat(self.tokenizer, turns) + "I am listening.")

    def turn(self, text: str) -> np.ndarray:
        """Return the ids of a user's turn, up to the model's answer."""
        return self.ids(f"{self._opening}{text}{self._closing}")

    def ids(self, text: str) -> np.ndarray:
        """Encode a text without special tokens in front."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int64)

    def statement(self, sentence: str) -> np.ndarray:
        """Return the ids that state a sentence."""
        if self.chat:
            told = f"{self._opening}Please remember this: {sentence}{self._closing}"
            return self.ids(f"{told}I will remember this: {sentence}")
        return self.ids(f"\n\n{sentence}\n\n")

    def question(self, fact: NaturalFact) -> np.ndarray:
        """Return the ids that ask for a fact, up to where its answer begins."""
        if self.chat:
            return self.ids(f"{self._opening}{fact.question}{self._closing}{fact.begun}")
        return self.ids(f"\n\n{fact.begun}")

    def between(self, length: int, book: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return exactly `length` ids of book text; in a chat, as a turn that reads it out and a
        reply that thanks for it.
        """
        if not self.chat:
            return passage(book, length, rng)
        opening = self.ids(self._opening)
        closing = self.ids(f"{self._closing}Thank you. Please go on.")
        if (room := length - len(opening) - len(closing)) < 1:
            raise WeirError(
                f"only {length} tokens of a block are left for a turn that reads out the book, but "
                "the chat template and the reply take at least as many. Use form=sentence, which "
                "has no turns."
            )
        return np.concatenate([opening, passage(book, room, rng), closing])


@task("facts")
@dataclass(frozen=True)
class Facts(Task):
    """Tells facts in natural words, in a book or a chat, and asks for them at several distances.

    Attributes:
        form: `sentence`, a separate paragraph in a book; `chat`, a turn among turns that read out a
            book; `changed`, told twice with different answers, of which the newest counts;
            `several`, up to three facts in one sentence; `rule`, all facts in a chat's system turn,
            which says who the model is.
        distances: tokens between a statement and its question, multiples of 100 with spaces
            between them. With `form=rule`, distances are counted from the place `before`.
        samples: number of streams.
        facts: number of facts in each stream, each of a different kind and about a different
            person.
        every: number of tokens from one statement to the next, a multiple of 100.
        before: number of tokens in front of the first statement's end, a multiple of 100.
    """

    form: Form = "sentence"
    distances: str | int = "200 400 800 1600"
    samples: Count = 8
    facts: Annotated[int, Bounds(1, len(KINDS))] = 8
    every: int = 100
    before: int = 300
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def __post_init__(self) -> None:
        if not self.tokens_back or any(
            n < BLOCK or n % BLOCK for n in (self.every, self.before, *self.tokens_back)
        ):
            raise WeirError(
                f"distances, every and before of facts must be multiples of {BLOCK} tokens. "
                "Separate distances with spaces, as in facts(distances='200 800')."
            )

    @property
    def tokens_back(self) -> tuple[int, ...]:
        """The distances as numbers; empty if they are not numbers."""
        words = dict.fromkeys(str(self.distances).split())
        return tuple(map(int, words)) if all(word.isdecimal() for word in words) else ()

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask for every fact at every distance.

        Returns:
            "accuracy" with "right", "asked", and its 95 % interval from "low" to "high"; the same
            for each distance in "by_distance";
            "marks", 1 or 0 for each answer in the order of the questions; for `changed` "stale",
            the share of questions that got the old answer; for `rule` "leaked", the share of
            streams in which the answer to a last, unrelated request copies from the system turn;
            "tokens" of one stream, "kv_bytes" of one.
        """
        rng = np.random.default_rng(subject.seed)
        wording = Wording(subject.tokenizer, self.form in ("chat", "rule"))
        book = read_stream(subject.tokenizer, self.text, BOOK_TOKENS).ids.numpy()
        right = dict.fromkeys(self.tokens_back, 0)
        stale = leaked = done = kv_bytes = tokens = 0
        marks = ""
        while done < self.samples:
            rows = [
                ToldFacts(wording, self, book, rng)
                for _ in range(min(AT_ONCE, self.samples - done))
            ]
            stream = subject.stream()
            ids = torch.from_numpy(np.stack([row.ids for row in rows]))
            if stream.cache is not None and any(pipe.needs_marks for pipe in subject.policy.pipes):
                stream.feed(ids[:, :1])  # opens the rows
                for number, row in enumerate(rows):
                    stream.cache.mark(number, Marks(row.beginning))
            for place, number, distance in rows[0].schedule:
                if place > stream.seen:
                    stream.feed(ids[:, stream.seen : place])
                facts = [row.facts[number] for row in rows]
                answers = [[wording.ids(one) for one in fact.answers] for fact in facts]
                newest = [several[-1] for several in answers]
                likeliest = likeliest_answers(stream, [wording.question(f) for f in facts], newest)
                for predicted, (*old, new) in zip(likeliest, answers, strict=True):
                    known = bool((predicted == new).all())
                    right[distance] += known
                    marks += "01"[known]
                    stale += any(follows(predicted, one, new) for one in old)
                progress((done + len(rows) * place / ids.shape[1]) / self.samples)
            if self.form == "rule":
                turn = torch.from_numpy(wording.turn(LEAK))
                generated = generate_rows(stream, turn.expand(len(rows), -1), LEAK_TOKENS).numpy()
                leaked += sum(
                    _shares_a_run(one, row.ids[: row.beginning], COPIED)
                    for one, row in zip(generated, rows, strict=True)
                )
            done += len(rows)
            kv_bytes, tokens = max(kv_bytes, stream.nbytes // len(rows)), stream.seen
        asked = self.samples * self.facts
        found = count_by_distance(right, asked) | {"marks": marks}
        if self.form == "changed":
            found["stale"] = stale / (asked * len(right))
        if self.form == "rule":
            found["leaked"] = leaked / self.samples
        return {**found, "tokens": tokens, "kv_bytes": kv_bytes}


class ToldFacts:
    """One stream and its facts.

    Attributes:
        facts: the facts that are asked for.
        ids: of the stream [length], up to the last question.
        beginning: number of tokens with which the stream begins: for a rule, its system turn and
            the first words after it.
        schedule: for every question, its place, the fact's number and the distance; the same in
            every stream of a task.
    """

    def __init__(
        self, wording: Wording, task: Facts, book: np.ndarray, rng: np.random.Generator
    ) -> None:
        front = wording.front
        told: dict[int, str] = {}
        if task.form == "rule":
            system, self.facts = draw_rule(task.facts, rng)
            front = wording.beginning(system)
            said = dict.fromkeys(range(task.facts), task.before)
        else:
            told, said = self._tell(task, rng)
        self.schedule = sorted((said[n] + d, n, d) for n in said for d in task.tokens_back)
        self.beginning = begin = len(front)
        blocks = [front]
        for end in range(BLOCK, self.schedule[-1][0] + 1, BLOCK):
            if end - begin < SHORTEST:
                if end in told:
                    least = -(-(begin + SHORTEST) // BLOCK) * BLOCK
                    raise WeirError(
                        f"the stream begins with {begin:,} tokens of the chat template, so no fact "
                        f"can end at token {end:,}. Use before={least} or more."
                    )
                continue  # the next block is longer
            statement = wording.statement(told[end]) if end in told else front[:0]
            blocks += [wording.between(end - begin - len(statement), book, rng), statement]
            begin = end
        self.ids = np.concatenate(blocks)

    def _tell(self, task: Facts, rng: np.random.Generator) -> tuple[dict[int, str], dict[int, int]]:
        """Draw facts. Returns their sentences by the place where they end, and the last place where
        each fact ends.
        """
        times, size = 1 + (task.form == "changed"), TOGETHER if task.form == "several" else 1
        self.facts = draw_facts(task.facts, times, rng)
        told: dict[int, str] = {}
        said: dict[int, int] = {}
        for time in range(times):
            for first in range(0, task.facts, size):
                group = range(task.facts)[first : first + size]
                place = task.before + len(told) * task.every
                told[place] = _sentence([self.facts[n] for n in group], time == times - 1)
                said |= dict.fromkeys(group, place)
        return told, said


def _sentence(facts: list[NaturalFact], last: bool) -> str:
    """Make one sentence of some facts, with the last answers or the first."""
    parts = [f"{f.begun}{f.answers[-1]}" if last else f"{f.earlier}{f.answers[0]}" for f in facts]
    parts[1:] = [f"the{p[3:]}" if p.startswith("The ") else p for p in parts[1:]]
    *others, end = parts
    return f"{', '.join(others)}, and {end}." if others else f"{end}."


def likeliest_answers(
    stream: Any, prompts: list[np.ndarray], answers: list[np.ndarray]
) -> list[Any]:
    """Return the likeliest token at each place of the answers, given the right tokens before it.

    All tokens of an answer are right if, and only if, greedy decoding gives the answer.
    """
    asked = [np.concatenate(pair) for pair in zip(prompts, answers, strict=True)]
    longest = max(map(len, asked))
    # Tokens after an answer are ignored. All tokens that are fed here are removed again.
    ids = np.stack([np.pad(one, (0, longest - len(one)), mode="edge") for one in asked])
    logits: Tensor = feed_aside(stream, torch.from_numpy(ids))
    found = logits.argmax(-1).cpu().numpy()
    return [
        row[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
        for row, prompt, answer in zip(found, prompts, answers, strict=True)
    ]


def _shares_a_run(some: np.ndarray, other: np.ndarray, length: int) -> bool:
    """Whether two lists of ids have a run of `length` ids in common."""
    runs = {tuple(other[i : i + length]) for i in range(len(other) - length + 1)}
    return any(tuple(some[i : i + length]) in runs for i in range(len(some) - length + 1))
