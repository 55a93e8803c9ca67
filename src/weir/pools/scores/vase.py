"""Keep tokens with wide values for certain, and others by a draw weighted by attention.

VaSE (2026, "Value-aware Stochastic KV Cache Eviction", arXiv:2606.03928) and its released code:
tokens whose values have a wide range, from their smallest to their largest entry, are kept. The
other slots go to a sample without replacement, drawn again at every eviction. A token's probability
is proportional to its attention from the last queries, averaged over its neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold
from weir.pools.parameters import Count, Kernel, Natural
from weir.pools.ranked import Asking, pool_neighbors, select_highest
from weir.pools.registry import pool
from weir.slab import Slots

LEAST = 1e-30
"""The smallest weight of a draw, so that tokens without attention are drawn last, at random."""


@pool("vase")
@dataclass(frozen=True)
class Vase(Asking):
    """Keep the tokens with the widest values, and a sample of the others, separately for each KV
    head.

    Attributes:
        n: number of tokens to keep.
        wide: how many of them are kept for the range of their values; none for a tenth, as in the
            paper's runs.
        window: how many of the last queries are used.
        kernel: number of neighboring places in the stream over which attention is averaged; odd.
    """

    is_stochastic = True

    n: int
    wide: Natural | None = None
    window: Count = 64
    kernel: Kernel = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wide is not None and self.wide > self.n:
            raise WeirError(f"wide of vase must be from 0 to n, {self.n}, got {self.wide}")

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return a random number that tends to be larger for tokens with more attention; `inf` for
        the widest values [batch, kv_heads, slots].
        """
        share = self.attention(slots, fold).mean(dim=(2, 3)).masked_fill(~slots.held, 0.0)
        weight = pool_neighbors(share, slots.position, self.kernel, average=True)
        reach = slots.values.float().amax(dim=-1) - slots.values.float().amin(dim=-1)
        wide = self.n // 10 if self.wide is None else self.wide
        # The tokens with the largest log w + Gumbel noise are a sample without replacement by the
        # weights w (Efraimidis and Spirakis 2006, in logarithms). A token gets new noise at every
        # fold.
        noise = gumbel(fold.draws.uniform(0, slots.position, fold.next[:, None, None]))
        drawn = weight.clamp_min(LEAST).log() + noise
        return drawn.masked_fill(select_highest(wide, slots.held, reach), torch.inf)


def gumbel(u: Tensor) -> Tensor:
    """Return standard Gumbel numbers from uniform ones in [0, 1), float64."""
    return -(-(u + 2.0**-54).log()).log()
