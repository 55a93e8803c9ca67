"""Heavy hitters: the tokens that received the most attention stay.

H2O (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models", Algorithm 1): a token's score is the attention it has received so far; whenever
there is one token too many, the one with the smallest score is evicted, and never comes back.
Behind a window of recent tokens, this is the paper's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, pool
from weir.slab import Slots


@pool("heavy")
@dataclass(frozen=True)
class Heavy(Pool):
    """Keep the tokens with the largest accumulated attention, each KV head its own.

    The attention of a token is summed over all queries since it arrived and over the query heads of
    its group; where it is equal, the older token stays. Weights travel along: a token that stands
    for several receives the attention of all of them.

    Attributes:
        n: how many tokens are kept.
    """

    needs_mass = True

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise WeirError(f"heavy keeps at least 1 token, not {self.n}")

    def slots(self) -> int:
        """As many slots as tokens are kept."""
        return self.n

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Evict the lightest; both what stays and what flows on lie from the oldest token on.

        Scores do not change within a fold, so evicting all that is too many at once leaves what
        evicting one after each arrival would.
        """
        both = held.join(new)
        if not fold.unbroken:
            both = both.by_position()
        assert both.mass is not None
        scores = both.mass.masked_fill(~both.held, -torch.inf)
        heaviest = scores.argsort(dim=2, descending=True, stable=True)[:, :, : self.n]
        stays = torch.zeros_like(both.held).scatter_(2, heaviest, True)
        return both.only(stays), both.only(~stays)
