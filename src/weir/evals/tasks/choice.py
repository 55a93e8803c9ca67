"""`choice`: asks multiple-choice questions one after the other on one stream.

StreamingLLM (Xiao et al. 2024), section 4.3 and Table 5: the questions of ARC with their answers
are concatenated into one stream, as in a chat that never ends. Before an answer is fed, the model's
completion is compared with it. For comparison, each question is also asked alone on its own
stream (one-shot).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weir.errors import in_words
from weir.evals.answers import require_template
from weir.evals.records import JsonRecord, read_records
from weir.evals.scores import count_right
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.pools import Count
from weir.stream import Conversation, Stream


@dataclass(frozen=True)
class Question:
    """A question, its choices as (label, text), and the label of the right one."""

    stem: str
    choices: tuple[tuple[str, str], ...]
    right: str

    def __str__(self) -> str:
        """Return the question with its choices, one per line."""
        choices = "\n".join(f"{label}. {text}" for label, text in self.choices)
        return f"Question: {self.stem}\n{choices}"


@task("choice")
@dataclass(frozen=True)
class Choice(Task):
    """Compares streamed multiple-choice questions with one-shot questions, by exact match of the
    label.

    Attributes:
        file: questions in ARC's JSON lines, such as `ARC-Easy-Test.jsonl`; or a data set of the
            Hub, `hub:ID:SPLIT`.
        chat: ask in turns of the model's chat template. Otherwise, the stream is text: "Answer: B".
    """

    file: str
    samples: Count | None = None
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher", "one_shot": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask all questions on one stream, then each on its own stream.

        The right answer is fed after each question, as the paper concatenates them; a completion is
        right if greedy decoding would have given the label.

        Returns:
            "accuracy" on the stream with "right", "asked", "low" and "high" (the ends of its 95 %
            interval); "answers", 1 or 0 for each question in order; "one_shot" and
            "one_shot_answers" likewise; "tokens" of the stream and "kv_bytes".
        """
        questions = [question_of(record) for record in read_records(self.file, self.samples)]
        if self.chat:
            require_template(subject.tokenizer)
        stream = subject.stream()
        conversation = Conversation(stream, subject.tokenizer)
        answers = []
        for number, question in enumerate([*questions, *questions], 1):
            if number > len(questions):
                conversation = Conversation(subject.stream(), subject.tokenizer)
            answers.append(self._choose(conversation, question))
            progress(number / (2 * len(questions)))
        streamed, alone = answers[: len(questions)], answers[len(questions) :]
        return {
            **count_right(sum(streamed), len(questions)),
            "one_shot": sum(alone) / len(questions),
            "answers": streamed,
            "one_shot_answers": alone,
            "tokens": stream.seen,
            "kv_bytes": stream.nbytes,
        }

    def _choose(self, conversation: Conversation, question: Question) -> int:
        """Ask a question after the stream's text; returns 1 for the right answer, otherwise 0."""
        stream, tokenizer = conversation.stream, conversation.tokenizer

        def ids(text: str, start: bool = False) -> list[int]:
            return list(tokenizer(text, add_special_tokens=start)["input_ids"])

        if self.chat:
            turn = conversation.turn(
                f"{question}\nAnswer with the letter of the right choice alone."
            )
            return answer_in_place(stream, turn, ids(question.right))
        first = stream.seen == 0
        before = "" if first else "\n\n"
        asked = ids(f"{before}{question}\nAnswer:", start=first)
        return answer_in_place(stream, asked, ids(f" {question.right}"))


def answer_in_place(stream: Stream, question: Sequence[int], right: Sequence[int]) -> int:
    """Feed a question and its answer; return 1 if greedy decoding gives the answer, otherwise 0."""
    wanted = torch.tensor(right)
    first = stream.feed(question)[:, None]
    rest = stream.feed(wanted, all_logits=True)[:, :-1]
    return int(bool((torch.cat([first, rest], dim=1).argmax(-1).cpu()[0] == wanted).all()))


def question_of(record: JsonRecord) -> Question:
    """Parse a question in the format of ARC's files or of the Hub.

    The files have an object `question` with `stem` and a list `choices`; on the Hub, `question` is
    the stem, and `choices` an object of the lists `label` and `text`.
    """
    if "choices" in record:
        stem, both = record.text("question"), record.record("choices")
        labels, texts = both.several_words("label", least=2), both.texts("text", least=2)
        if len(labels) != len(texts):
            raise record.wrong(
                "choices",
                f"has {in_words(len(labels), 'label')} and {in_words(len(texts), 'text')}",
            )
        choices = tuple(zip(labels, texts, strict=True))
    else:
        asked = record.record("question")
        stem = asked.text("stem")
        choices = tuple(
            (choice.words("label"), choice.text("text"))
            for choice in asked.records("choices", least=2)
        )
    right = record.text("answerKey")
    labels = [label for label, _ in choices]
    if right not in labels:
        raise record.wrong("answerKey", f"must be one of {', '.join(labels)}, got {right!r}")
    return Question(stem, choices, right)
