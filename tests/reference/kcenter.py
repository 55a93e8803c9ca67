"""Greedy k-center one centre at a time, from the papers alone: what `kcenter` is checked against.

SubGen (Zandieh et al. 2024), section 3.2, with its reference [8], Dyer and Frieze 1985: the first
centre is arbitrary (the oldest token here); each next one is the point whose distance to the
nearest centre is the largest (the oldest of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def squared_distance(x: list[float], y: list[float]) -> float:
    """Squared Euclidean distance of two keys."""
    return sum((one - other) ** 2 for one, other in zip(x, y, strict=True))


def greedy_k_center(tokens: list[Any], k: int, key: Callable[[Any], list[float]]) -> list[Any]:
    """The tokens that are picked, in the order in which they are."""
    rest = sorted(tokens, key=lambda t: t.position)
    centres: list[Any] = []
    nearest: dict[int, float] = {}
    while rest and len(centres) < k:
        pick = rest[0]
        for token in rest:
            if centres and nearest[token.position] > nearest[pick.position]:
                pick = token
        rest.remove(pick)
        centres.append(pick)
        for token in rest:
            distance = squared_distance(key(token), key(pick))
            nearest[token.position] = min(distance, nearest.get(token.position, distance))
    return centres


def kcenter_of(
    k: int, key: Callable[[Any, Any], list[float]]
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """A fold (mine, new, at) -> (mine, gone); `key(token, at)` is what distances are about."""

    def fold(mine: list[Any], new: list[Any], at: Any = None) -> tuple[list[Any], list[Any]]:
        tokens = [*mine, *new]
        keys = {token.position: key(token, at) for token in tokens}
        centres = greedy_k_center(tokens, k, lambda t: keys[t.position])
        chosen = {token.position for token in centres}
        by_age = sorted(tokens, key=lambda t: t.position)
        stay = [t for t in by_age if t.position in chosen]
        return stay, [t for t in by_age if t.position not in chosen]

    return fold
