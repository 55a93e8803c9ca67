"""Q-filters: keep keys in the direction that all queries share.

Q-Filters (Godey et al. 2025, "Q-Filters: Leveraging QK Geometry for Efficient KV Cache
Compression", arXiv:2503.02812), section 3: how far a key points along the first right singular
vector of a head's queries tells how much attention it gets on average. For a group of heads, the
mean direction is used.
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
    keys_as_read,
    last_unrotated_queries,
    mean_rotation,
    rotate_back,
)
from weir.slab import Slots


@pool("qfilters")
@dataclass(frozen=True)
class QFilters(Asking):
    """Keep the tokens whose keys point along the queries' common direction, separately for each KV
    head.

    The authors compute the direction once, from the rotated queries of a few texts. Here, it is
    computed from the last queries without rotation, and then rotated to the next place.

    Attributes:
        n: number of tokens to keep.
        queries: how many of the last queries give the direction.
    """

    asks = "queries"

    n: int
    queries: Count = 64

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the length of each key along the direction [batch, kv_heads, slots], float64."""
        queries, _ = last_unrotated_queries(fold, self.queries)
        filters = common_direction(queries.double()).mean(dim=2)
        keys = rotate_back(keys_as_read(slots, fold), mean_rotation(fold, [0]))
        return (keys.double() @ filters[..., None])[..., 0]


def common_direction(queries: Tensor) -> Tensor:
    """Return the first right singular vector of queries [..., n, dim], pointing towards them [...,
    dim].
    """
    _, vectors = torch.linalg.eigh(queries.mT @ queries)
    first = vectors[..., -1]
    along = (queries @ first[..., None]).sum(dim=-2)
    return first * torch.where(along < 0, -1.0, 1.0)
