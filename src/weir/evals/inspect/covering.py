"""Clusterability of points: the radius that k centers need to cover them, against a control.

SubGen (Zandieh et al. 2024), Definition 1: points are clusterable if few balls of a small radius
cover them. A radius alone says nothing, since it grows with the points' scale, number and
dimension. So it is compared with a control: the same points with every coordinate shuffled
independently. That keeps the distribution of every coordinate and removes the dependence between
them, which is what makes clusters.

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
        counts: numbers of centers, k.
        radius: covering radii of the points [sets, counts], float32.
        control: covering radii of the same points with every coordinate shuffled [sets, counts],
            float32.
    """

    counts: tuple[int, ...]
    radius: Tensor
    control: Tensor

    @property
    def score(self) -> Tensor:
        """The clusterability [sets]: by which share a set's radii are smaller than the control's;
        the mean over every k but 1, which measures no clusters.

        0: no more clustered than independent coordinates. 1: at most as many different points as
        centers. Below 0: more evenly spread than independent coordinates.
        """
        several = [n for n, k in enumerate(self.counts) if k > 1]
        mine, other = self.radius[:, several], self.control[:, several]
        # If the control's radius is zero too, there is nothing to compare.
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


def cover(points: Tensor, seed: int = 0) -> Covering:
    """The covering radii of sets of points [sets, n, dim], and of their shuffled controls.

    Memory beside the points: a copy of them, and n distances for each center, one set at a time.

    Raises:
        WeirError: there are too few points.
    """
    points = points.float()
    counts = doublings(points.shape[1])
    # Shuffling does not change the spread: one unit for both.
    unit = spread(points)[:, None]
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    other = shuffle_coordinates(points, seed)
    return Covering(counts, *(covering_radii(each, counts) / unit for each in (points, other)))


def spread(points: Tensor) -> Tensor:
    """Root mean square distance [sets] of points [sets, n, dim] from their mean."""
    return (points - points.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1).sqrt()


def shuffle_coordinates(points: Tensor, seed: int) -> Tensor:
    """Shuffle every coordinate of every set independently [sets, n, dim]."""
    draws = torch.rand(points.shape, generator=torch.Generator().manual_seed(seed % 2**63))
    return points.gather(1, draws.argsort(dim=1).to(points.device))


def centers(points: Tensor, k: int) -> Tensor:
    """Pick k of points [sets, n, dim] by greedy k-center, starting from the first [sets, n].

    This is the traversal of the pool `kcenter`: the first k of more centers are the same.

    Raises:
        WeirError: there are fewer points.
    """
    if not 1 <= k <= points.shape[1]:
        raise WeirError(f"{k} centers cannot be picked from {points.shape[1]} tokens")
    pick = kernels.farthest_first(points.device) or farthest_first
    among = torch.ones(1, *points.shape[:2], dtype=torch.bool, device=points.device)
    return pick(points[None], among, k)[0] >= 0


def covering_radii(points: Tensor, counts: Sequence[int]) -> Tensor:
    """The largest distance of points [sets, n, dim] from the nearest of k greedy centers.

    No choice of k centers has less than half of this radius (Gonzalez 1985).

    Returns:
        For each k of `counts` [sets, counts].

    Raises:
        WeirError: a k is larger than n.
    """
    found = []
    for k in counts:
        for mine, picked in zip(points, centers(points, k), strict=True):
            # Computed from differences, so that a center's distance from itself is exactly zero.
            far = torch.cdist(mine, mine[picked], compute_mode="donot_use_mm_for_euclid_dist")
            found.append(float(far.amin(dim=1).max()))
    return torch.tensor(found).view(len(counts), -1).T.contiguous()
