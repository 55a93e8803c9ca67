"""Attention matching: slots that stay weigh so that attention misses nothing of those that left."""

from weir.pools.match.match import Match

__all__ = [
    "Match",
]
