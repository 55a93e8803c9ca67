"""Persistence of importance: keep tokens that often got at least an average share of attention.

Scissorhands (Liu et al. 2023, "Scissorhands: Exploiting the Persistence of Importance Hypothesis
for LLM KV Cache Compression at Test Time", arXiv:2305.17118), Algorithm 2: a token is counted
whenever its attention is at least 1/t, where t is the number of tokens that the query saw. Tokens
with the lowest counts are evicted. The newest tokens are kept separately (`recent`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.kernels import ALIKE
from weir.pools.base import Fold
from weir.pools.parameters import Count
from weir.pools.ranked import Asking
from weir.pools.registry import pool
from weir.slab import Slots


@pool("scissorhands")
@dataclass(frozen=True)
class Scissorhands(Asking):
    """Keep the tokens that most often got at least an average share of a query's attention,
    separately for each KV head.

    Each query head of a group is counted separately. If counts are equal, the sum of attention
    decides. The paper does not say what decides then.

    Attributes:
        n: number of tokens to keep.
        window: how many of the last queries are counted; 400 in the paper.
    """

    n: int
    window: Count = 64

    def score(self, slots: Slots, fold: Fold) -> tuple[Tensor, Tensor]:
        """Return how often and how much each token was attended to [batch, kv_heads, slots]
        each.
        """
        share = self.attention(slots, fold)
        whole = fold.observed.whole
        place = fold.observed.query_positions[:, None, -self.window :, None]
        seen = whole.held[:, :, None] & (whole.position[:, :, None] <= place)
        average = 1 / seen.sum(dim=-1).clamp_min(1)
        # A query that spreads its attention evenly gives each token the average, up to rounding.
        often = share >= (1 - ALIKE) * average[:, :, None, :, None]
        return often.sum(dim=(2, 3)).float(), share.sum(dim=(2, 3))
