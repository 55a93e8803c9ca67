"""Uniform sampling by the book: what `uniform` is checked against.

BalanceKV, appendix B.1: "sampling a fraction of key and value embeddings ... uniformly at random".
These functions get all tokens that ever arrived, and draw a sample from them each time: by budget,
they order all tokens by a random number and take the first ones; by rate, they toss a coin for each
token. Nothing is streamed, so no error can build up.
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
    """The log-weight of each of n tokens that makes sums over all arrived tokens unbiased."""
    return math.log(max(1.0, came / n))
