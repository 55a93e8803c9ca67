"""Distinct keys stay: those that point least where all keys point on average.

KeyDiff (Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM
Inference in Resource-Constrained Environments", arXiv:2504.15364), section 3: the anchor is the
mean of the keys' directions, and the keys of the highest cosine with it are evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.ranked import Ranked
from weir.pools.registry import pool
from weir.pools.scores.last_queries import keys_as_read
from weir.slab import Slots


@pool("keydiff")
@dataclass(frozen=True)
class KeyDiff(Ranked):
    """Keep the tokens whose keys differ most from the average direction, each KV head its own.

    Keys are compared as attention reads them, as they lie in the paper's cache; the average is over
    the tokens that the pool holds and those that arrive at it.

    Attributes:
        n: how many tokens are kept.
    """

    n: int

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """The cosine of each key with the anchor [batch, kv_heads, slots], negative."""
        keys = keys_as_read(slots, fold)
        return -F.cosine_similarity(keys, anchor(keys, slots.held), dim=-1)


def anchor(keys: Tensor, among: Tensor) -> Tensor:
    """The sum of the directions of keys `among` some [batch, kv_heads, 1, key_dim], float32."""
    return F.normalize(keys, dim=-1).masked_fill(~among[..., None], 0.0).sum(dim=2, keepdim=True)
