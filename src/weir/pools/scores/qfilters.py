"""Q-filters: keys along the direction that all queries share stay.

Q-Filters (Godey et al. 2025, "Q-Filters: Leveraging QK Geometry for Efficient KV Cache
Compression", arXiv:2503.02812), section 3: how far a key points along the first right singular
vector of a head's queries says how much attention it gets on average. Of a group's heads, the mean
direction counts.
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
    """Keep the tokens whose keys point along the queries' common direction, each KV head its own.

    The authors take the direction from queries of a few texts, at their places, once and for all;
    here it is that of the last queries without rotation, asked at the next place.

    Attributes:
        n: how many tokens are kept.
        queries: from how many of the last queries the direction is.
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
    """The first right singular vector of queries [..., n, dim], towards them [..., dim]."""
    _, vectors = torch.linalg.eigh(queries.mT @ queries)
    first = vectors[..., -1]
    along = (queries @ first[..., None]).sum(dim=-2)
    return first * torch.where(along < 0, -1.0, 1.0)
