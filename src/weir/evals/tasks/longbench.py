"""`longbench`: files of LongBench and LongBench-E, with their own prompts and metrics.

Bai et al. 2024. Prompts, lengths of answers and metrics are those that lm-evaluation-harness has of
each data set; here they are put to a subject, from local files. StreamingLLM (Table 8) cuts prompts
in the middle, to 1,750 tokens of each end; BalanceKV (section 4.2, Table 1) takes LongBench-E under
the protocol `balancekv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.answers import ask, costs
from weir.evals.recipes import recipe_of
from weir.evals.records import JsonRecord, read_records
from weir.evals.task import Better, Progress, Subject, Task, task

PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""Data sets whose prompts LongBench never puts into a chat template: few-shot, and code."""
CLASSES = ("trec", "lsht")
"""Data sets whose answer is one of several classes; the others have null in `all_classes`."""
LENGTHS = (("0-4k", 0, 4000), ("4-8k", 4000, 8000), ("8k+", 8000, None))
"""Groups of LongBench-E, by the words of a record."""


@task("longbench")
@dataclass(frozen=True)
class LongBench(Task):
    """A file of LongBench or LongBench-E.

    Attributes:
        file: an official file, `multi_news.jsonl` or `qasper_e.jsonl`; or `hub:...`.
        samples: the first so many of its records; none takes all.
        truncate: cut longer prompts to so many tokens by leaving out their middle; none feeds them
            whole.
        chat: put prompts into the model's chat template, where LongBench does.
    """

    file: str
    samples: int | None = None
    truncate: int | None = None
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {"score": "higher"}

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise WeirError(f"longbench takes 1 sample or more, not {self.samples}")
        if self.truncate is not None and self.truncate < 2:
            raise WeirError(f"a prompt is cut to 2 tokens or more, not to {self.truncate}")

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Put every prompt on a stream of its own.

        Returns:
            "score", the mean of the data set's metric, from 0 to 1; "dataset"; "asked"; the score
            "by_length", in LongBench-E's groups; "answers"; and what `costs` says of the caches.
        """
        records = read_records(self.file, self.samples)
        name = records[0].text("dataset").removesuffix("_e")
        recipe = recipe_of(name)
        rows = [fields_of(record, name) for record in records]
        answers, scores = [], []
        for row in rows:
            prompt = recipe.prompt.render(**row)
            if self.truncate is not None:
                prompt = without_middle(subject.tokenizer, prompt, self.truncate)
            chat = self.chat and name not in PLAIN
            answers.append(ask(subject, prompt, recipe.max_new_tokens, recipe.stops, chat))
            scores.append(float(recipe.score(row, [answers[-1].text])["score"]))
            progress(len(scores) / len(rows))
        return {
            "score": mean(scores),
            "dataset": name,
            "asked": len(rows),
            "by_length": by_length(rows, scores),
            "answers": [one.text for one in answers],
            **costs(answers),
        }


def fields_of(record: JsonRecord, name: str) -> dict[str, Any]:
    """The fields of a record, by the names the harness's prompts know them under.

    On the Hub there are copies with `question` in place of `input`.

    Raises:
        WeirError: a field is missing or of another kind, or the record is of another data set.
    """
    if record.text("dataset").removesuffix("_e") != name:
        raise record.wrong("dataset", f"must be {name!r} in the whole file")
    return {
        "context": record.text("context"),
        "question": record.text("question" if "question" in record else "input"),
        "answers": record.texts("answers", least=1),
        "all_classes": record.several_words("all_classes", least=1) if name in CLASSES else None,
        "length": record.count("length"),
    }


def without_middle(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> str:
    """A text of at most `most` tokens: the first half of them and the last, nothing between."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if len(ids) <= most:
        return text
    first, last = ids[: most // 2], ids[len(ids) - (most - most // 2) :]
    return f"{tokenizer.decode(first)}{tokenizer.decode(last)}"


def by_length(rows: list[dict[str, Any]], scores: list[float]) -> list[dict[str, Any]]:
    """The mean score of each group of lengths that has records."""
    found = []
    for group, least, past in LENGTHS:
        mine = [
            score
            for row, score in zip(rows, scores, strict=True)
            if row["length"] >= least and (past is None or row["length"] < past)
        ]
        if mine:
            found.append({"length": group, "asked": len(mine), "score": mean(mine)})
    return found
