"""`mtbench`: all dialogues of MT-Bench on one stream, one after the other, without an end.

StreamingLLM's own demonstration. No judge is at hand, so answers are judged by the model itself:
their likelihood under exact attention, behind their own dialogue alone, and by repetition. What a
cache spoils shows in the last answers beside the first, and beside `dense` with a cache of its own
for every dialogue (`alone=true`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, ClassVar

import numpy as np

from weir.evals.answers import check_template
from weir.evals.records import read_records
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.policies import parse_policy
from weir.pools import Bounds, Count
from weir.stream import Conversation, Stream, render_chat

GRAM = 3
"""Tokens in a row that are counted as one for repetition."""


def share_distinct(tokens: Sequence[int], gram: int = GRAM) -> float:
    """The share of different n-grams among all of a list; 1 where there is none."""
    grams = list(zip(*(tokens[i:] for i in range(gram)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


@task("mtbench")
@dataclass(frozen=True)
class MTBench(Task):
    """MT-Bench's dialogues on one stream, in random order.

    Attributes:
        file: `mt_bench.jsonl`, a record a dialogue with its `turns`.
        most: tokens of an answer.
        alone: give each dialogue a new stream, for a baseline.
    """

    file: str
    samples: Annotated[int, Bounds(4)] | None = None
    most: Count = 96
    alone: bool = False

    metrics: ClassVar[dict[str, Better]] = {"nll_last": "lower", "distinct_last": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Hold all dialogues.

        Returns:
            Of the answers in the first and the last quarter of the stream "nll_first" and
            "nll_last" (mean, nats a token), "distinct_first" and "distinct_last" (share of
            different runs of 3 tokens); "answers"; "tokens" of the stream, "kv_bytes".
        """
        check_template(subject.tokenizer)
        records = read_records(self.file, self.samples)
        order = np.random.default_rng(subject.seed).permutation(len(records))
        talk = Conversation(subject.stream(), subject.tokenizer)
        nll: list[float] = []
        distinct: list[float] = []
        answers: list[str] = []
        tokens = 0
        for done, number in enumerate(order, 1):
            if self.alone:
                talk = Conversation(subject.stream(), subject.tokenizer)
            history: list[dict[str, str]] = []
            for turn in records[number].texts("turns", least=1):
                history.append({"role": "user", "content": turn})
                answers.append("".join(talk.say(turn, max_new_tokens=self.most)))
                ids = subject.tokenizer(answers[-1], add_special_tokens=False)["input_ids"]
                if ids:  # an empty answer has nothing that could be judged
                    nll.append(_judge(subject, history, ids))
                    distinct.append(share_distinct(ids))
                history.append({"role": "assistant", "content": answers[-1]})
            tokens += talk.stream.seen if self.alone else 0
            progress(done / len(order))
        quarter = max(1, len(nll) // 4)
        return {
            "nll_first": fmean(nll[:quarter]),
            "nll_last": fmean(nll[-quarter:]),
            "distinct_first": fmean(distinct[:quarter]),
            "distinct_last": fmean(distinct[-quarter:]),
            "asked": len(answers),
            "answers": answers,
            "tokens": tokens or talk.stream.seen,
            "kv_bytes": talk.stream.nbytes,
        }


def _judge(subject: Subject, history: list[dict[str, str]], answer: list[int]) -> float:
    """The mean loss of an answer under exact attention, behind its own dialogue alone."""
    stream = Stream(subject.model, parse_policy("dense"))
    text = render_chat(subject.tokenizer, history)
    stream.feed(subject.tokenizer(text, add_special_tokens=False)["input_ids"])
    return float(stream.score(answer).mean())
