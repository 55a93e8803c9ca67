"""k centers: keep tokens whose keys are far apart, so that every other key is near one of them.

This is the method that the SubGen paper uses in its experiments (Zandieh et al. 2024, "SubGen:
Token Generation in Sublinear Time and Memory", arXiv:2402.06082, section 3.2). BalanceKV's paper
calls SubGen ClusterGen. In addition to the most recent tokens, the method keeps k centers, picked
from the other tokens by greedy k-center (the paper's reference [8]): start somewhere, then k - 1
times pick the key that is the farthest from all centers picked so far.

Five options are not in the paper: keeping neighbors of centers, distances weighted by use (which
needs the attention that tokens receive) and by age, replacing centers by newer keys near them, and
centers with less weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Annotated

import torch
from torch import Tensor

from weir import kernels
from weir.pools.base import MOST_WEIGHT, Fold, SizedPool, split
from weir.pools.parameters import Bounds, Count, Factor, Natural
from weir.pools.ranked import pool_neighbors, select_highest
from weir.pools.registry import pool
from weir.slab import Slots

LEAST_USE = 1e-6
"""Attention per query below which tokens count as equally unused."""
LEAST_AGED = 1e-12
"""The smallest factor of distances by age. It is above 0, so that only a key that equals a center
has a distance of 0.
"""


@pool("kcenter")
@dataclass(frozen=True)
class KCenter(SizedPool):
    """Keep k centers of the keys, separately for each KV head.

    The oldest token is the first center (the paper leaves it open), so the model's attention sink
    is kept. Keys are compared at their places in the stream, by Euclidean distance in float32.
    Among equally far keys, the oldest is picked; distances are equal if they differ only by
    rounding (`kernels.ALIKE`). The paper picks once, from a whole prompt. In a stream, centers are
    picked again at every fold, from those of the last fold and the arrivals since. Weights
    change only with `quiet`.

    Attributes:
        k: number of tokens to keep.
        spans: number of neighbors on each side to keep with a picked token, as far as they are
            available. They take slots, so fewer tokens are picked.
        use: distances of a token are multiplied by this power of the attention that it received per
            query since it arrived; 0 to ignore attention.
        fresh: a center is replaced by the newest token near it, if that is newer than the center; 0
            for never. Near means within this share of the radius, which is the distance within
            which every key has a center. The first center is never replaced. These distances are
            between keys without rotation.
        quiet: how much lower the log-weight of every center but the first is, once a token was
            evicted; 0 for unchanged weights.
        half_life: number of tokens after which the distances of a token have halved; none for
            never.
    """

    drops = True
    is_stochastic = False

    k: int
    spans: Natural = 0
    use: Factor = 0.0
    fresh: Annotated[float, Bounds(0, 1, without=1)] = 0.0
    quiet: Annotated[float, Bounds(0, MOST_WEIGHT)] = 0.0
    half_life: Count | None = None

    @property
    def needs_mass(self) -> bool:
        """Whether distances depend on use."""
        return self.use > 0

    @property
    def weighs(self) -> bool:
        """Whether centers have lower weights."""
        return self.quiet > 0

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make `full`, if centers have lower weights: whether a token was evicted [batch,
        kv_heads], bool.
        """
        if not self.quiet:
            return {}
        return {"full": torch.zeros_like(like.held.any(dim=2))}

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Pick centers again. The kept and the evicted tokens both have the oldest first."""
        if not self.quiet:
            return self._pick(fold.in_order(held, new), fold)
        # Evicted tokens leave with the weights they came with.
        both = fold.in_order(self._raise_weights(held, fold.state["full"], self.quiet), new)
        fold.state["full"] = fold.state["full"] | (both.held.sum(dim=2) > self.k)
        stays, rest = self._pick(both, fold)
        return self._raise_weights(stays, fold.state["full"], -self.quiet), rest

    def _raise_weights(self, slots: Slots, where: Tensor, by: float) -> Slots:
        """Add `by` to the log-weights of all slots except the oldest, in the heads that `where`
        marks [batch, kv_heads].
        """
        # The weight of an empty slot stays -inf.
        more = ((slots.held.cumsum(dim=2) > 1) & where[..., None]) * by
        return slots.weighed(slots.a + more, slots.b + more)

    def _pick(self, both: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Pick the centers of slots in order: (centers, overflow)."""
        if len(both) <= self.k:
            return split(both, both.held)
        pick = kernels.farthest_first(both.keys.device) or farthest_first
        weight = self._weight(both, fold) if self.use or self.half_life else None
        order = pick(both.keys, both.held, self.k, weight)
        stays = order >= 0
        if self.spans:
            # A neighbor comes right after the first center that brings it, the older neighbor
            # first.
            turn = (self.k - order).where(stays, 0)
            brought = pool_neighbors(turn, both.position, 2 * self.spans + 1, average=False)
            stays = select_highest(self.k, both.held, brought, (turn == brought).double())
        if self.fresh:
            # With rotation, no old key is near a new key.
            keys = both.keys if fold.read is None else fold.read.unrotated(both)
            stays = renew_centers(keys, both.held, stays, order == 0, self.fresh)
        return split(both, stays, fold)

    def _weight(self, slots: Slots, fold: Fold) -> Tensor:
        """Compute the factors of distances, by use or age or both, all above 0.

        They are [batch, kv_heads, slots], float32.
        """
        age = (fold.next[:, None, None] - slots.position).clamp_min(1).double()
        weights = []
        if self.use:
            assert slots.mass is not None
            weights.append((slots.mass.double() / age).clamp_min(LEAST_USE).pow(self.use))
        if self.half_life:
            weights.append(torch.exp2(-age / self.half_life).clamp_min(LEAST_AGED))
        least = torch.finfo(torch.float32).tiny
        return reduce(torch.mul, weights).clamp_min(least).float()


def farthest_first(keys: Tensor, among: Tensor, k: int, weight: Tensor | None = None) -> Tensor:
    """Pick keys by greedy k-center, starting from the first. This is the reference of the kernel.

    Args:
        keys: [batch, kv_heads, n, key_dim].
        among: the keys to pick from [batch, kv_heads, n], bool.
        k: number of keys to pick, at most n; if there are fewer keys, all are picked.
        weight: the factor of each key's distances [batch, kv_heads, n], float32, above 0.

    Returns:
        The number of each key's pick from 0 on [batch, kv_heads, n], int64; -1 for no pick.
    """
    keys = keys.float()
    order = torch.full(among.shape, -1, device=keys.device)
    # Distance to the nearest center: infinite before there is one, and below zero once picked.
    far = torch.where(among, torch.inf, -1.0)
    for number in range(k):
        largest = far.amax(dim=2, keepdim=True)
        # Among equal ones, the first.
        at = (far >= largest * (1 - kernels.ALIKE)).to(torch.uint8).argmax(dim=2, keepdim=True)
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
    """Replace each center with the newest key that is near it, and return which keys are centers
    [batch, kv_heads, n], bool.

    Keys are in order, the oldest first. `among` says which exist, `stays` which are centers, and
    `first` which of these are not replaced. Near means within a `share` of the largest distance of
    a key to its nearest center.
    """
    keys = keys.float()
    far, nearest = _distance(keys, keys).masked_fill(~stays[:, :, None], torch.inf).min(dim=3)
    rest = among & ~stays
    radius = far.masked_fill(~rest, 0.0).amax(dim=2, keepdim=True)
    place = torch.arange(keys.shape[2], device=keys.device).expand_as(nearest)
    near = rest & (far <= share * radius) & (place > nearest) & ~first.gather(2, nearest)
    # For each center, the newest key near it, or the center itself.
    newest = place.scatter_reduce(2, nearest, place.where(near, -1), "amax")
    return torch.zeros_like(place).scatter_reduce(2, newest, stays.long(), "amax") > 0


def _distance(keys: Tensor, centers: Tensor) -> Tensor:
    """Compute Euclidean distances from differences, so that equal keys have a distance of exactly
    zero.
    """
    return torch.cdist(keys, centers, compute_mode="donot_use_mm_for_euclid_dist")
