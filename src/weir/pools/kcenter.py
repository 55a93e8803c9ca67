"""k centers: tokens whose keys lie far apart stay, and every other key is near one of them.

SubGen (Zandieh et al. 2024), section 3.2, what its experiments run and BalanceKV calls ClusterGen:
beside the most recent tokens, keep k centers picked from the rest by greedy k-center, also called
farthest-first traversal (the paper's reference [8]). Start somewhere, then pick the key that is the
farthest from all centers picked so far, k - 1 times. No choice of k centers at all covers the keys
within less than half the radius of this one.

What the paper does not have are five options: neighbors that come along, distances weighed by use
and by age, centers that make way for newer keys like theirs, and centers that count less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from weir import kernels
from weir.errors import WeirError
from weir.pools.base import MOST_WEIGHT, Fold, Pool, split
from weir.pools.ranked import pool_neighbors, select_highest
from weir.pools.registry import pool
from weir.slab import Slots

LEAST_USE = 1e-6
"""Attention by query below which tokens count as equally unused."""
LEAST_AGED = 1e-12
"""What is left of distances at any age; zero would be that of a key that is there already."""


@pool("kcenter")
@dataclass(frozen=True)
class KCenter(Pool):
    """Keep k centers of the keys, each KV head its own.

    The oldest token is the first center (the paper does not say which is), so what the model uses
    as its attention sink stays. Keys are compared as the attention sees them at their own place in
    the stream, by Euclidean distance in float32; of equally far ones the oldest is picked. The
    paper picks once, from a whole prompt; in a stream, centers are picked anew at every fold, from
    those of the last fold and what has arrived since. Weights stay as they came.

    Attributes:
        k: how many tokens are kept.
        spans: a token that is picked brings so many neighbors on each side along, as far as they
            are there; fewer are picked then.
        use: distances are multiplied by the attention a token received, by query since it came, to
            this power: 0 for none.
        fresh: a center makes way for the newest of the tokens that are nearer to it than this share
            of the radius, the distance within which every key has a center; 0 for never. The first
            center makes no way. These distances are of keys without rotation.
        quiet: once a token had to go, every center but the first counts e^-quiet; 0 for as it came.
        half_life: distances of a token halve whenever so many more have been read; none for never.
    """

    k: int
    spans: int = 0
    use: float = 0.0
    fresh: float = 0.0
    quiet: float = 0.0
    half_life: int | None = None

    def __post_init__(self) -> None:
        if self.k < 1:
            raise WeirError(f"kcenter keeps at least 1 token, not {self.k}")
        if self.spans < 0:
            raise WeirError(f"a center brings 0 neighbors or more a side, not {self.spans}")
        if not 0 <= self.use < math.inf:
            raise WeirError(f"use weighs in kcenter with a power from 0 on, not {self.use:g}")
        if not 0 <= self.fresh < 1:
            raise WeirError(
                f"fresh is a share of the radius of kcenter from 0 to less than 1, not "
                f"{self.fresh:g}"
            )
        if not 0 <= self.quiet <= MOST_WEIGHT:
            raise WeirError(
                f"quiet is what the log-weight of a center of kcenter is lower, 0 to "
                f"{MOST_WEIGHT:g}, not {self.quiet:g}"
            )
        if self.half_life is not None and self.half_life < 1:
            raise WeirError(
                f"distances of kcenter halve after 1 token or more, not {self.half_life}; without "
                "half_life they never do"
            )

    @property
    def needs_mass(self) -> bool:
        """Where use weighs."""
        return self.use > 0

    @property
    def is_stochastic(self) -> bool:
        """It draws nothing."""
        return False

    def slots(self) -> int:
        """As many slots as there are centers."""
        return self.k

    @property
    def weighs(self) -> bool:
        """Where centers are quiet."""
        return self.quiet > 0

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Where centers are quiet, `full`: whether a token had to go [batch, kv_heads], bool."""
        if not self.quiet:
            return {}
        return {"full": torch.zeros_like(like.held.any(dim=2))}

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Pick centers anew; both what stays and what flows on lie from the oldest token on."""
        if not self.quiet:
            return self._picked(fold.in_order(held, new), fold)
        # What has to go flows on with the weight it came with.
        both = fold.in_order(self._louder(held, fold.state["full"], self.quiet), new)
        fold.state["full"] = fold.state["full"] | (both.held.sum(dim=2) > self.k)
        stays, rest = self._picked(both, fold)
        return self._louder(stays, fold.state["full"], -self.quiet), rest

    def _louder(self, slots: Slots, where: Tensor, by: float) -> Slots:
        """Slots from the oldest on, the log-weights of all but the first of them raised.

        Args:
            slots: what the pool holds.
            where: in which heads [batch, kv_heads], bool.
            by: so much; below 0 they are lowered.
        """
        # That of an empty slot stays -inf, whatever is added.
        more = ((slots.held.cumsum(dim=2) > 1) & where[..., None]) * by
        return slots.weighed(slots.a + more, slots.b + more)

    def _picked(self, both: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Of slots from the oldest on, the centers, and what flows on."""
        if len(both) <= self.k:
            return split(both, both.held)
        pick = kernels.farthest_first(both.keys.device) or farthest_first
        weight = self._weight(both, fold) if self.use or self.half_life else None
        order = pick(both.keys, both.held, self.k, weight)
        stays = order >= 0
        if self.spans:
            # A neighbor comes right after the first center that brings it, the older one first.
            turn = (self.k - order).where(stays, 0)
            brought = pool_neighbors(turn, both.position, 2 * self.spans + 1, average=False)
            stays = select_highest(self.k, both.held, brought, (turn == brought).double())
        if self.fresh:
            # With rotation nothing said long ago is like what is said now.
            keys = both.keys if fold.read is None else fold.read.unrotated(both)
            stays = renew_centers(keys, both.held, stays, order == 0, self.fresh)
        return split(both, stays, fold)

    def _weight(self, slots: Slots, fold: Fold) -> Tensor:
        """What distances are multiplied by [batch, kv_heads, slots], float32, above 0; by use or by
        age or both.
        """
        age = (fold.next[:, None, None] - slots.position).clamp_min(1).double()
        weights = []
        if self.use:
            assert slots.mass is not None
            weights.append((slots.mass.double() / age).clamp_min(LEAST_USE).pow(self.use))
        if self.half_life:
            weights.append(torch.exp2(-age / self.half_life).clamp_min(LEAST_AGED))
        return reduce(torch.mul, weights).float()


def farthest_first(keys: Tensor, among: Tensor, k: int, weight: Tensor | None = None) -> Tensor:
    """In which order greedy k-center picks keys, starting from the first [batch, kv_heads, n].

    Each pick needs the one before it, so this is a loop over k; all heads and rows go together.
    This is what the kernel must equal.
    Where there are no more than k keys, all of them are picked.

    Args:
        keys: [batch, kv_heads, n, key_dim].
        among: those there are to pick from [batch, kv_heads, n], bool.
        k: how many are picked, at most n.
        weight: what the distances of each key are multiplied by [batch, kv_heads, n], float32,
            above 0; None for 1.

    Returns:
        The number of each key's pick from 0 on, int64; -1 where it is not picked.
    """
    keys = keys.float()
    order = torch.full(among.shape, -1, device=keys.device)
    # Distance to the nearest center: infinite before there is one, and below zero once picked.
    far = torch.where(among, torch.inf, -1.0)
    for number in range(k):
        at = far.argmax(dim=2, keepdim=True)  # of equal ones the first
        left = far.gather(2, at) >= 0
        order.scatter_(2, at, torch.where(left, number, order.gather(2, at)))
        center = keys.gather(2, at[..., None].expand(-1, -1, 1, keys.shape[3]))
        distance = _distance(keys, center)[..., 0]
        far = far.minimum(distance if weight is None else distance * weight)
        far = far.scatter(2, at, -1.0)
    return order


def renew_centers(
    keys: Tensor, among: Tensor, stays: Tensor, first: Tensor, share: float
) -> Tensor:
    """Centers, each in the place of the newest key that is near to it [batch, kv_heads, n], bool.

    Args:
        keys: from the oldest on [batch, kv_heads, n, key_dim].
        among: where there is a key [batch, kv_heads, n], bool.
        stays: the centers [batch, kv_heads, n], bool.
        first: of them those that make no way [batch, kv_heads, n], bool.
        share: near is within this part of the largest distance of a key to its nearest center. A
            key that is near to several makes way for none but the nearest, of equal ones the
            oldest.
    """
    keys = keys.float()
    far, nearest = _distance(keys, keys).masked_fill(~stays[:, :, None], torch.inf).min(dim=3)
    rest = among & ~stays
    radius = far.masked_fill(~rest, 0.0).amax(dim=2, keepdim=True)
    place = torch.arange(keys.shape[2], device=keys.device).expand_as(nearest)
    near = rest & (far <= share * radius) & (place > nearest) & ~first.gather(2, nearest)
    # Who stands in each place: the newest key near it, or what stood there.
    newest = place.scatter_reduce(2, nearest, place.where(near, -1), "amax")
    return torch.zeros_like(place).scatter_reduce(2, newest, stays.long(), "amax") > 0


def _distance(keys: Tensor, centers: Tensor) -> Tensor:
    """Euclidean distances, from differences: equal keys are at a distance of exactly zero."""
    return torch.cdist(keys, centers, compute_mode="donot_use_mm_for_euclid_dist")
