"""Keep important tokens, unless a newer token has a similar key.

R-KV (Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models",
arXiv:2505.24133), section 3, and its released code: a token's attention from the last queries,
pooled over its neighbors, is weighed against the average similarity of its key to all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Cosine, Count, Kernel, Share
from weir.pools.ranked import Asking, pool_neighbors
from weir.pools.registry import pool
from weir.pools.scores.last_queries import keys_as_read
from weir.slab import Slots

ROWS = 512
"""Number of keys compared with all others at a time."""


@pool("rkv")
@dataclass(frozen=True)
class RKV(Asking):
    """Keep tokens by weight * attention - (1 - weight) * redundancy, separately for each KV head.

    Redundancy is a share that sums to 1 over all tokens. Attention is a share, too, before it is
    pooled over neighbors: it sums to 1 over all tokens except those of the last `window` queries.
    The tokens of these queries are kept if they arrive here. Keys are compared as attention reads
    them.

    Attributes:
        n: number of tokens to keep.
        window: how many of the last queries are used; their tokens are kept.
        kernel: number of neighboring places in the stream over which the largest attention is
            taken; odd.
        weight: weight of attention; 0.1 in the paper.
        alike: the cosine above which keys are similar, so that an older token is redundant.
    """

    n: int
    window: Count = 8
    kernel: Kernel = 7
    weight: Share = 0.1
    alike: Cosine = 0.5

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return attention minus redundancy [batch, kv_heads, slots], float64."""
        inside = slots.position >= fold.next[:, None, None] - self.window
        others = slots.held & ~inside
        attention = pool_neighbors(
            self._attention(slots, fold, others), slots.position, self.kernel, average=False
        )
        redundancy = redundant(keys_as_read(slots, fold), slots.held, self.alike)
        score = self.weight * attention - (1 - self.weight) * redundancy
        return score.masked_fill(inside, torch.inf)

    def _attention(self, slots: Slots, fold: Fold, among: Tensor) -> Tensor:
        """Return the softmax of the largest logit in the group, over the tokens `among`.

        It is the mean over the window [batch, kv_heads, slots]; 0 for all other tokens.
        """
        largest = self.logits(slots, fold).amax(dim=2)
        largest = largest.masked_fill(~among[:, :, None], -torch.inf)
        # A query that sees none of these tokens adds nothing.
        return largest.softmax(dim=-1).nan_to_num(nan=0.0).mean(dim=2)


def redundant(keys: Tensor, among: Tensor, alike: float) -> Tensor:
    """Compute the mean cosine of each key with all keys, as a softmax [batch, kv_heads, n].

    Keys are in order from the oldest on; `among` says which count. In the mean, a key's cosine with
    itself counts as 0. Two keys are similar if their cosine is above `alike`. In the mean of a key,
    the keys for which it is the newest similar key also count as 0. So the newest of several
    similar keys is not redundant.
    """
    keys = F.normalize(keys, dim=-1).masked_fill(~among[..., None], 0.0)
    place = torch.arange(keys.shape[2], device=keys.device)
    total = keys.new_zeros(keys.shape[:3], dtype=torch.float64)
    for start in range(0, keys.shape[2], ROWS):
        these = slice(start, start + ROWS)
        cosine = keys[:, :, these] @ keys.mT
        itself = place[these, None] == place
        there = among[:, :, these, None] & among[:, :, None] & ~itself
        newest = torch.where(there & (cosine > alike), place, -1).amax(dim=-1, keepdim=True)
        cosine = cosine.masked_fill(~there | (place == newest), 0.0)
        total += cosine.double().sum(dim=2)
    mean = total / among.sum(dim=2, keepdim=True).clamp_min(1)
    return mean.masked_fill(~among, -torch.inf).softmax(dim=-1)
