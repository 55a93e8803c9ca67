"""The attention expected from later queries, assumed to be like the last ones.

Expected Attention (Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating
Attention from Future Queries Distribution", arXiv:2510.00636), section 3: queries without their
rotation are assumed to be Gaussian, with the mean and covariance of past queries. With the mean
rotation R over the next places, the expected e^logit of a key k is e^(k'R mu scale + k'R Sigma R'k
scale^2 / 2). The share of a key in the sum of these, times the length of its value, is the score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Count, Factor
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


@pool("expected")
@dataclass(frozen=True)
class Expected(Asking):
    """Keep the tokens with the most expected attention, times |v|, separately for each KV head.

    Expected attention is a share of attention among the tokens that the pool holds and those that
    arrive, averaged over the query heads of the group. It ignores the capping of logits, but
    includes linear biases.

    Attributes:
        n: number of tokens to keep.
        ahead: number of places, from the next one on, over which the rotation is averaged; 512 in
            the authors' code.
        queries: how many of the last queries give mean and covariance.
        covariance: whether the covariance counts, or only the mean.
        floor: added to shares, so that large values are not overlooked; at most 0.02 in the
            authors' runs.
    """

    asks = "queries"

    n: int
    ahead: Ahead = 64
    queries: Count = 64
    covariance: bool = True
    floor: Factor = 0.0

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the logarithm of expected share times length of value [batch, kv_heads, slots]."""
        queries, there = last_unrotated_queries(fold, self.queries)
        mean, count = mean_query(queries, there)
        keys = rotate_back(keys_as_read(slots, fold), mean_rotation(fold, range(self.ahead)))
        scale = fold.form.scale
        logits = scale * mean @ keys.mT
        if self.covariance:
            away = (queries - mean[:, :, :, None]) * there[:, None, None, :, None]
            # k' Sigma k is the mean square of k along the queries' deviations.
            along = (away @ keys.mT[:, :, None]).square().sum(dim=3)
            logits = logits + scale**2 / 2 * along / count
        if fold.alibi is not None:
            place = fold.observed.places(slots)
            bias = fold.alibi.bias(place, place.shape[1], 0, fold.next[:, None, None])
            logits = logits + bias[:, :, :, 0]
        share = logits.masked_fill(~slots.held[:, :, None], -torch.inf).log_softmax(dim=-1)
        mean = share.logsumexp(dim=2) - math.log(share.shape[2])
        if self.floor:
            mean = mean.logaddexp(mean.new_tensor(math.log(self.floor)))
        score = mean + slots.values.float().norm(dim=-1).log()
        return score.clamp_min(torch.finfo(score.dtype).min)  # a value of length 0 comes last
