"""`mtbench`: runs all dialogues of MT-Bench one after the other on one endless stream.

This is StreamingLLM's own demonstration. No other model judges the answers. Instead, the
task measures how likely the model itself finds them, under exact attention and after only their own
dialogue, and how much they repeat themselves and earlier answers. To see the effect of a cache,
compare the last answers with the first, and with `dense` with a separate cache for every dialogue
(`alone=true`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from weir.evals.answers import require_template
from weir.evals.records import read_records
from weir.evals.scores import mean_interval
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.policies import parse_policy
from weir.pools import Bounds, Count
from weir.stream import Conversation, Stream, render_chat
from weir.stream.archive import Archive

GRAM = 3
"""Length of the runs of tokens that are counted for repetition."""


def share_distinct(tokens: Sequence[int], gram: int = GRAM) -> float:
    """Return the share of different n-grams among all n-grams of a list; 1 if it has none."""
    grams = list(zip(*(tokens[i:] for i in range(gram)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


@task("mtbench")
@dataclass(frozen=True)
class MTBench(Task):
    """Runs MT-Bench's dialogues on one stream, in random order.

    Attributes:
        file: `mt_bench.jsonl`, with one record for each dialogue, which has its `turns`.
        most: largest number of tokens of an answer.
        alone: use a new stream for each dialogue, as a baseline.
        recall: largest number of tokens that are recalled into a turn; 0 keeps no archive.
    """

    file: str
    samples: Annotated[int, Bounds(4)] | None = None
    most: Count = 96
    alone: bool = False
    recall: Annotated[int, Bounds(0)] = 0

    metrics: ClassVar[dict[str, Better]] = {"nll_last": "lower", "distinct_last": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Hold all dialogues.

        Returns:
            Means over the first and the last quarter of the answers: "nll_first" and "nll_last"
            (nats per token), "distinct_first" and "distinct_last" (share of different runs of 3
            tokens), "repeated_first" and "repeated_last" (share of answers that equal an earlier
            answer, word for word). Each comes with half the width of its 95 % interval (Student's),
            as in "nll_first_reach"; None for one answer. If every answer is empty, all
            of these are None, except those of "repeated". Also "nll" and "distinct" of each answer,
            None for an empty one; "asked", the number of answers; "answers"; "recalls", the number
            of dialogues in which something was recalled for the first turn, for the second turn and
            so on; "recalled", the recalled texts for each answer; "tokens" of all streams, and
            "kv_bytes".
        """
        require_template(subject.tokenizer)
        records = read_records(self.file, self.samples)
        order = np.random.default_rng(subject.seed).permutation(len(records))
        talk = self._begin(subject)
        nll: list[float | None] = []
        distinct: list[float | None] = []
        answers: list[str] = []
        recalls: list[int] = []
        recalled: list[list[str]] = []
        tokens = 0
        for done, number in enumerate(order, 1):
            if self.alone:
                talk = self._begin(subject)
            history: list[dict[str, str]] = []
            for place, turn in enumerate(records[number].texts("turns", least=1)):
                history.append({"role": "user", "content": turn})
                answers.append("".join(talk.say(turn, max_new_tokens=self.most)))
                recalls += [0] * (place + 1 - len(recalls))
                recalls[place] += bool(talk.recalled)
                recalled.append([excerpt.text for excerpt in talk.recalled])
                ids = subject.tokenizer(answers[-1], add_special_tokens=False)["input_ids"]
                # An empty answer cannot be judged.
                nll.append(_judge(subject, history, ids) if ids else None)
                distinct.append(share_distinct(ids) if ids else None)
                history.append({"role": "assistant", "content": answers[-1]})
            tokens += talk.stream.seen if self.alone else 0
            progress(done / len(order))
        repeated = [float(answer in answers[:n]) for n, answer in enumerate(answers)]
        return {
            **_compare_ends("nll", nll),
            **_compare_ends("distinct", distinct),
            **_compare_ends("repeated", repeated),
            "nll": nll,
            "distinct": distinct,
            "asked": len(answers),
            "answers": answers,
            "recalls": recalls,
            "recalled": recalled,
            "tokens": tokens or talk.stream.seen,
            "kv_bytes": talk.stream.nbytes,
        }

    def _begin(self, subject: Subject) -> Conversation:
        """Begin a new conversation, with an archive if text can be recalled."""
        archive = Archive() if self.recall else None
        stream = subject.stream()
        return Conversation(stream, subject.tokenizer, archive=archive, recall=self.recall)


def _compare_ends(name: str, figures: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean of a figure over the first and the last quarter of the answers, and half
    the width of its 95 % interval; None if no answer was judged.
    """
    judged = [figure for figure in figures if figure is not None]
    quarter = max(1, len(judged) // 4)
    ends = {"first": judged[:quarter], "last": judged[-quarter:]}
    found: dict[str, float | None] = {}
    for end, some in ends.items():
        figures_of_end = mean_interval(some) if some else (None, None)
        found[f"{name}_{end}"], found[f"{name}_{end}_reach"] = figures_of_end
    return found


def _judge(subject: Subject, history: list[dict[str, str]], answer: list[int]) -> float:
    """Return the mean loss of an answer under exact attention, after only its own dialogue."""
    stream = Stream(subject.model, parse_policy("dense"))
    text = render_chat(subject.tokenizer, history)
    stream.feed(subject.tokenizer(text, add_special_tokens=False)["input_ids"])
    return float(stream.score(answer).mean())
