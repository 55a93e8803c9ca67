"""Heavy hitters: the tokens that received the most attention stay.

H2O (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models", arXiv:2306.14048), Algorithm 1: whenever there is one token too many, the one with
the least attention so far is evicted. Behind a window of recent tokens, this is the paper's cache.
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
    """Keep the tokens with the largest accumulated attention, each KV head its own.

    The attention of a token is summed over all queries since it arrived and over the query heads of
    its group; where it is equal, the older token stays. Weights travel along: a token that stands
    for several receives the attention of all of them.

    Attributes:
        n: how many tokens are kept.
    """

    needs_mass = True

    n: int

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the attention each token has received [batch, kv_heads, slots]."""
        assert slots.mass is not None
        return slots.mass
