"""Short keys: keep them, because tokens with short keys draw attention.

Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
arXiv:2406.11430, section 3: the lower the L2 norm of a cached key, the more attention it gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.pools.base import Fold
from weir.pools.ranked import Ranked
from weir.pools.registry import pool
from weir.slab import Slots


@pool("knorm")
@dataclass(frozen=True)
class KNorm(Ranked):
    """Keep the tokens with the shortest keys, separately for each KV head.

    Attributes:
        n: number of tokens to keep.
    """

    n: int

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the length of each key [batch, kv_heads, slots], negated, so that the shortest is
        best.
        """
        return -slots.keys.float().norm(dim=-1)
