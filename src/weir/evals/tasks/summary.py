"""`summary`: writes summaries of articles, scored by ROUGE against references and by Self-BLEU.

BUZZ (Zhao et al. 2024), section 4.2.1 with Table 2 and Figure 5 (XSUM, budgets of 10 to 60 % of the
full cache), Table A (CNN/DailyMail), and section 4.2.3 with Figure 7: Self-BLEU, to be compared
with that of `dense`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weir.errors import WeirError
from weir.evals.answers import ask_all, costs
from weir.evals.records import JsonRecord, read_records
from weir.evals.scores import rouge_scores, self_bleu
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.pools import Count

FIELDS = (("document", "summary"), ("article", "highlights"))
"""Names of the fields for a text and its summary, in XSUM and in CNN/DailyMail."""


@task("summary")
@dataclass(frozen=True)
class Summary(Task):
    """Measures ROUGE-1, ROUGE-2, ROUGE-L, their geometric mean, and Self-BLEU of summaries.

    Attributes:
        file: JSON lines with `document` and `summary` (XSUM) or `article` and `highlights`
            (CNN/DailyMail); or `hub:...`.
        most: largest number of tokens of a summary.
    """

    file: str
    samples: Count | None = None
    most: Count = 64
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {
        "rouge": "higher",
        "rouge1": "higher",
        "rouge2": "higher",
        "rougeL": "higher",
    }

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Summarize every article on its own stream.

        Returns:
            "rouge" (the geometric mean), "rouge1", "rouge2", "rougeL" and "self_bleu", all from 0
            to 1; "asked"; "answers"; and the figures of `costs`, where "share" is the cache's
            budget as the paper counts it.
        """
        rouge_scores(["ready"], ["ready"])  # fail now, not after hours of work
        self_bleu(["ready", "ready"])
        pairs = [texts_of(record) for record in read_records(self.file, self.samples)]
        prompts = [
            f"Article: {article.strip()}\n\nSummarize the article above in one sentence.\nSummary:"
            for article, _ in pairs
        ]
        stops = () if self.chat else ("\n",)
        answers = ask_all(subject, prompts, self.most, stops, self.chat, progress)
        texts = [answer.text.strip() for answer in answers]
        return {
            **rouge_scores(texts, [right for _, right in pairs]),
            "self_bleu": self_bleu(texts),
            "asked": len(pairs),
            "answers": texts,
            **costs(answers),
        }


def texts_of(record: JsonRecord) -> tuple[str, str]:
    """Return the text and the summary of a record."""
    for text, summary in FIELDS:
        if text in record:
            return record.words(text), record.words(summary)
    known = " or ".join(f"'{text}'" for text, _ in FIELDS)
    raise WeirError(f"{record.place}: there is no field {known}")
