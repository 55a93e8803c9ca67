"""`recalled`: tells facts in chat turns, and asks for them after they have left the cache.

Many facts are told on one stream, which then reads a book, so that a million tokens are read only
once. Questions are asked on copies, and leave nothing in the stream. With the parameter `state`, a
long run saves its state from time to time, and continues from it when it is started again.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from weir.errors import WeirError
from weir.evals.answers import require_template
from weir.evals.records import read_records
from weir.evals.scores import wilson
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.lines import ADJECTIVES, NOUNS
from weir.evals.tasks.natural_facts import ANIMALS, CHANGE, CITIES, KINDS, draw_answer
from weir.pools import Bounds, Count
from weir.stream import Conversation, HeldPlaces, Stream, read_books
from weir.stream.archive import Archive, cut_sentences
from weir.train import NAMES

Way = Literal["recall", "none", "plain"]
FORMS = ("once", "changed", "several", "paraphrased", "never", "sessions", "order")
"""The forms of facts: told once; told again with another answer; up to three in one sentence; asked
for in other words, which share only the name; never told; two things about a person, told in
different turns and asked for in one; which of two things was told first. Five forms are also kinds
of questions in LongMemEval: `once` is its single-session-user, `changed` knowledge-update, `never`
abstention, `sessions` multi-session, and `order` temporal reasoning.
"""
USUAL = FORMS[:5]
WAYS = ("recall", "none", "plain")
"""The ways to answer: the cache with recall; only the cache; and an empty cache, for which the
found passages and the newest turns are computed again.
"""
SURNAMES = """Abbott Barlow Carver Denholm Ellery Fairfax Gadsby Hollis Ingram Jessop Kendrick
    Lomax Marlow Norbury Ogilvie Pembroke Quimby Redfern Selwyn Thackray Underhill Vickers
    Whitlock Yardley""".split()
PARAPHRASES = (
    "Which digits must I type in for {}?",
    "With what words can I log in as {}?",
    "At which door do I have to ring to visit {}?",
    "Which creature does {} like best?",
    "Where is {} at home?",
    "Where do I have to go for my talk to {}?",
    "What do I have to dig below to find the gold of {}?",
    "When was the ship of {} made?",
)
"""Questions for each of `KINDS` that share only the name with the fact."""
PAIRS = ((0, 3), (2, 1), (5, 4), (7, 6))
"""Two of `KINDS` for each question about two things; the answer to one is a number, and to the
other it is not.
"""
THINGS = (
    "secret access code",
    "password",
    "house number",
    "favourite animal",
    "city",
    "meeting",
    "treasure",
    "boat",
)
"""For each of `KINDS`, the noun for such a fact in questions of the form `order`, as in "What did I
tell you first, the boat of Ann or the boat of Bob?".
"""
TOGETHER = 3
FILLER = 700
"""Largest number of characters of the book that a turn reads out, unless one sentence is longer."""
THANKS = "Thank you. Please go on."
LONGEST_ANSWER = 40
"""Largest number of tokens of an answer."""
SAVED = 20_000
"""Number of tokens between two saved states."""
BEGAN = 1_793_000_000.0
"""When a stream begins, in seconds since 1970. Quotations say when something was said, so with the
clock of the machine they would differ from run to run.
"""
SECONDS = 2.0
"""Seconds by which this time advances with each token."""


class RecalledFact(NamedTuple):
    """A fact that is told and asked for.

    Attributes:
        form: one of `FORMS`.
        kind: the kind of the answer, as in `KINDS`, or "name".
        told: its statements, the newest last; empty if it is never told.
        question: the question that asks for it.
        answer: the right answer.
        before: a wrong answer that is looked for: the earlier answer of a changed fact, or for
            `order` the other name; empty if there is none.
        beside: another fact that the same question asks for.
    """

    form: str
    kind: str
    told: tuple[str, ...]
    question: str
    answer: str
    before: str = ""
    beside: RecalledFact | None = None


@dataclass
class _Tally:
    """Counts of the answers to questions of one form, distance and way."""

    right: int = 0
    wrong: int = 0
    unsaid: int = 0
    stale: int = 0
    found: int = 0
    tokens: int = 0
    computed: int = 0

    def as_json(self) -> dict[str, Any]:
        asked = self.right + self.wrong + self.unsaid
        low, high = wilson(self.right, asked)
        share = self.right / asked if asked else None
        return {**vars(self), "asked": asked, "accuracy": share, "low": low, "high": high}


@task("recalled")
@dataclass(frozen=True)
class Recalled(Task):
    """Tells facts in chat turns, and asks for them after some distances, with and without recall.

    Attributes:
        distances: numbers of tokens from a statement to its question, separated by spaces.
        samples: number of facts of each form.
        per_stream: number of facts of each form on one stream; use fewer than `samples` for a
            policy that keeps everything.
        forms: the forms that are asked for, separated by spaces. The facts of `once`, `changed`,
            `several` and `paraphrased` are told even if they are not asked for.
        ways: how questions are answered, separated by spaces: `recall`, `none`, `plain`.
        most: largest number of tokens of recalled text in a turn.
        every: least number of tokens of the book between two statements; pages are read whole.
        newest: about how many tokens of the newest turns the way `plain` computes again, with at
            least the last turn and at most the last eight (each with its answer); 0 for no turns.
        turns: MT-Bench's `mt_bench.jsonl`, whose first turns do not ask about anything earlier; the
            second half of them is used.
        state: a folder in which a long run saves its state; None saves nothing.
    """

    distances: str | int = "1000 10000"
    samples: Count = 64
    per_stream: Count = 64
    forms: str = " ".join(USUAL)
    ways: str = "recall none"
    most: Count = 256
    every: Count = 100
    newest: Annotated[int, Bounds(0)] = 512
    turns: str | None = None
    text: str | None = None
    state: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher", "false_recalls": "lower"}

    def __post_init__(self) -> None:
        for name, known in (("forms", FORMS), ("ways", WAYS)):
            if not getattr(self, name).split():
                raise WeirError(
                    f"{name} of recalled must name at least one of {', '.join(known)}, separated "
                    f"by spaces, got {getattr(self, name)!r}"
                )
            wrong = [word for word in getattr(self, name).split() if word not in known]
            if wrong:
                raise WeirError(
                    f"{name} of recalled contains the unknown word {wrong[0]!r}. It accepts "
                    f"{', '.join(known)}, separated by spaces."
                )
        if not self.tokens_back:
            raise WeirError(
                "distances of recalled must be numbers of tokens, separated by spaces, got "
                f"{self.distances!r}"
            )
        if min(self.samples, self.per_stream) > (most := most_facts(self.forms.split())):
            name = "samples" if self.samples <= self.per_stream else "per_stream"
            raise WeirError(
                f"{name} of recalled is {getattr(self, name):,}, but there are names for only "
                f"{most} facts of each form in one stream. Use per_stream={most} or less."
            )

    @property
    def tokens_back(self) -> tuple[int, ...]:
        """The distances as numbers; empty if they are not numbers."""
        words = str(self.distances).split()
        return tuple(map(int, words)) if all(word.isdecimal() for word in words) else ()

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Tell, read and ask.

        Returns:
            "accuracy", the share of right answers to told facts with the first way, and "asked",
            the number of these questions; "by_form", for each form, distance and way the number of
            answers that are "right", "wrong", or "unsaid" (they contain no value of the right
            kind), how many of the wrong ones are "stale" (the answer before it changed), the number
            of questions for which something was recalled ("found"), the "tokens" of all recalled
            text, and the tokens that were "computed" before the answers; "false_recalls", the share
            of turns that ask about nothing earlier for which something was found, and "false_by",
            the counts for it. Of the last stream: "search_ms", the median time of a search;
            "first_ms", for each way the median time until the first piece of an answer;
            "archive_bytes" per token; "archived_turns", "tokens", "kv_bytes".
        """
        require_template(subject.tokenizer)
        streams = -(-self.samples // self.per_stream)
        whole: dict[tuple[str, int, str], _Tally] = {}
        sums: list[dict[str, Any]] = []
        for number in range(streams):
            folder = None if self.state is None else Path(self.state) / str(number)
            count = min(self.per_stream, self.samples - number * self.per_stream)
            one = _Run(self, subject, count, np.random.default_rng([subject.seed, number]), folder)

            def tell_share(share: float, done: int = number) -> None:
                progress((done + share) / streams)

            one.go(tell_share)
            for key, tally in one.tallies.items():
                into = whole.setdefault(key, _Tally())
                for name, value in vars(tally).items():
                    setattr(into, name, getattr(into, name) + value)
            sums.append(one.summary())
        first = self.ways.split()[0]
        told = [t for (form, _, way), t in whole.items() if way == first and form != "never"]
        asked = sum(t.right + t.wrong + t.unsaid for t in told)
        false = Counter[str]()
        for one_sum in sums:
            false.update(one_sum["false"])
        turns = false["filler turns"] + false["other turns"]
        brought = false["filler recalls"] + false["other recalls"]
        return {
            "accuracy": sum(t.right for t in told) / asked if asked else None,
            "asked": asked,
            "by_form": [
                {"form": form, "distance": distance, "way": way, **tally.as_json()}
                for (form, distance, way), tally in sorted(whole.items())
            ],
            "false_recalls": brought / turns if turns else None,
            "false_by": dict(false),
            **{name: sums[-1][name] for name in sums[-1] if name != "false"},
        }


def most_facts(forms: Collection[str] = USUAL) -> int:
    """Return how many facts of each form `draw_recalled` can draw, each about another person."""
    # Each of the usual forms needs one name, whether it is asked for or not; `once` and
    # `paraphrased` use the same name.
    return len(NAMES) * len(SURNAMES) // (4 + ("sessions" in forms) + 2 * ("order" in forms))


def draw_recalled(
    count: int, rng: np.random.Generator, forms: Collection[str] = USUAL
) -> tuple[list[RecalledFact], list[RecalledFact]]:
    """Draw facts to be told, and facts that add no statement to these.

    The second list has the forms `paraphrased`, whose statements are those of `once`, and `never`.
    `sessions` and `order` are drawn only if they are in `forms`, after all others.
    """
    names = [f"{first} {last}" for last in SURNAMES for first in NAMES]
    drawn = iter(rng.permutation(names).tolist())
    told: list[RecalledFact] = []
    others: list[RecalledFact] = []
    several: list[tuple[str, RecalledFact]] = []
    for number in range(count):
        kind = number % len(KINDS)
        begun, question, answer = KINDS[kind]
        for form in ("once", "changed", "several", "never"):
            name = next(drawn)
            asked = question.format(name)
            value = draw_answer(answer, rng)
            sentence = f"{begun.format(name)}{value}"
            if form == "once":
                told.append(RecalledFact(form, answer, (f"{sentence}.",), asked, value))
                other = PARAPHRASES[kind].format(name)
                others.append(RecalledFact("paraphrased", answer, (f"{sentence}.",), other, value))
            elif form == "never":
                others.append(RecalledFact(form, answer, (), asked, ""))
            elif form == "changed":
                old = value
                while old == value:
                    old = draw_answer(answer, rng)
                earlier = begun.format(name).replace(" now", "")
                newer = CHANGE.sub(r"\1 now", earlier, count=1)
                both = (f"{earlier}{old}.", f"{newer}{value}.")
                told.append(RecalledFact(form, answer, both, asked, value, old))
            else:
                several.append((sentence, RecalledFact(form, answer, (), asked, value)))
    for at in range(0, len(several), TOGETHER):
        group = several[at : at + TOGETHER]
        parts = [
            f"the{one[3:]}" if n and one.startswith("The ") else one
            for n, (one, _) in enumerate(group)
        ]
        sentence = f"{', '.join(parts[:-1])}, and {parts[-1]}." if parts[1:] else f"{parts[0]}."
        told += [fact._replace(told=(sentence,)) for _, fact in group]
    if "sessions" in forms:
        told += [_draw_two(next(drawn), PAIRS[n % len(PAIRS)], rng) for n in range(count)]
    if "order" in forms:
        told += [_draw_order(next(drawn), next(drawn), n, rng) for n in range(count)]
    return told, others


def _draw_two(name: str, kinds: tuple[int, int], rng: np.random.Generator) -> RecalledFact:
    """Draw two things about somebody, which one question asks for."""
    parts: list[RecalledFact] = []
    for begun, question, kind in (KINDS[number] for number in kinds):
        value = draw_answer(kind, rng)
        sentence = f"{begun.format(name)}{value}."
        parts.append(RecalledFact("sessions", kind, (sentence,), question.format(name), value))
    one, other = parts
    both = f"{one.question} {other.question}"
    return other._replace(told=one.told + other.told, question=both, beside=one)


def _draw_order(first: str, second: str, number: int, rng: np.random.Generator) -> RecalledFact:
    """Draw two facts of which one is told before the other."""
    kind = number % len(KINDS)
    begun, _, answer = KINDS[kind]
    told = tuple(f"{begun.format(name)}{draw_answer(answer, rng)}." for name in (first, second))
    one, other = rng.permutation([first, second]).tolist()
    thing = THINGS[kind]
    asked = f"What did I tell you first, the {thing} of {one} or the {thing} of {other}?"
    return RecalledFact("order", "name", told, asked, first, second)


def judge(answer: str, fact: RecalledFact) -> str:
    """Say whether an answer is "right", "wrong", "stale" (it contains the answer from before the
    fact changed) or "unsaid" (it contains no value of the right kind).
    """
    if fact.beside is not None:
        verdicts = {judge(answer, one) for one in (fact.beside, fact._replace(beside=None))}
        return next(one for one in ("wrong", "unsaid", "right") if one in verdicts)
    if fact.kind == "name":  # the name that comes first in the text is the answer
        places = [_plain(answer).find(_plain(name)) for name in (fact.answer, fact.before)]
        if max(places) < 0:
            return "unsaid"
        first, second = (len(answer) if place < 0 else place for place in places)
        return "right" if first < second else "wrong"
    said = _values(answer, fact.kind)
    right, old = _plain(fact.answer), _plain(fact.before)
    if old and old in said:
        return "stale"
    if right and right in said:
        return "right"
    asked = _values(fact.question, fact.kind)
    return "wrong" if said - asked else "unsaid"


def _plain(value: str) -> str:
    return " ".join(value.lower().split())


def _values(text: str, kind: str) -> set[str]:
    """Return the values in a text that can be answers of a kind."""
    if kind in ("code", "number", "year"):
        return set(re.findall(r"\d+", text.replace(",", "")))
    words = re.findall(r"[a-z]+", text.lower())
    if kind == "animal":
        return {word.removesuffix("s") for word in words} & set(ANIMALS)
    if kind == "city":
        return set(words) & {city.lower() for city in CITIES}
    pairs = {f"{a} {b}" for a, b in pairwise(words)}
    known = {f"{a} {b}" for a in ADJECTIVES for b in NOUNS}
    return pairs & known


@dataclass
class _RunState:
    """The progress of a run, for JSON.

    Attributes:
        statements: number of statements that have been told.
        page: number of pages that have been read.
        due: questions to ask, each with its place in the stream, the distance and the number of its
            fact.
        asked: number of questions that have been asked.
        tallies: form, distance and way, and the fields of the `_Tally`.
        false: counts of turns that ask about nothing earlier, and of those for which something was
            found.
        times: seconds that searches took, and seconds to the first piece of an answer for each way.
        newest: the last eight pairs of a turn and its answer.
    """

    statements: int = 0
    page: int = 0
    due: list[list[int]] = field(default_factory=list)
    asked: int = 0
    tallies: list[list[Any]] = field(default_factory=list)
    false: dict[str, int] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    newest: list[list[str]] = field(default_factory=list)


class _Dated(Conversation):
    """A conversation in which time advances with the tokens, not with the clock of the machine."""

    def _add(self, archive: Archive, role: str, text: str, start: int, stop: int) -> None:
        archive.add(role, text, start=start, stop=stop, at=BEGAN + SECONDS * start)


class _Aside(Conversation):
    """A conversation that leaves nothing in the archive.

    Attributes:
        newest: messages that are computed again with the first turn.
        computed: number of tokens that were read for the last turn, including all of `newest`.
    """

    newest: Sequence[dict[str, str]] = ()
    computed = 0

    def turn(self, text: str, quoted: str = "") -> list[int]:
        """Return the ids of a turn of the user; the first comes with the newest messages."""
        if not self.newest or self.stream.seen:
            return super().turn(text, quoted)
        said = {"role": "user", "content": quoted + text}
        return self._turns.whole([*self.newest, said])

    def _feed(self, text: str, ids: list[int]) -> None:
        self.computed = len(ids)
        super()._feed(text, ids)

    def _resume(self) -> None:
        pass

    def _keep(self, role: str, text: str, ids: Sequence[int]) -> None:
        pass


class _Run:
    """One stream: statements, a book, and questions on copies of it."""

    def __init__(
        self,
        task: Recalled,
        subject: Subject,
        count: int,
        rng: np.random.Generator,
        folder: Path | None,
    ) -> None:
        self._task, self._subject, self._folder = task, subject, folder
        told, others = draw_recalled(count, rng, task.forms.split())
        self._facts = [*told, *others]
        statements = list(dict.fromkeys(s for fact in told for s in fact.told[:1]))
        later = [fact.told[1] for fact in told if len(fact.told) > 1]
        self._statements = [
            *(statements[at] for at in rng.permutation(len(statements))),
            *(later[at] for at in rng.permutation(len(later))),
        ]
        self._pages = read_pages(task.text)
        self._done = _RunState()
        self._tallies: dict[tuple[str, int, str], _Tally] = {}
        stream: Stream | None = None
        path: Path | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "archive.db"
            if (folder / "progress.json").exists():
                stream = self._restore(folder)
        self._archive = Archive(path)
        self._talk = _Dated(
            stream or subject.stream(), subject.tokenizer, archive=self._archive, recall=task.most
        )
        self._archive.rewind(self._talk.stream.seen)

    @property
    def tallies(self) -> dict[tuple[str, int, str], _Tally]:
        """Counts of the results of questions, for each form, distance and way."""
        return self._tallies

    def go(self, progress: Progress) -> None:
        """Tell, read and ask until the last question."""
        farthest = max(self._task.tokens_back)
        saved = self._talk.stream.seen
        while self._done.statements < len(self._statements) or self._done.due:
            self._ask_due()
            if self._done.statements < len(self._statements):
                self._tell()
            elif self._done.due:
                # There may be a million tokens before the next question, so the state is saved on
                # the way.
                next_due = min(place for place, *_ in self._done.due)
                self._read(min(next_due, self._talk.stream.seen + SAVED))
            seen = self._talk.stream.seen
            if self._folder is not None and seen >= saved + SAVED:
                self._save(self._folder)
                saved = seen
            end = max((place for place, *_ in self._done.due), default=seen)
            progress(min(1.0, seen / max(end, farthest)))
        self._ask_others()
        if self._folder is not None:
            self._save(self._folder)

    def _tell(self) -> None:
        """Read some pages, and tell the next statement."""
        self._read(self._talk.stream.seen + self._task.every)
        statement = self._statements[self._done.statements]
        self._done.statements += 1
        self._hear(f"Please remember this: {statement}", "I will remember this.")
        seen = self._talk.stream.seen
        for number, fact in enumerate(self._facts):
            if fact.told and fact.told[-1] == statement:
                self._done.due += [[seen + d, d, number] for d in self._task.tokens_back]
        if self._done.statements == len(self._statements):
            never = [n for n, fact in enumerate(self._facts) if not fact.told]
            self._done.due += [[seen + d, d, n] for n in never for d in self._task.tokens_back]
        self._done.due.sort()

    def _read(self, until: int) -> None:
        """Read pages of the book, at least up to a place in the stream."""
        while self._talk.stream.seen < until:
            page = self._pages[self._done.page % len(self._pages)]
            self._done.page += 1
            found = self._search(page)
            self._count_false("filler", bool(found))
            self._hear(page, THANKS)

    def _hear(self, text: str, answer: str) -> None:
        self._talk.take_in(text, answer)
        self._done.newest = [*self._done.newest, [text, answer]][-8:]

    def _search(self, text: str) -> list[Any]:
        return self._archive.search(text, is_held=HeldPlaces(self._talk.stream))

    def _count_false(self, what: str, brought: bool) -> None:
        false = self._done.false
        false[f"{what} turns"] = false.get(f"{what} turns", 0) + 1
        false[f"{what} recalls"] = false.get(f"{what} recalls", 0) + brought

    def _ask_due(self) -> None:
        """Ask the questions that are due."""
        while self._done.due and self._done.due[0][0] <= self._talk.stream.seen:
            _, distance, number = self._done.due.pop(0)
            fact = self._facts[number]
            if fact.form not in self._task.forms.split():
                continue
            for way in self._task.ways.split():
                self._ask(fact, distance, way)
            self._done.asked += 1

    def _ask(self, fact: RecalledFact, distance: int, way: str) -> None:
        """Ask one question in one way, and judge the answer."""
        began = time.perf_counter()
        if way == "recall":
            self._search(fact.question)
            self._time("search", began)
        talk = self._aside(way)
        began = time.perf_counter()
        pieces = talk.say(fact.question, max_new_tokens=LONGEST_ANSWER, temperature=0.0)
        text = next(pieces, "")
        self._time(way, began)
        verdict = judge(text + "".join(pieces), fact)
        tally = self._tallies.setdefault((fact.form, distance, way), _Tally())
        if verdict == "stale":
            tally.stale += 1
            verdict = "wrong"
        setattr(tally, verdict, getattr(tally, verdict) + 1)
        tally.found += bool(talk.recalled)
        tally.tokens += talk.recalled_tokens
        tally.computed += talk.computed

    def _aside(self, way: str) -> _Aside:
        """Begin a conversation that leaves nothing in the stream: on a copy of it, or for the way
        `plain` on an empty cache.
        """
        tokenizer, most = self._subject.tokenizer, self._task.most
        if way != "plain":
            archive = self._archive if way == "recall" else None
            return _Aside(copy.deepcopy(self._talk.stream), tokenizer, None, None, archive, most)
        # Like retrieval chats: the newest turns, as many as fit, on an empty cache.
        size = 0
        newest: list[list[str]] = []
        for pair in reversed(self._done.newest if self._task.newest else []):
            size += sum(len(tokenizer(text)["input_ids"]) + 8 for text in pair)
            if newest and size > self._task.newest:
                break
            newest.insert(0, pair)
        stream = Stream(self._subject.model, "dense")
        talk = _Aside(stream, tokenizer, None, None, self._archive, most)
        talk.newest = [
            {"role": role, "content": text}
            for pair in newest
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        talk.held = HeldPlaces(self._talk.stream)
        return talk

    def _time(self, what: str, began: float) -> None:
        self._done.times.setdefault(what, []).append(time.perf_counter() - began)

    def _ask_others(self) -> None:
        """Search for the words of turns that ask about nothing earlier."""
        if self._task.turns is None:
            return
        records = list(read_records(self._task.turns))
        for one in records[len(records) // 2 :]:
            first = one.texts("turns", least=1)[0]
            self._count_false("other", bool(self._search(first)))

    def summary(self) -> dict[str, Any]:
        """Return the figures of this stream that do not belong to single questions."""
        stream = self._talk.stream
        times = self._done.times
        return {
            "false": self._done.false,
            "search_ms": 1e3 * median(times["search"]) if "search" in times else None,
            "first_ms": {
                way: 1e3 * median(times[way]) for way in self._task.ways.split() if way in times
            },
            "archive_bytes": self._archive.nbytes / max(1, stream.seen),
            "archived_turns": self._archive.turns,
            "tokens": stream.seen,
            "kv_bytes": stream.nbytes,
        }

    # --- the state of a long run

    def _save(self, folder: Path) -> None:
        """Save first the stream, and then the progress."""
        stream = self._talk.stream
        self._done.tallies = [[*key, vars(tally)] for key, tally in self._tallies.items()]
        name = f"stream-{stream.seen}.safetensors"
        stream.save(folder / name)
        text = json.dumps({"stream": name, "task": str(self._task), **vars(self._done)})
        (folder / "progress.new").write_text(text)
        (folder / "progress.new").replace(folder / "progress.json")
        for other in folder.glob("stream-*.safetensors"):
            if other.name != name:
                other.unlink()

    def _restore(self, folder: Path) -> Stream:
        """Continue from a saved state; WeirError if it belongs to another task."""
        found = json.loads((folder / "progress.json").read_text())
        if (of := found.pop("task")) != str(self._task):
            raise WeirError(f"{folder} has the state of {of}. Use another folder, or remove it.")
        stream = Stream.restore(self._subject.model, folder / found.pop("stream"))
        self._done = _RunState(**found)
        self._tallies = {
            (form, distance, way): _Tally(**values)
            for form, distance, way, values in self._done.tallies
        }
        return stream


def read_pages(path: str | None) -> list[str]:
    """Return the pages of a book that turns read out; each page has whole sentences."""
    from weir.stream import BOOK

    pages: list[str] = []
    for book in read_books(path or BOOK):
        page = ""
        for sentence in cut_sentences(book):
            if page and len(page) + len(sentence) > FILLER:
                pages.append(page.strip())
                page = ""
            page += sentence
        pages.append(page.strip())
    return [page for page in pages if page]
