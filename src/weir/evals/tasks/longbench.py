"""`longbench`: files of LongBench and LongBench-E (Bai et al. 2024), with lm-evaluation-harness.

Prompts, lengths of answers and metrics come from the harness's own tasks, applied to the records of
the task's `file`. weir answers on a stream under the subject's policy. StreamingLLM (Table 8) cuts
out the middle of prompts and keeps 1,750 tokens at each end. For BalanceKV (section 4.2, Table 1),
run LongBench-E with `weir eval --protocol balancekv`, which reads prompts as that paper does.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, ClassVar

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError, suggest
from weir.evals.answers import ask_all, costs
from weir.evals.records import JsonRecord, import_optional, read_records
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.pools import Bounds, Count

PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""Data sets whose prompts LongBench never puts into a chat template: few-shot and code."""
CLASSES = ("trec", "lsht")
"""Data sets whose answer is one of several classes; the others have null in `all_classes`."""
LENGTHS = (("0-4k", 0, 4000), ("4-8k", 4000, 8000), ("8k+", 8000, float("inf")))
"""Groups of LongBench-E, by the number of words in a record."""


@task("longbench")
@dataclass(frozen=True)
class LongBench(Task):
    """A file of LongBench or LongBench-E.

    Attributes:
        file: an official file, such as `multi_news.jsonl` or `qasper_e.jsonl`; or a data set
            of the Hub, `hub:ID:SPLIT`.
        truncate: cut longer prompts to this many tokens by leaving out their middle; none feeds
            them whole.
        chat: put prompts into the model's chat template, where LongBench does.
    """

    file: str
    samples: Count | None = None
    truncate: Annotated[int, Bounds(2)] | None = None
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {"score": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Answer every prompt on its own stream.

        Returns:
            "score", the mean of the data set's metric, from 0 to 1; "dataset"; "asked"; the score
            "by_length", in LongBench-E's groups; "answers"; and `costs`.
        """
        records = read_records(self.file, self.samples)
        name = records[0].text("dataset").removesuffix("_e")
        rows = [fields_of(record, name) for record in records]
        harness = harness_task(name, rows)
        options = harness.config.generation_kwargs
        chat = self.chat and name not in PLAIN
        prompts = [harness.doc_to_text(row) for row in rows]
        if self.truncate is not None:
            prompts = [without_middle(subject.tokenizer, one, self.truncate) for one in prompts]
        most, stops = int(options["max_gen_toks"]), tuple(options["until"])
        answers = ask_all(subject, prompts, most, stops, chat, progress)
        scores = [
            float(harness.process_results(row, [answer.text])["score"])
            for row, answer in zip(rows, answers, strict=True)
        ]
        return {
            "score": mean(scores),
            "dataset": name,
            "asked": len(rows),
            "by_length": by_length(rows, scores),
            "answers": [one.text for one in answers],
            **costs(answers),
        }


def harness_task(name: str, rows: list[dict[str, Any]]) -> Any:
    """Make the harness's task for a data set, with these records instead of its download."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional packages that would be faster
        for package in ("lm_eval", "jieba", "fuzzywuzzy.fuzz", "rouge"):
            import_optional(package, "longbench")
    datasets = import_optional("datasets", "longbench")
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import __file__ as tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(str(tasks)).parent / "longbench"
    known = sorted(path.stem for path in folder.glob("[!_]*.yaml") if path.stem[-2:] != "_e")
    if name not in known:
        raise WeirError(f"LongBench has no data set {name!r}{suggest(name, known)}")

    class LocalTask(ConfigurableTask):
        def download(self, *given: Any, **options: Any) -> None:
            self.dataset = {"test": datasets.Dataset.from_list(rows)}

    return LocalTask(config=load_yaml(folder / f"{name}.yaml", resolve_func=True))


def fields_of(record: JsonRecord, name: str) -> dict[str, Any]:
    """Return the fields of a record under the harness's names; `question` can replace `input`."""
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
    """Return the first and last tokens of a text, half of `most` each; all tokens of a shorter
    text.
    """
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if len(ids) <= most:
        return text
    first, last = ids[: most // 2], ids[len(ids) - (most - most // 2) :]
    return f"{tokenizer.decode(first)}{tokenizer.decode(last)}"


def by_length(rows: list[dict[str, Any]], scores: list[float]) -> list[dict[str, Any]]:
    """Return the mean score of each group of lengths that has records."""
    found = []
    for group, least, past in LENGTHS:
        pairs = zip(rows, scores, strict=True)
        mine = [score for row, score in pairs if least <= row["length"] < past]
        if mine:
            found.append({"length": group, "asked": len(mine), "score": mean(mine)})
    return found
