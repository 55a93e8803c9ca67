"""Distinct keys: keep those that point least in the average direction of all keys.

KeyDiff (Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM
Inference in Resource-Constrained Environments", arXiv:2504.15364), section 3: the anchor is the
mean of the keys' directions, and the keys with the highest cosine with it are evicted.
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
    """Keep the tokens whose keys differ most from the average direction, separately for each KV
    head.

    Keys are compared as attention reads them, which is how the paper's cache stores them. The
    average is over the tokens that the pool holds and those that arrive.

    Attributes:
        n: number of tokens to keep.
    """

    n: int

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the cosine of each key with the anchor [batch, kv_heads, slots], negated."""
        keys = keys_as_read(slots, fold)
        return -F.cosine_similarity(keys, anchor(keys, slots.held), dim=-1)


def anchor(keys: Tensor, among: Tensor) -> Tensor:
    """Return the sum of the directions of the keys that `among` marks [batch, kv_heads, 1,
    key_dim], float32. Their mean has the same direction.
    """
    return F.normalize(keys, dim=-1).masked_fill(~among[..., None], 0.0).sum(dim=2, keepdim=True)
