"""Two-stage selection: half of the tokens by attention, half by attention times value length.

CriticalKV (Feng et al. 2025, "Identify Critical KV Cache in LLM Inference from an Output
Perturbation Perspective", arXiv:2502.03805), Algorithm 1: the first half of the slots goes to the
tokens with the most attention. The second half goes to the tokens with the largest product of
attention and the size of their value after the output projection, which bounds how far the output
moves if they are evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Count, Factor, Share
from weir.pools.ranked import Asking, select_highest
from weir.pools.registry import pool
from weir.slab import Slots


@pool("critical")
@dataclass(frozen=True)
class Critical(Asking):
    """Keep tokens by attention, then by attention times ‖W_o v‖₁, separately for each KV head.

    Attention is the mean over the last queries and the query heads of the group. The size of the
    projected value, its L1 norm, is the mean over the query heads. If the output projection is not
    known, the L1 norm of the value is used.

    Attributes:
        n: number of tokens to keep.
        window: how many of the last queries are used.
        first: the share of the slots that attention alone decides.
        floor: added to attention in the second half, so that large values are not overlooked.
    """

    n: int
    window: Count = 32
    first: Share = 0.5
    floor: Factor = 1e-4

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return attention times size; `inf` for the first half [batch, kv_heads, slots]."""
        attention = self.attention(slots, fold).mean(dim=(2, 3))
        size = fold.observed.projected_sizes(slots.values)
        best = select_highest(int(self.n * self.first), slots.held, attention)
        return ((attention + self.floor) * size).masked_fill(best, torch.inf)
