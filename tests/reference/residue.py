"""Means of evicted tokens with plain lists: what `residue` without its gate is checked against.

Groups are joined by Ward's rule: each round joins pairs in which each group is the nearest to the
other, the cheapest pairs first. A group is at the place of its newest token. Its weight is the sum
of its tokens' weights times e^(half the variance of its logits).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tokens = list[Any]


@dataclass
class Point:
    """A group: its weight, the mean of its points, and the numbers of its points."""

    weight: float
    at: Tensor
    members: list[int]


def joined(points: list[Tensor], weights: list[float], most: int) -> list[list[int]]:
    """The numbers of the points in each group, after joining until `most` groups are left."""
    groups = [
        Point(w, p.double(), [i]) for i, (p, w) in enumerate(zip(points, weights, strict=True))
    ]

    def cost(one: Point, other: Point) -> float:
        far = float((one.at - other.at).square().sum())
        return far * one.weight * other.weight / (one.weight + other.weight)

    while len(groups) > most:
        pairs = []
        for i, one in enumerate(groups):
            near = min(
                (j for j in range(len(groups)) if j != i), key=lambda j: cost(one, groups[j])
            )
            back = min(
                (j for j in range(len(groups)) if j != near),
                key=lambda j: cost(groups[near], groups[j]),
            )
            if i < near and back == i:
                pairs.append((cost(one, groups[near]), i, near))
        gone = set()
        for _, i, near in sorted(pairs)[: len(groups) - most]:
            one, other = groups[i], groups[near]
            weight = one.weight + other.weight
            one.at = (one.weight * one.at + other.weight * other.at) / weight
            one.weight, one.members = weight, one.members + other.members
            gone.add(near)
        groups = [group for i, group in enumerate(groups) if i not in gone]
    return [group.members for group in groups]


def residue_of(
    r: int, half_life: float, spread: bool, window: int, scale_of: Callable[[Any], float]
) -> Callable[[Tokens, Tokens, Any], tuple[Tokens, Tokens]]:
    """A fold (mine, new, at) -> (mine, nothing).

    Args:
        r, spread, window: as in the pool.
        half_life: as in the pool; `inf` for none.
        scale_of: (at) -> the factor of the logits.
    """

    def power_of(at: Any) -> Tensor:
        """The mean squares of the last queries, averaged over dimensions that rotate together."""
        places = range(max(0, at.seen - window), at.seen)
        # Zeros stand for queries before the first token.
        total = sum(at.rotate(at.queries[place], -place).square().mean(dim=0) for place in places)
        power = total / window * scale_of(at) ** 2
        half = len(power) // 2
        pair = (power[:half] + power[half:]) / 2
        return torch.cat([pair, pair])

    def fold(mine: Tokens, new: Tokens, at: Any) -> tuple[Tokens, Tokens]:
        both = [*mine, *new]
        for token in new:
            token.count, token.width = 1.0, torch.zeros_like(token.key, dtype=torch.float64)
        if len(both) <= r:
            return both, []
        for token in mine:
            token.count *= 0.5 ** (len(new) / half_life)
        power = power_of(at)
        points = [token.key.double() * power.sqrt() for token in both]
        kept = []
        for members in joined(points, [token.count for token in both], r):
            tokens = [both[i] for i in members]
            count = sum(token.count for token in tokens)
            key = sum(token.count * token.key.double() for token in tokens) / count
            value = sum(token.count * token.value.double() for token in tokens) / count
            width = sum(
                token.count * (token.width + (token.key.double() - key).square())
                for token in tokens
            )
            group = max(tokens, key=lambda token: token.position)
            group.count, group.width = count, width / count
            if len(tokens) > 1:
                group.key, group.value = key.float(), value.float()
            more = min(5.0, float((power * group.width).sum()) / 2) if spread else 0.0
            group.a = group.b = math.log(count) + more
            kept.append(group)
        return sorted(kept, key=lambda token: both.index(token)), []

    return fold
