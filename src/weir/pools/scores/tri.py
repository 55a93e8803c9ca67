"""Keep tokens that the rotated mean query will attend to, by a sum of cosines over distances.

TriAttention (Mao et al. 2026, "TriAttention: Efficient Long Reasoning with Trigonometric KV
Compression", arXiv:2604.04921) and its released code: before rotation, the queries of a head are
close to a center, so the logit of a key at a given distance is about a sum of cosines with the mean
query's amplitudes and phases. This sum is averaged over future distances. For each pair of
dimensions that rotate together, the mean length of the queries minus the length of their mean,
times the key's length, is added. A token's score is its largest among the heads of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Count
from weir.pools.ranked import Asking
from weir.pools.registry import pool
from weir.pools.scores.last_queries import (
    Ahead,
    keys_as_read,
    last_unrotated_queries,
    mean_query,
    mean_rotation,
    rotate_back,
)
from weir.slab import Slots


@pool("tri")
@dataclass(frozen=True)
class Tri(Asking):
    """Keep the tokens that the mean query will attend to, by a sum of cosines, separately for each
    KV head.

    Attributes:
        n: number of tokens to keep.
        ahead: distances are 1, 2, 4 and so on, up to this many places; 65,536 in the authors'
            code, where positions grow with the stream.
        queries: how many of the last queries give the means; the authors calibrate the means on
            other texts.
    """

    asks = "queries"

    n: int
    ahead: Ahead = 64
    queries: Count = 64

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the largest of the group's scores, in standard deviations [batch, kv_heads,
        slots].
        """
        queries, there = last_unrotated_queries(fold, self.queries)
        mean, count = mean_query(queries, there)
        # Distances count from the newest query, one before the next place.
        steps = [2**i - 1 for i in range(self.ahead.bit_length())]
        turn = mean_rotation(fold, steps)
        keys = keys_as_read(slots, fold)
        score = mean @ rotate_back(keys, turn).mT
        if turn is not None:
            half = turn.cos.shape[-1]
            longer = _lengths(queries, half).sum(dim=3) / count - _lengths(mean, half)
            score = score + longer @ _lengths(keys, half).mT
        return _scaled(score, slots.held[:, :, None]).amax(dim=2)


def _lengths(x: Tensor, half: int) -> Tensor:
    """Return the length of each rotated pair of dimensions [..., half]."""
    return torch.hypot(x[..., :half], x[..., half : 2 * half])


def _scaled(score: Tensor, among: Tensor) -> Tensor:
    """Subtract the mean and divide by the standard deviation over the slots, by head."""
    count = among.sum(dim=-1, keepdim=True).clamp_min(1)
    score = score.masked_fill(~among, 0.0)
    away = (score - score.sum(dim=-1, keepdim=True) / count).masked_fill(~among, 0.0)
    spread = (away.square().sum(dim=-1, keepdim=True) / count).sqrt()
    return away / spread.clamp_min(1e-6)
