"""`attention-error`: relative error of each layer's attention under a policy, on one text.

BalanceKV (Kochetkova et al. 2025), section 4.1. `weir.evals.attention_error` measures it; this task
makes it available to grids, with one seed per cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from weir.errors import WeirError
from weir.evals.attention_error import (
    MOST_TOKENS,
    mean_over_layers,
    measure_error,
    set_up,
    size_policies,
)
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.stream import read_stream


@task("attention-error")
@dataclass(frozen=True)
class AttentionError(Task):
    """Measures the relative error of each layer's attention over the last queries of a text.

    Attributes:
        rate: the share that a policy keeps of the tokens between the first `exact` and the last
            `queries`; the policy must then be written without a budget. With `none`, each policy
            has its own budget.
        tokens: tokens of the text that are used; with `none`, as many as fit into the model's
            window, at most 4,096.
        queries: number of last tokens whose queries are evaluated; with `none`, 256, or a quarter
            of the tokens if that is less.
        exact: number of first tokens that stay exact if there is a rate and the policy has the
            parameters `sinks` and `recent`, and sets neither; with `none`, 256, or an eighth of the
            tokens if that is less.
    """

    rate: float | None = None
    tokens: int | None = None
    queries: int | None = None
    exact: int | None = None
    text: str | None = None

    metrics: ClassVar[dict[str, Better]] = {"error": "lower"}

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < 1:
            raise WeirError(f"rate of attention-error must be between 0 and 1, got {self.rate:g}")

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Compress the keys and values of every layer, and compare the last queries' attention.

        Returns:
            "error", the mean over the layers; "by_layer", with each layer's "error" and share of
            tokens "kept"; "kept", "tokens", "queries"; "kv_bytes", which is None because no stream
            is read.
        """
        ids = read_stream(subject.tokenizer, self.text, self.tokens or MOST_TOKENS).ids
        setup = set_up(subject.model, len(ids), self.tokens, self.queries, self.exact)
        rates = () if self.rate is None else (self.rate,)
        sized, _ = size_policies([str(subject.policy)], setup, rates)

        def report(done: int, rows: int) -> None:
            progress(done / rows)

        seeds = (subject.seed,)
        rows = measure_error(subject.model, ids, sized, setup, seeds=seeds, on_step=report)
        (mean,) = mean_over_layers(rows)
        return {
            "error": mean["error"],
            "by_layer": [{"layer": r.layer, "error": r.error, "kept": r.kept} for r in rows],
            "kept": mean["kept"],
            "tokens": setup.tokens,
            "queries": setup.queries,
            "kv_bytes": None,
        }
