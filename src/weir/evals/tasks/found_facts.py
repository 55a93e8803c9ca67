"""`found`: tests whether an archive finds the passages that answer a question, without a model.

The facts are the same as in `recalled`, in an archive that continues with a book. Within seconds,
this task tells how good the search is at any distance. The thresholds of the search were chosen
with this task.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np

from weir.errors import WeirError
from weir.evals.records import read_records
from weir.evals.scores import wilson
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.evals.tasks.recalled_facts import (
    THANKS,
    RecalledFact,
    draw_recalled,
    most_facts,
    read_pages,
)
from weir.pools import Count
from weir.stream.archive import Archive, Excerpt

CHARACTERS = 4
"""Approximate number of characters of English per token."""


@task("found")
@dataclass(frozen=True)
class FoundFacts(Task):
    """Searches an archive for facts that were told in chat turns, after some distances.

    Attributes:
        distances: numbers of tokens after the last statement, separated by spaces; four characters
            count as one token.
        samples: number of facts of each form.
        turns: MT-Bench's `mt_bench.jsonl`, whose first turns do not ask about anything earlier.
        half: which half of those turns: `first` was used to choose the thresholds.
        pages: another book. Its pages 500 to 799, counted from 0, are further turns that do not ask
            about anything earlier.
    """

    distances: str | int = "1000 10000 100000"
    samples: Count = 64
    turns: str | None = None
    half: str = "second"
    text: str | None = None
    pages: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"found": "higher", "false_recalls": "lower"}

    def __post_init__(self) -> None:
        if self.samples > (most := most_facts()):
            raise WeirError(
                f"samples of found is {self.samples:,}, but there are names for only {most} facts "
                f"of each form. Use samples={most} or less."
            )

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Fill archives and search them.

        Returns:
            "found", the share of told facts whose newest statement came first; "by_form", for each
            form and distance how often the right passage came "first", how often an "other" one
            did, and how often "none" was found; "false_recalls", the share of turns that ask about
            nothing earlier for which something was found, and "false_by", the counts for it;
            "search_ms" and "search_ms_most", the median and the longest processor time of a search;
            "archive_bytes" per token.
        """
        if self.half not in ("first", "second"):
            raise WeirError(f"half of found must be first or second, got {self.half!r}")
        words = str(self.distances).split()
        if not words or not all(word.isdecimal() for word in words):
            raise WeirError(
                "distances of found must be numbers of tokens, separated by spaces, got "
                f"{self.distances!r}"
            )
        told, others = draw_recalled(self.samples, np.random.default_rng(subject.seed))
        by_form: list[dict[str, Any]] = []
        false = Counter[str]()
        took: list[float] = []
        size = 0.0
        for at, distance in enumerate(map(int, words)):
            archive = self._fill(told, distance, subject.seed)
            size = archive.nbytes * CHARACTERS / archive.characters
            tally: dict[str, Counter[str]] = {}
            for fact in [*told, *others]:
                began = time.thread_time()
                excerpts = archive.search(fact.question)
                took.append(1e3 * (time.thread_time() - began))
                tally.setdefault(fact.form, Counter())[_judge(fact, excerpts)] += 1
            by_form += [
                {"form": form, "distance": distance, **_cell(counts)}
                for form, counts in sorted(tally.items())
            ]
            self._search_others(archive, false)
            archive.close()
            progress((at + 1) / len(words))
        known = [row for row in by_form if row["form"] != "never"]
        turns = sum(count for name, count in false.items() if name.endswith("turns"))
        brought = sum(count for name, count in false.items() if name.endswith("recalls"))
        return {
            "found": sum(row["first"] for row in known) / sum(row["asked"] for row in known),
            "by_form": by_form,
            "false_recalls": brought / turns if turns else None,
            "false_by": dict(false),
            "search_ms": median(took),
            "search_ms_most": max(took),
            "archive_bytes": size,
        }

    def _fill(self, told: list[RecalledFact], distance: int, seed: int) -> Archive:
        """Fill an archive with all statements, with pages between them, followed by a book."""
        rng = np.random.default_rng([seed, distance])
        first = list(dict.fromkeys(fact.told[0] for fact in told))
        later = [fact.told[1] for fact in told if len(fact.told) > 1]
        statements = [*rng.permutation(first).tolist(), *rng.permutation(later).tolist()]
        pages = read_pages(self.text)
        turns: list[tuple[str, str]] = []
        page = read = 0
        while statements or read < CHARACTERS * distance:
            text = pages[page % len(pages)]
            page += 1
            turns += [("user", text), ("assistant", THANKS)]
            if statements:
                said = statements.pop(0)
                turns += [("user", f"Please remember this: {said}")]
                turns += [("assistant", "I will remember this.")]
            else:
                read += len(text)
        archive = Archive()
        archive.add_all(turns)
        return archive

    def _search_others(self, archive: Archive, false: Counter[str]) -> None:
        """Search for the words of turns that ask about nothing earlier, and count what is found."""
        said: list[tuple[str, str]] = []
        if self.turns is not None:
            records = list(read_records(self.turns))
            middle = len(records) // 2
            records = records[:middle] if self.half == "first" else records[middle:]
            said += [("MT-Bench", one.texts("turns", least=1)[0]) for one in records]
        if self.pages is not None:
            said += [("page", page) for page in read_pages(self.pages)[500:800]]
        for name, text in said:
            false[f"{name} turns"] += 1
            false[f"{name} recalls"] += bool(archive.search(text))


def _judge(fact: RecalledFact, excerpts: list[Excerpt]) -> str:
    if not excerpts:
        return "none"
    statement = fact.told[-1] if fact.told else None
    return "first" if statement is not None and statement in excerpts[0].text else "other"


def _cell(counts: Counter[str]) -> dict[str, Any]:
    low, high = wilson(counts["first"], counts.total())
    found = {name: counts[name] for name in ("first", "other", "none")}
    return {**found, "asked": counts.total(), "low": low, "high": high}
