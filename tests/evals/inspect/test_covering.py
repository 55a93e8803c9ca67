"""Covering radii and the clusterability number: by brute force, by hand, on planted clusters."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from weir.errors import WeirError
from weir.evals.inspect.keys import (
    Covering,
    centers,
    cover,
    covering_radii,
    doublings,
    shuffle_coordinates,
    spread,
)


def draw(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def planted(sets: int, n: int, dim: int, clusters: int, width: float) -> Tensor:
    """Points around a few places, in turns."""
    middles = draw(sets, clusters, dim, seed=1)
    which = torch.arange(n) % clusters
    return middles[:, which] + width * draw(sets, n, dim, seed=2)


def naive_radius(points: list[list[float]], k: int) -> float:
    """Greedy k-center as it is told: begin with the first, then again and again the farthest."""

    def distance(x: list[float], y: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) ** 0.5

    picked = [points[0]]
    for _ in range(k - 1):
        picked.append(max(points, key=lambda x: min(distance(x, c) for c in picked)))
    return max(min(distance(x, c) for c in picked) for x in points)


def test_radii_are_those_of_the_greedy_loop_for_each_head():
    points = draw(3, 30, 5)
    counts = (1, 2, 3, 8, 15, 29)
    wanted = [[naive_radius(mine.double().tolist(), k) for k in counts] for mine in points]
    torch.testing.assert_close(covering_radii(points, counts), torch.tensor(wanted))


def test_radii_by_hand():
    line = torch.tensor([[[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]]])
    # From 0 the farthest is 12; then each side is covered within 2; 2 and 10 are the next.
    assert covering_radii(line, (1, 2, 3, 4, 6)).tolist() == [[12.0, 2.0, 2.0, 1.0, 0.0]]
    assert centers(line, 3)[0].nonzero().flatten().tolist() == [0, 2, 5]


def test_no_choice_of_centers_has_less_than_half_the_radius():
    points = draw(1, 12, 3)
    got = float(covering_radii(points, (3,)))
    best = min(
        float(torch.cdist(points[0], points[0, list(chosen)]).amin(dim=1).max())
        for chosen in combinations(range(12), 3)
    )
    assert best <= got <= 2 * best


def test_the_control_keeps_every_coordinate_and_loses_what_they_have_in_common():
    x = draw(2, 500, 1)
    points = torch.cat([x, x, x], dim=2)  # three coordinates that are one
    other = shuffle_coordinates(points, seed=3)
    for mine, its in zip(points.mT.flatten(0, 1), other.mT.flatten(0, 1), strict=True):
        assert not torch.equal(mine, its)
        assert torch.equal(mine.sort().values, its.sort().values)
    for its in other:
        correlated = torch.corrcoef(its.T) - torch.eye(3)
        assert correlated.abs().max() < 0.2  # the standard error is 0.045
    torch.testing.assert_close(spread(other), spread(points))
    assert torch.equal(other, shuffle_coordinates(points, seed=3))
    assert not torch.equal(other, shuffle_coordinates(points, seed=4))


def test_planted_clusters_score_far_apart_from_a_gaussian():
    clustered = cover(planted(4, 256, 16, clusters=8, width=0.05))
    gaussian = cover(draw(4, 256, 16, seed=9))
    assert clustered.counts == (1, 2, 4, 8, 16, 32, 64, 128)
    # A Gaussian is its own control, and has no more structure than it.
    assert gaussian.score.abs().max() < 0.1
    assert clustered.score.min() > 0.4
    # From as many centers on as there are clusters, next to nothing is left to cover.
    left = clustered.radius[:, 3:] / clustered.control[:, 3:]
    assert left.max() < 0.25


def test_the_score_knows_no_units_and_no_origin():
    points = planted(2, 64, 8, clusters=4, width=0.3)
    moved = cover(1000.0 * points + 5.0)
    torch.testing.assert_close(cover(points).score, moved.score, rtol=1e-3, atol=1e-3)


def test_a_set_of_two_different_points_leaves_nothing_to_compare():
    points = torch.tensor([[[0.0], [3.0], [3.0], [0.0], [3.0], [0.0], [0.0], [3.0]]])
    covering = cover(points)  # one coordinate: to shuffle it changes nothing
    assert covering.counts == (1, 2, 4)
    assert covering.radius.tolist() == [[2.0, 0.0, 0.0]]  # a distance of 3, the spread being 1.5
    assert covering.score.tolist() == [0.0]


def test_tokens_that_are_all_the_same_are_no_clusters():
    assert cover(torch.ones(1, 16, 4)).score.tolist() == [0.0]


def test_too_few_points_and_too_many_centers_are_refused():
    with pytest.raises(WeirError, match="7 tokens are too few to look for clusters"):
        cover(draw(1, 7, 2))
    assert doublings(8) == (1, 2, 4)
    assert doublings(512) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    with pytest.raises(WeirError, match="17 centers cannot be picked from 16 tokens"):
        covering_radii(draw(1, 16, 2), (1, 17))
    with pytest.raises(WeirError, match="0 centers"):
        centers(draw(1, 16, 2), 0)


def test_one_center_measures_the_whole_and_counts_for_nothing():
    radius, control = torch.tensor([[3.0, 0.5, 1.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    # 1 - 0.5 for two centers, and 0 for four, where the control has no radius either.
    assert Covering((1, 2, 4), radius, control).score.tolist() == [0.25]
