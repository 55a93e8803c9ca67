"""H2O one token at a time, from the paper alone: what `heavy` is checked against.

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", Algorithm 1: the set of tokens grows by the one that comes; if that is one too many, the
token whose accumulated attention is the smallest leaves it. Of equal ones, the newest leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def heavy_of(n: int) -> Callable[..., tuple[list[Any], list[Any]]]:
    """A fold (mine, new, at) -> (mine, gone) over tokens that have a `position` and a `mass`."""

    def fold(mine: list[Any], new: list[Any], at: Any = None) -> tuple[list[Any], list[Any]]:
        kept, gone = list(mine), []
        for token in new:
            kept.append(token)
            if len(kept) > n:
                lightest = min(kept, key=lambda t: (t.mass, -t.position))
                kept.remove(lightest)
                gone.append(lightest)
        return kept, gone

    return fold
