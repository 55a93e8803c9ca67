"""Clusterability of points: the radius that k centers need to cover them, beside a control.

SubGen (Zandieh et al. 2024), Definition 1: points are clusterable if few balls of a small radius
cover them. A radius by itself says nothing, since it grows with the points, their number and their
dimension; so it stands beside that of a control with the same coordinates, each put in an order of
its own. That keeps how every coordinate is spread and takes away what they have to do with each
other, which is all that makes a cluster.

Knows nothing about models: points are points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weir import kernels
from weir.errors import WeirError
from weir.pools import farthest_first

FEWEST = 8
"""Points for which there are three numbers of centers."""


@dataclass(frozen=True)
class Covering:
    """Covering radii of sets of points and of their controls, in units of the points' spread.

    Attributes:
        counts: how many centers, k.
        radius: of the points [sets, counts], float32.
        control: of the same points with every coordinate shuffled [sets, counts], float32.
    """

    counts: tuple[int, ...]
    radius: Tensor
    control: Tensor

    @property
    def score(self) -> Tensor:
        """The clusterability of each set [sets]: by which share its radii are smaller than those of
        the control, the mean over every k but 1, which measures the whole and no cluster.

        0: no more clusters than coordinates have that know nothing of each other. 1: no more
        different points than centers. Below 0: spread out more evenly than that.
        """
        several = [n for n, k in enumerate(self.counts) if k > 1]
        mine, other = self.radius[:, several], self.control[:, several]
        # Where the control needs no radius either there is nothing to compare.
        ratio = torch.where(other > 0, mine / other, torch.ones_like(mine))
        return (1 - ratio).mean(dim=1)


def doublings(points: int) -> tuple[int, ...]:
    """The numbers of centers for some points: 1, 2, 4, ... up to half of them.

    Raises:
        WeirError: there are too few points.
    """
    if points < FEWEST:
        raise WeirError(
            f"{points} tokens are too few to look for clusters; take a text of {FEWEST} or more"
        )
    return tuple(2**n for n in range((points // 2).bit_length()))


def cover(points: Tensor, seed: int = 0, counts: Sequence[int] | None = None) -> Covering:
    """The covering radii of sets of points, and of their controls.

    Memory beside the points: a copy of them, and n distances for each center, one set at a time.

    Args:
        points: [sets, n, dim].
        seed: of the control's order.
        counts: numbers of centers; None for `doublings`.

    Raises:
        WeirError: there are too few points, or fewer than centers.
    """
    points = points.float()
    counts = doublings(points.shape[1]) if counts is None else tuple(counts)
    # Shuffled coordinates have the same spread as they were: one unit for both.
    unit = spread(points)[:, None]
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    mine, other = points, shuffle_coordinates(points, seed)
    return Covering(
        counts, covering_radii(mine, counts) / unit, covering_radii(other, counts) / unit
    )


def spread(points: Tensor) -> Tensor:
    """The distance of points from their mean, as root mean square [sets]; points [sets, n, dim]."""
    return (points - points.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1).sqrt()


def shuffle_coordinates(points: Tensor, seed: int) -> Tensor:
    """Every coordinate of every set in an order of its own [sets, n, dim]."""
    draws = torch.rand(points.shape, generator=torch.Generator().manual_seed(seed % 2**63))
    return points.gather(1, draws.argsort(dim=1).to(points.device))


def centers(points: Tensor, k: int) -> Tensor:
    """Pick points by greedy k-center, starting from the first [sets, n], bool.

    The traversal of the pool `kcenter`: of the first k of more centers it picks the same.

    Args:
        points: [sets, n, dim].
        k: how many.

    Raises:
        WeirError: there are fewer points.
    """
    if not 1 <= k <= points.shape[1]:
        raise WeirError(f"{k} centers cannot be picked from {points.shape[1]} tokens")
    pick = kernels.farthest_first(points.device) or farthest_first
    among = torch.ones(1, *points.shape[:2], dtype=torch.bool, device=points.device)
    return pick(points[None], among, k)[0] >= 0


def covering_radii(points: Tensor, counts: Sequence[int]) -> Tensor:
    """The largest distance of a point from the nearest of k greedy centers [sets, counts].

    No choice of k centers at all has less than half of it (Gonzalez 1985).

    Args:
        points: [sets, n, dim].
        counts: each k.

    Raises:
        WeirError: a k is larger than n.
    """
    found = []
    for k in counts:
        picked = centers(points, k)
        found.append(
            [_radius(mine, mine[chosen]) for mine, chosen in zip(points, picked, strict=True)]
        )
    return torch.tensor(found).T.contiguous()


def _radius(points: Tensor, picked: Tensor) -> float:
    # From differences: a center is at a distance of exactly zero from itself.
    far = torch.cdist(points, picked, compute_mode="donot_use_mm_for_euclid_dist")
    return float(far.amin(dim=1).max())
