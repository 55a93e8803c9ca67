"""DefensiveKV as a stream with plain lists: what `defend` is checked against.

Feng et al. 2025, arXiv:2510.13334, section 4: the largest attention of any observed query, pooled
over neighbors, at least the mean of all, times the length of the value after the projection. The
attention is a softmax over all held tokens, at consecutive positions up to the newest token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from reference.snap import pooled_at, softmax

Tokens = list[Any]


def defend_of(
    n: int,
    window: int,
    half_life: float,
    kernel: int,
    wide: int,
    average: bool = False,
    *,
    logits_of: Callable[[Any, int, Any, int], list[float]],
    length_of: Callable[[Any, Any], float],
) -> Callable[[Tokens, Tokens, Any], tuple[Tokens, Tokens]]:
    """A fold (mine, new, at) -> (mine, gone) of a pool that is alone in its pipe.

    Args:
        n, window, half_life, kernel, wide, average: as in the pool; a half-life of `inf` for none.
        logits_of: (at, place of the query, token, position at which the token is read) -> a logit
            for each head of the group.
        length_of: (at, token) -> the length of the token's value.
    """

    def fold(mine: Tokens, new: Tokens, at: Any) -> tuple[Tokens, Tokens]:
        tokens = sorted([*mine, *new], key=lambda t: t.position)
        for token in tokens:
            before = getattr(token, "peak", 0.0)
            token.peak = before * 0.5 ** ((at.seen - getattr(token, "last", 0)) / half_life)
            token.last = at.seen
        for place in range(max(0, at.seen - window), at.seen):
            seen = [t for t in tokens if t.position <= place]
            first = at.seen - len(tokens)
            by_token = [logits_of(at, place, t, first + rank) for rank, t in enumerate(seen)]
            for of_head in zip(*by_token, strict=True):
                for token, share in zip(seen, softmax(list(of_head)), strict=True):
                    token.peak = max(token.peak, share)
        if len(tokens) <= n:
            return tokens, []
        peaks = {t.position: t.peak for t in tokens}
        mean = math.fsum(peaks.values()) / len(peaks)
        widest = sorted(tokens, key=lambda t: float(t.value.min() - t.value.max()))[:wide]

        def rank(token: Any) -> tuple[bool, float, float, int]:
            score = max(pooled_at(token.position, peaks, kernel, average), mean)
            score *= length_of(at, token)
            return all(token is not t for t in widest), -score, -token.peak, token.position

        kept = {id(t) for t in sorted(tokens, key=rank)[:n]}
        return [t for t in tokens if id(t) in kept], [t for t in tokens if id(t) not in kept]

    return fold
