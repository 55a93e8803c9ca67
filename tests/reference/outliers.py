"""BalanceKV's outliers with lists and loops, one head and one token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def dot(x: list[float], y: list[float]) -> float:
    return sum(p * q for p, q in zip(x, y, strict=True))


@dataclass
class Outliers:
    """What one head keeps: `held` has, by position, how far a key points away from the mean."""

    n: int
    over: int
    dilate: int
    below: float | None
    held: dict[int, float] = field(default_factory=dict)
    mean: list[float] = field(default_factory=list)

    def take(self, key: list[float], position: int) -> list[int]:
        """A token arrives; returns the positions of those that flow on."""
        mean = self.mean or [0.0] * len(key)
        self.mean = [m + (k - m) / self.over for m, k in zip(mean, key, strict=True)]
        lengths = math.sqrt(dot(key, key)) * math.sqrt(dot(self.mean, self.mean))
        self.held[position] = round(1 - dot(key, self.mean) / lengths, 9)
        newest = sorted(self.held)[max(0, len(self.held) - self.dilate) :]
        decided = [p for p in self.held if p not in newest]
        if self.below is not None:
            decided = [p for p in decided if self.score(p) >= 1 - self.below]
        decided.sort(key=lambda p: (-self.score(p), -self.held[p], p))
        stays = {*newest, *decided[: self.n - len(newest)]}
        gone = [p for p in self.held if p not in stays]
        self.held = {p: away for p, away in self.held.items() if p in stays}
        return gone

    def score(self, position: int) -> float:
        """How far a token or one of its neighbors points away, whichever is more."""
        return max(a for p, a in self.held.items() if abs(p - position) <= self.dilate)
