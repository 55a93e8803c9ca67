"""`ruler_recalled`: RULER's files, read as a stream with an archive that the question searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weir.evals.answers import GeneratedAnswer, generate_answer
from weir.evals.task import Progress, Subject, task
from weir.evals.tasks.ruler import Ruler, RulerCase
from weir.models import sink_of, transformers_model
from weir.pools import Count
from weir.stream import HeldPlaces
from weir.stream.archive import Archive, write_quotes


@task("ruler_recalled")
@dataclass(frozen=True)
class RulerRecalled(Ruler):
    """A file of RULER, with what has left the cache put before its question.

    Attributes:
        recall: tokens of recalled text at most.
    """

    recall: Count = 256

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Answer every record on its own stream; returns what `ruler` does."""
        return super().run(subject, progress)

    def _ask(self, subject: Subject, case: RulerCase) -> GeneratedAnswer:
        """Read the text, and ask with what the archive finds in front of the question."""
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
        quoted, _ = write_quotes(found, self.recall, lambda quotes: len(encode(quotes)))
        return generate_answer(stream, tokenizer, encode(f"\n\n{quoted}{question}"), self.most)
