"""k centres: tokens whose keys lie far apart stay, and every other key is near one of them.

SubGen (Zandieh et al. 2024), section 3.2, what its experiments run and BalanceKV calls ClusterGen:
beside the most recent tokens, keep k centres picked from the rest by greedy k-center, also called
farthest-first traversal (the paper's reference [8]). Start somewhere, then pick the key that is the
farthest from all centres picked so far, k - 1 times. No choice of k centres at all covers the keys
within less than half the radius of this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir import kernels
from weir.errors import WeirError
from weir.pools.base import Fold, Pool, split
from weir.pools.registry import pool
from weir.slab import Slots


@pool("kcenter")
@dataclass(frozen=True)
class KCenter(Pool):
    """Keep k centres of the keys, each KV head its own.

    The oldest token is the first centre (the paper does not say which is), so what the model uses
    as its attention sink stays. Keys are compared as the attention sees them at their own place in
    the stream, by Euclidean distance in float32; of equally far ones the oldest is picked. The
    paper picks once, from a whole prompt; in a stream, centres are picked anew at every fold, from
    those of the last fold and what has arrived since. Weights stay as they came.

    Attributes:
        k: how many tokens are kept.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise WeirError(f"kcenter keeps at least 1 token, not {self.k}")

    @property
    def has_chance(self) -> bool:
        """It draws nothing."""
        return False

    def slots(self) -> int:
        """As many slots as there are centres."""
        return self.k

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Pick centres anew; both what stays and what flows on lie from the oldest token on."""
        both = fold.in_order(held, new)
        stays = both.held
        if len(both) > self.k:
            pick = kernels.farthest_first(both.keys.device) or farthest_first
            stays = pick(both.keys, both.held, self.k)
        return split(both, stays)


def farthest_first(keys: Tensor, among: Tensor, k: int) -> Tensor:
    """Which keys greedy k-center picks, starting from the first [batch, kv_heads, n], bool.

    Each pick needs the one before it, so this is a loop over k; all heads and rows go together.
    This is what the kernel must equal.
    Where there are no more than k keys, all of them are picked.

    Args:
        keys: [batch, kv_heads, n, key_dim].
        among: those there are to pick from [batch, kv_heads, n], bool.
        k: how many are picked, at most n.
    """
    keys = keys.float()
    picked = torch.zeros_like(among)
    # Distance to the nearest centre: infinite before there is one, and below zero once picked.
    far = torch.where(among, torch.inf, -1.0)
    for _ in range(k):
        at = far.argmax(dim=2, keepdim=True)  # of equal ones the first
        picked.scatter_(2, at, True)
        centre = keys.gather(2, at[..., None].expand(-1, -1, 1, keys.shape[3]))
        far = far.minimum(_distance(keys, centre)[..., 0])
        far = far.scatter(2, at, -1.0)
    return picked & among


def _distance(keys: Tensor, centres: Tensor) -> Tensor:
    """Euclidean distances, from differences: equal keys are at a distance of exactly zero."""
    return torch.cdist(keys, centres, compute_mode="donot_use_mm_for_euclid_dist")
