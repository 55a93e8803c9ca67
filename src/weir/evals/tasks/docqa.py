"""`docqa`: asks questions about k documents, one of which has the answer, at a chosen place.

BUZZ (Zhao et al. 2024), section 4.2.2 and Figure 6, on the data of Liu et al. 2023, Lost in the
Middle: exact match with ten documents. The document with the answer is at place 0, 4 or 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from weir.errors import WeirError, in_words
from weir.evals.answers import ask_all, costs
from weir.evals.records import JsonRecord, read_records
from weir.evals.scores import contains, count_right, is_exact
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.pools import Count

MOST = 100
"""Largest number of tokens of an answer, as in Lost in the Middle."""


@dataclass(frozen=True)
class DocumentQuestion:
    """A question, its documents as (title, text) in order, and the right answers."""

    question: str
    documents: tuple[tuple[str, str], ...]
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """Return the prompt: the documents, followed by the question."""
        shown = "\n".join(
            f"Document [{i}] (Title: {title}) {text}"
            for i, (title, text) in enumerate(self.documents, 1)
        )
        return (
            "Answer the question from these documents, of which only some are relevant. Give the "
            f"answer alone, in as few words as it takes.\n\n{shown}\n\nQuestion: {self.question}\n"
            "Answer:"
        )


@task("docqa")
@dataclass(frozen=True)
class DocumentQA(Task):
    """Measures exact match of answers about several documents, by the place of the document with
    the answer.

    Attributes:
        file: an official file, such as `nq-open-10_total_documents_gold_at_0.jsonl.gz`, packed or
            not; or a data set of the Hub, `hub:ID:SPLIT`.
        gold: put the document with the answer at this place, counted from 0. Several places,
            separated by spaces (`"0 4 9"`), are run one by one. With `none`, it stays where it is
            in the file, or comes last if its place is not below `documents`.
        documents: number of documents per question, including the one with the answer; with
            `none`, all.
    """

    file: str
    gold: int | str | None = None
    documents: Count | None = None
    samples: Count | None = None
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {"exact_match": "higher", "contains": "higher"}

    def __post_init__(self) -> None:
        for place in self.places():
            if place < 0 or (self.documents is not None and place >= self.documents):
                raise WeirError(
                    f"gold must be less than documents={self.documents}, because places are "
                    f"counted from 0, got {place}"
                )

    def places(self) -> list[int]:
        """The places of `gold`; empty if documents stay in the file's order."""
        words = [] if self.gold is None else str(self.gold).split()
        if not all(word.isdecimal() for word in words):
            raise WeirError(f'gold must be places like 4 or "0 4 9", got {self.gold!r}')
        return [int(word) for word in words]

    def settings(self) -> Sequence[Task]:
        """One task for each place."""
        return [replace(self, gold=place) for place in self.places()] or [self]

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask each question on a separate stream.

        Only the first line of an answer counts.

        Returns:
            "exact_match" and "contains" (the answer contains a right one, the metric of Lost in the
            Middle), both in SQuAD's normal form; "right" and "asked", the numbers of exact matches
            and of questions; "low" and "high", the ends of the 95 % interval of "exact_match";
            "answers"; and the figures of `costs`.
        """
        cases = self.cases()
        prompts, stops = [case.prompt for case in cases], () if self.chat else ("\n",)
        answers = ask_all(subject, prompts, MOST, stops, self.chat, progress)
        texts = [answer.text.strip().partition("\n")[0].strip() for answer in answers]
        pairs = list(zip(texts, cases, strict=True))
        exact = count_right(sum(is_exact(text, case.answers) for text, case in pairs), len(cases))
        return {
            "exact_match": exact.pop("accuracy"),
            **exact,
            "contains": sum(contains(text, case.answers) for text, case in pairs) / len(cases),
            "answers": texts,
            **costs(answers),
        }

    def cases(self) -> list[DocumentQuestion]:
        """Read the questions, with their documents in order."""
        places = self.places()
        if len(places) > 1:
            raise WeirError(
                "docqa runs one place of gold at a time. Run each task that settings() returns."
            )
        return [self._case(record, places) for record in read_records(self.file, self.samples)]

    def _case(self, record: JsonRecord, places: list[int]) -> DocumentQuestion:
        documents = record.records("ctxs", least=1)
        gold = [place for place, document in enumerate(documents) if document.flag("isgold")]
        if len(gold) != 1:
            raise record.wrong("ctxs", f"must have one document with isgold true, got {len(gold)}")
        answer = documents.pop(gold[0])
        if self.documents is not None:
            if len(documents) + 1 < self.documents:
                there = in_words(len(documents) + 1, "document")
                raise record.wrong(
                    "ctxs", f"has {there}, but the task asks for documents={self.documents}"
                )
            documents = documents[: self.documents - 1]
        place = places[0] if places else min(gold[0], len(documents))
        if place > len(documents):
            raise record.wrong(
                "ctxs",
                f"has {in_words(len(documents) + 1, 'document')}, so gold must be at most "
                f"{len(documents)}, got {place}",
            )
        documents.insert(place, answer)
        return DocumentQuestion(
            record.text("question"),
            tuple((document.text("title"), document.text("text")) for document in documents),
            tuple(record.several_words("answers", least=1)),
        )
