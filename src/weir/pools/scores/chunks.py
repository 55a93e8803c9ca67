"""Whole spans: keep or evict neighboring tokens together.

ChunkKV (Liu et al. 2025, "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient
Long-Context LLM Inference", arXiv:2502.00299), Algorithm 1: any score of tokens is averaged over
spans of places of the stream, and the spans with the highest average are kept whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weir import kernels
from weir.errors import WeirError
from weir.pools.base import Fold, Pool, PoolWrapper
from weir.pools.parameters import Count
from weir.pools.ranked import Ranked, select_highest
from weir.pools.registry import pool
from weir.slab import Slots


@pool("chunks")
@dataclass(frozen=True)
class Chunks(PoolWrapper):
    """Keep whole spans by the average of another pool's score, separately for each KV head.

    The average is over the tokens of a span that are still there. If slots are left over, but too
    few for the next best span, its best tokens get them. A token with the score `inf` is kept
    before all spans, one with `-inf` is evicted, and neither counts in the averages.

    Attributes:
        pool: the inner pool, which keeps tokens by a score. Its number of slots is used.
        size: number of places in the stream per span; 10 in the paper, 20 in kvpress.
    """

    pool: Pool
    size: Count = 10

    def __post_init__(self) -> None:
        if not isinstance(self.pool, Ranked):
            raise WeirError(
                "chunks needs an inner pool that keeps tokens by a score, as in "
                f"chunks(heavy(64), size=8), got {self.pool.name}"
            )
        if type(self.pool).fold is not Ranked.fold:  # `chunks` calls `fold_by` instead
            raise WeirError(
                f"chunks cannot use {self.pool.name}, because {type(self.pool).__name__} has a "
                "separate fold(), which chunks would not call. Override fold_by(), score() or "
                "tally() instead."
            )
        if self.size > self.pool.slots():
            raise WeirError(
                f"size of chunks must be from 1 to the number of slots, {self.pool.slots()}, got "
                f"{self.size}"
            )

    @property
    def ranked(self) -> Ranked:
        """The pool that scores."""
        assert isinstance(self.pool, Ranked)
        return self.pool

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Fold like the inner pool, but keep whole spans by its score."""
        choose = partial(whole_spans, self.size, fold.origin, alike=self.ranked.tie_margin)
        return self.ranked.fold_by(choose, held, new, fold)


def whole_spans(
    size: int,
    origin: int,
    n: int,
    slots: Slots,
    scores: tuple[Tensor, ...],
    alike: float = kernels.ALIKE,
) -> Tensor:
    """Return at most `n` tokens of the best spans [batch, kv_heads, slots], bool.

    A span has `size` places, and the first begins at `origin`. Spans are ranked by the average
    of the first score, and the tokens of a span by all scores. Slots are in order from the oldest
    on. `alike` is as in `select_highest`.
    """
    first = scores[0].double()
    counts = slots.held & first.isfinite()
    # Places are ascending along the slots. An empty slot among them does not split a span.
    span = ((slots.position - origin) // size).masked_fill(~slots.held, -1).cummax(dim=2).values
    begins = torch.ones_like(slots.held)
    begins[:, :, 1:] = span[:, :, 1:] != span[:, :, :-1]
    number = begins.cumsum(dim=2) - 1
    total = torch.zeros_like(first).scatter_add_(2, number, first.masked_fill(~counts, 0.0))
    members = torch.zeros_like(first).scatter_add_(2, number, counts.double())
    average = (total / members).gather(2, number)
    average = first.where(~counts, average)
    # Spans with the same average are separated by their age, or their tokens would be mixed.
    return select_highest(n, slots.held, average, -number.double(), *scores, alike=alike)
