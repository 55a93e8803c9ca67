"""Points that lie near each other become one, until few are left: Ward's rule, pairs at a time.

Ward (1963, "Hierarchical Grouping to Optimize an Objective Function"): two groups of weights v and
w whose means lie apart by d add v w / (v + w) d^2 to the sum of squares around means when they are
joined. Knows nothing about keys, queries or slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.slab import Slots

LEAST = 1e-300
"""Weights below are as good as none."""
ALIKE = 1e-12
"""Points are equal whose squared distance is no more of their squared lengths: keys come in float32
at best, and what rounding says of equal ones must not decide.
"""


def merge_nearest(points: Tensor, weight: Tensor, among: Tensor, most: int) -> Tensor:
    """Join points until few groups are left.

    In each round the groups that are nearest to each other, both to both, are joined, those first
    that cost least by Ward's rule, until no more than `most` are left. Of equal costs the earlier
    points' counts.

    Args:
        points: finite [batch, heads, n, dim].
        weight: from 0 on [batch, heads, n], float64.
        among: which of the points there are [batch, heads, n], bool.
        most: groups that may be left.

    Returns:
        The first point of the group of each point [batch, heads, n], int64.
    """
    n = among.shape[2]
    step = torch.arange(n, device=points.device)
    group = step.expand(among.shape)
    first = among
    mean = points.double()
    while True:
        excess = first.sum(dim=2, keepdim=True) - most
        if not bool((excess > 0).any()):
            return group
        cost = _costs(mean, weight).masked_fill(~(first[..., None] & first[:, :, None]), torch.inf)
        cost = cost.masked_fill(step[:, None] == step, torch.inf)
        least, nearest = cost.min(dim=3)
        mutual = (nearest.gather(2, nearest) == step) & (step < nearest) & first
        rank = least.masked_fill(~mutual, torch.inf).argsort(dim=2, stable=True).argsort(dim=2)
        takes = mutual & (rank < excess)
        theirs = weight.gather(2, nearest)
        share = theirs / (weight + theirs).clamp_min(LEAST)
        other = mean.gather(2, nearest[..., None].expand_as(mean))
        mean = torch.where(takes[..., None], torch.lerp(mean, other, share[..., None]), mean)
        weight = torch.where(takes, weight + theirs, weight)
        # Where each group goes; those that take nobody name a place beyond the last.
        goes = F.pad(step.expand(among.shape), (0, 1))
        goes = goes.scatter(2, nearest.where(takes, n), step.expand(among.shape))[:, :, :n]
        first = first & (goes == step)
        group = goes.gather(2, group)


def _costs(mean: Tensor, weight: Tensor) -> Tensor:
    """Compute the cost of joining two groups [batch, heads, n, n], finite and exactly symmetric.

    Otherwise three groups that are equally near could each be nearest to the next.
    """
    square = mean.square().sum(dim=3)
    squares = square[..., None] + square[:, :, None]
    product = mean @ mean.transpose(2, 3)
    far = squares - (product + product.transpose(2, 3))
    far = far.masked_fill(far <= ALIKE * squares, 0.0)
    both = weight[..., None] + weight[:, :, None]
    return far * (weight[..., None] * weight[:, :, None] / both.clamp_min(LEAST))


@dataclass(frozen=True)
class Groups:
    """The groups of slots.

    Attributes:
        home: for each slot, that of its group's newest member [batch, kv_heads, n], int64.
        stays: which slots are such homes [batch, kv_heads, n], bool.
        member: whether a slot is in the group of another [batch, kv_heads, n, homes n], bool.
    """

    home: Tensor
    stays: Tensor
    member: Tensor

    @classmethod
    def of(cls, group: Tensor, slots: Slots) -> Groups:
        """Groups by numbers from 0 to n [batch, kv_heads, n], of those slots that hold a token."""
        step = torch.arange(group.shape[2], device=group.device)
        together = (group[..., None] == step) & slots.held[..., None]
        newest = slots.position[..., None].where(together, -1).argmax(dim=2)
        home = newest.gather(2, group)
        return cls(
            home, (home == step) & slots.held, (home[..., None] == step) & slots.held[..., None]
        )

    @property
    def several(self) -> Tensor:
        """The homes with more than one member [batch, kv_heads, n], bool."""
        return self.member.sum(dim=2) > 1

    def total(self, log: Tensor) -> Tensor:
        """Logarithms of sums, from logarithms, both [batch, kv_heads, n]; -inf where not home."""
        return log[..., None].where(self.member, -torch.inf).logsumexp(dim=2)

    def mean(self, x: Tensor, log: Tensor) -> Tensor:
        """Means of `x` [batch, kv_heads, n, dim] by weights whose logarithms these are; in float32.

        Zero where not home, and for a group without weight.
        """
        total = self.total(log)
        share = log[..., None] - total.masked_fill(total.isneginf(), 0.0)[:, :, None]
        return share.exp().where(self.member, 0.0).transpose(2, 3) @ x.float()

    def home_of(self, x: Tensor) -> Tensor:
        """To each slot the row of `x` [batch, kv_heads, n, dim] that its group's home has."""
        return x.gather(2, self.home[..., None].expand_as(x))
