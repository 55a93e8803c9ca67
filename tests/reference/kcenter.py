"""Greedy k-center one center at a time, from the papers alone: what `kcenter` is checked against.

SubGen (Zandieh et al. 2024), section 3.2, with its reference [8], Dyer and Frieze 1985: the first
center is arbitrary (the oldest token here); each next one is the point whose distance to the
nearest center is the largest (the oldest of them). Neighbors, weights, age, centers that are
replaced and centers that count less are options that only weir has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def squared_distance(x: list[float], y: list[float]) -> float:
    """Squared Euclidean distance of two keys."""
    return sum((one - other) ** 2 for one, other in zip(x, y, strict=True))


def greedy_k_center(
    tokens: list[Any],
    k: int,
    key: Callable[[Any], list[float]],
    weight: Callable[[Any], float] = lambda t: 1.0,
) -> list[Any]:
    """The picked tokens, in the order of the picks. Distances are multiplied by weights."""
    rest = sorted(tokens, key=lambda t: t.position)
    centers: list[Any] = []
    nearest: dict[int, float] = {}
    while rest and len(centers) < k:
        pick = rest[0]
        for token in rest:
            if centers and nearest[token.position] > nearest[pick.position]:
                pick = token
        rest.remove(pick)
        centers.append(pick)
        for token in rest:
            distance = squared_distance(key(token), key(pick)) * weight(token) ** 2
            nearest[token.position] = min(distance, nearest.get(token.position, distance))
    return centers


def with_neighbors(centers: list[Any], tokens: list[Any], k: int, spans: int) -> list[Any]:
    """Centers in their order, each with its neighbors in the stream, until there are k tokens."""
    stay: list[Any] = []
    for center in centers:
        near = [t for t in tokens if abs(t.position - center.position) <= spans]
        for token in [center, *sorted(near, key=lambda t: t.position)]:
            if all(token is not t for t in stay) and len(stay) < k:
                stay.append(token)
    return stay


def renewed(
    stay: list[Any], first: Any, tokens: list[Any], share: float, key: Callable[[Any], list[float]]
) -> list[Any]:
    """The newest token near each center, or the center itself. `first` is never replaced."""
    kept = sorted(stay, key=lambda t: t.position)
    nearest = {}
    for token in tokens:
        if all(token is not t for t in kept):
            away = [math.sqrt(squared_distance(key(token), key(t))) for t in kept]
            nearest[token.position] = (min(away), kept[away.index(min(away))], token)
    radius = max((away for away, _, _ in nearest.values()), default=0.0)
    found = []
    for center in kept:
        near = [t for away, c, t in nearest.values() if c is center and away <= share * radius]
        newer = [t for t in near if t.position > center.position and center is not first]
        found.append(max([center, *newer], key=lambda t: t.position))
    return found


def kcenter_of(
    k: int,
    key: Callable[[Any, Any], list[float]],
    spans: int = 0,
    fresh: float = 0.0,
    weight: Callable[[Any], float] = lambda t: 1.0,
    plain: Callable[[Any], list[float]] | None = None,
    quiet: float = 0.0,
    half_life: float = math.inf,
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """A fold (mine, new, at) -> (mine, gone), with distances between the keys `key(token, at)`.

    `plain(token)` is the key by which centers are replaced, if it is a different one. `quiet` is
    subtracted from the log-weights of all centers but the first, once a token was evicted.
    Distances of a token halve every `half_life` tokens.
    """
    came: dict[int, tuple[float, float]] = {}  # weights on arrival, by place in the stream
    full: set[Any] = set()

    def fold(mine: list[Any], new: list[Any], at: Any = None) -> tuple[list[Any], list[Any]]:
        tokens = [*mine, *new]
        keys = {token.position: key(token, at) for token in tokens}

        def of_age(token: Any) -> float:
            age = 0 if half_life == math.inf else at.seen - token.position
            return weight(token) * 0.5 ** (age / half_life)

        centers = greedy_k_center(tokens, k, lambda t: keys[t.position], of_age)
        if len(tokens) > k:
            first = centers[0]
            centers = with_neighbors(centers, tokens, k, spans)
            if fresh:
                centers = renewed(
                    centers, first, tokens, fresh, plain or (lambda t: keys[t.position])
                )
        chosen = {token.position for token in centers}
        by_age = sorted(tokens, key=lambda t: t.position)
        stay = [t for t in by_age if t.position in chosen]
        if quiet:
            where = None if at is None else (at.layer, at.head)
            came.update({t.position: (t.a, t.b) for t in new})
            full.update({where} if len(tokens) > k else ())
            for token in by_age:
                token.a, token.b = came[token.position]
                if where in full and token.position in chosen and token is not stay[0]:
                    token.a, token.b = token.a - quiet, token.b - quiet
        return stay, [t for t in by_age if t.position not in chosen]

    return fold
