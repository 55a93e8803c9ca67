"""`ruler_recalled`: RULER's files, read as a stream, with an archive that is searched with the
words of each question.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

from weir.evals.answers import GeneratedAnswer, generate_answer
from weir.evals.task import Progress, Subject, task
from weir.evals.tasks.ruler import Ruler, RulerCase
from weir.models import sink_of, transformers_model
from weir.pools import Count
from weir.stream import HeldPlaces
from weir.stream.archive import Archive, write_quotes


class _BothAnswers(NamedTuple):
    """The answers to a question with recall and without, and the recalled passages. If there are
    none, the two answers are the same.
    """

    recalled: GeneratedAnswer
    alone: GeneratedAnswer
    passages: list[str]


@task("ruler_recalled")
@dataclass(frozen=True)
class RulerRecalled(Ruler):
    """Answers a file of RULER with recall, where text that has left the cache is quoted before the
    question, and without recall.

    Each text is read once. The question is first asked without recall, on a copy of the stream. If
    something is recalled, the question is asked again with recall, on the stream itself. Otherwise,
    the first answer counts for both.

    Attributes:
        recall: largest number of tokens of recalled text.
    """

    recall: Count = 256

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Answer every record on its own stream.

        Returns:
            The same figures as `ruler`, of the answers with recall; "without", the same figures of
            the answers without recall; "recalled", the passages for each question.
        """
        cases = self._cases()
        found: list[_BothAnswers] = []
        for case in cases:
            found.append(self._ask_twice(subject, case))
            progress(len(found) / len(cases))
        return {
            **self._judge(cases, [one.recalled for one in found]),
            "without": self._judge(cases, [one.alone for one in found]),
            "recalled": [one.passages for one in found],
        }

    def _ask_twice(self, subject: Subject, case: RulerCase) -> _BothAnswers:
        """Read the text, and ask the question without recall and, if the archive finds passages for
        it, after these.
        """
        text, question = self._parts(subject, case)
        tokenizer = subject.tokenizer

        def encode(part: str, *, special: bool = False) -> list[int]:
            return list(tokenizer(part, add_special_tokens=special, verbose=False)["input_ids"])

        first = encode(text, special=not self.chat)
        first = sink_of(transformers_model(subject.model).config).first(first)
        stream = subject.stream(len(first) + len(encode(question)) + self.recall, self.most)
        stream.feed(first)
        with Archive() as archive:
            archive.add("text", text, start=0, stop=stream.seen)
            found = archive.search(case.question, is_held=HeldPlaces(stream))
        quoted, used = write_quotes(found, self.recall, lambda quotes: len(encode(quotes)))
        aside = copy.deepcopy(stream)
        alone = generate_answer(aside, tokenizer, encode(question), self.most)
        if not quoted:
            return _BothAnswers(alone, alone, [])
        ids = encode(f"\n\n{quoted}{question}")
        recalled = generate_answer(stream, tokenizer, ids, self.most)
        return _BothAnswers(recalled, alone, [one.text for one in used])
