"""Heavy hitters: keep the tokens that received the most attention.

H2O (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models", arXiv:2306.14048), Algorithm 1: whenever there is one token too many, the one with
the least attention so far is evicted. In a pipe after `recent`, this pool gives the paper's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.pools.base import Fold
from weir.pools.ranked import Ranked
from weir.pools.registry import pool
from weir.slab import Slots


@pool("heavy")
@dataclass(frozen=True)
class Heavy(Ranked):
    """Keep the tokens with the largest accumulated attention, separately for each KV head.

    The attention of a token is summed over all queries since it arrived and over the query heads of
    its group. Among equal sums, the older token is kept. Weights are kept with their tokens: a
    token that represents several gets the attention of all of them.

    Attributes:
        n: number of tokens to keep.
    """

    needs_mass = True

    n: int

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the attention that each token has received [batch, kv_heads, slots]."""
        assert slots.mass is not None
        return slots.mass
