"""Eviction by the exact output error: the token that changes the output least goes first.

CAOTE (Goel et al. 2025, "CAOTE: KV Cache Selection for LLMs via Attention Output Error-Based Token
Eviction", arXiv:2504.14051), section 3: without token i, which has the attention weight a_i and
the value v_i, all other weights are multiplied by 1 / (1 - a_i). So the output o moves by
a_i / (1 - a_i) |o - v_i|.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Count
from weir.pools.ranked import Asking
from weir.pools.registry import pool
from weir.slab import Slots


@pool("caote")
@dataclass(frozen=True)
class Caote(Asking):
    """Keep the tokens without which the output would move most, separately for each KV head.

    For each of the last queries, the error of its output is computed, with its attention over all
    tokens that it sees, including those of other pools. The score is the mean error over these
    queries and the query heads of the group. With `window=1`, this is the paper's score on top of
    TOVA.

    Attributes:
        n: number of tokens to keep.
        window: how many of the last queries are used.
    """

    n: int
    window: Count = 32

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the mean error without each token [batch, kv_heads, slots], float32."""
        share = self.attention(slots, fold)
        output = fold.observed.answers[:, :, :, -self.window :].float()
        group = output.shape[2]
        away = torch.cdist(output.flatten(2, 3), slots.values.float()).unflatten(2, (group, -1))
        rest = (1 - share).clamp_min(torch.finfo(share.dtype).eps)
        return (share / rest * away).mean(dim=(2, 3))
