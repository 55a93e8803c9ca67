"""`ruler`: files that RULER's scripts write; the question is fed after or before the text.

Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?",
section 3; metrics as in its appendix. A cache that compresses while it reads cannot know the
question. If the question is shown before or together with the text, that is a different measurement
with different rankings (arXiv:2607.11942), so `question` says which one it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal

from weir.errors import WeirError
from weir.evals.answers import GeneratedAnswer, costs, generate_answer, require_template
from weir.evals.records import JsonRecord, read_records
from weir.evals.scores import mean_interval
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.models import sink_of, transformers_model
from weir.pools import Count
from weir.stream import render_chat


@dataclass(frozen=True)
class RulerCase:
    """A record: the text, the question, the answer's beginning, and the expected outputs."""

    text: str
    question: str
    begun: str
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, record: JsonRecord) -> RulerCase:
        """Parse a record of RULER's files; the last line of `input` is the question.

        lm-evaluation-harness calls `gen_prefix` what RULER calls `answer_prefix`; older files have
        neither.
        """
        whole = record.words("input")
        text, line, question = whole.rstrip().rpartition("\n")
        if not text.strip():
            raise record.wrong("input", "must end in a separate line with the question")
        begins = [record.text(n) for n in ("answer_prefix", "gen_prefix") if n in record]
        begun = next((words for words in begins if words.strip()), "")
        # One space separates the question from the answer's beginning. What follows the beginning
        # is generated, including the space.
        begun = f" {begun.strip()}" if begun.strip() else ""
        outputs = tuple(record.several_words("outputs", least=1))
        return cls(text + line, question, begun, outputs)


@task("ruler")
@dataclass(frozen=True)
class Ruler(Task):
    """Answers a file of RULER: needles in hay, chains of variables, frequent words, questions.

    Attributes:
        file: a file that RULER's `prepare.py` wrote, such as `niah_single_2/validation.jsonl`; or
            `hub:…`.
        question: where the question is fed. `after`: after the text, as in RULER, when the text has
            already been read and compressed. `within`: with the text as one prompt, so that under
            `prefill="full"` the question influences which tokens are kept. `before`: in front of
            the text and again after it, so that a stream has the question while it reads.
        match: `all` scores the share of outputs that the answer contains; `part`, for RULER's
            questions (`qa`), whether the answer contains one of them.
        most: largest number of tokens of an answer; RULER has 128 for needles, 30 for variables,
            120 for common words, 50 for frequent ones and 32 for questions.
    """

    file: str
    question: Literal["after", "within", "before"] = "after"
    match: Literal["all", "part"] = "all"
    most: Count = 128
    samples: Count | None = None
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {"score": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Answer every record on its own stream.

        Returns:
            "score", the mean of the metric, from 0 to 1, and Student's 95 % interval from "low" to
            "high" (None for one record); "asked"; "answers"; and the figures of `costs`.
        """
        cases = self._cases()
        answers = []
        for case in cases:
            answers.append(self._ask(subject, case))
            progress(len(answers) / len(cases))
        return self._judge(cases, answers)

    def _cases(self) -> list[RulerCase]:
        return [RulerCase.of(record) for record in read_records(self.file, self.samples)]

    def _judge(
        self, cases: Sequence[RulerCase], answers: Sequence[GeneratedAnswer]
    ) -> dict[str, Any]:
        """The figures of a run."""
        pairs = zip(cases, answers, strict=True)
        score, reach = mean_interval(
            [match_score(answer.text, case.outputs, self.match) for case, answer in pairs]
        )
        return {
            "score": score,
            "low": None if reach is None else max(0.0, score - reach),
            "high": None if reach is None else min(1.0, score + reach),
            "asked": len(cases),
            "answers": [one.text for one in answers],
            **costs(answers),
        }

    def _ask(self, subject: Subject, case: RulerCase) -> GeneratedAnswer:
        """Generate the answer; `after` and `within` feed the same tokens."""
        text, question = self._parts(subject, case)
        tokenizer = subject.tokenizer
        first = tokenizer(text, add_special_tokens=not self.chat, verbose=False)["input_ids"]
        first = sink_of(transformers_model(subject.model).config).first(list(first))
        second = list(tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"])
        stream = subject.stream(len(first) + len(second), self.most)
        if self.question == "within":
            return generate_answer(stream, tokenizer, first + second, self.most)
        stream.feed(first)
        return generate_answer(stream, tokenizer, second, self.most)

    def _parts(self, subject: Subject, case: RulerCase) -> tuple[str, str]:
        """Return the text up to the question, and the question with the beginning of the answer."""
        front = f"{case.question}\n\n" if self.question == "before" else ""
        text = front + case.text
        if not self.chat:
            return text, case.question + case.begun
        require_template(subject.tokenizer)
        message = {"role": "user", "content": text + case.question}
        shown = render_chat(subject.tokenizer, [message])
        at = shown.rfind(case.question)
        if at < 0:
            raise WeirError(
                "the chat template rewrites the question, so it cannot be asked separately"
            )
        # Templates end where the answer begins, mostly in whitespace.
        begun = case.begun.lstrip() if shown[-1:].isspace() else case.begun
        return shown[:at], shown[at:] + begun


def match_score(answer: str, outputs: Sequence[str], match: str) -> float:
    """Compute RULER's `string_match_all` or `string_match_part` of one answer, from 0 to 1.

    Case is ignored, and unprintable characters become line breaks.
    """
    plain = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    found = [output.lower() in plain for output in outputs]
    return float(any(found)) if match == "part" else fmean(found)
