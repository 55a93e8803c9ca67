"""Uniform sampling by the book: what `uniform` is checked against.

BalanceKV, appendix B.1: "sampling a fraction of key and value embeddings ... uniformly at random".
Everything that ever came is kept here, and the sample is drawn from it anew each time it is asked
for: by budget, order all tokens by a random number and take the first; by rate, toss a coin for
each. It streams nothing, so nothing can go wrong with time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def by_budget(tokens: Sequence[int], n: int, draw: Callable[[int], float]) -> list[int]:
    """The n tokens that a shuffle puts first, in the order of the stream."""
    shuffled = sorted(tokens, key=draw)
    return sorted(shuffled[:n])


def by_rate(tokens: Sequence[int], rate: float, draw: Callable[[int], float]) -> list[int]:
    """The tokens whose coin shows heads, in the order of the stream."""
    return [token for token in tokens if draw(token) < rate]


def log_weight(came: int, n: int) -> float:
    """What each of n tokens must count for so that sums over all that came are unbiased."""
    return math.log(max(1.0, came / n))
