"""Short keys stay: the tokens that draw attention are those whose keys are short.

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
    """Keep the tokens with the shortest keys, each KV head its own.

    Attributes:
        n: how many tokens are kept.
    """

    n: int

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """The length of each key [batch, kv_heads, slots], negative: the shortest is the best."""
        return -slots.keys.float().norm(dim=-1)
