"""BalanceKV's tokens kept for needles, one head: lists and loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Outliers:
    """What one head keeps, as (score, position), by position."""

    n: int
    block: int
    dilate: int
    held: list[tuple[float, int]] = field(default_factory=list)

    def take(self, keys: list[list[float]], positions: list[int]) -> list[int]:
        """Tokens arrive; returns the positions of those that flow on."""
        raw: list[float] = []
        for start in range(0, len(keys), self.block):
            part = keys[start : start + self.block]
            for key in part:
                products = [sum(a * b for a, b in zip(key, k, strict=True)) for k in part]
                mean = sum(products) / len(products)
                raw.append(mean if mean <= 0 else math.inf)
        scores = [min(raw[max(0, i - self.dilate) : i + self.dilate + 1]) for i in range(len(raw))]
        everyone = self.held + list(zip(scores, positions, strict=True))
        wanted = sorted((it for it in everyone if it[0] < math.inf), key=lambda it: it[0])
        kept = wanted[: self.n]
        self.held = sorted(kept, key=lambda it: it[1])
        return sorted(it[1] for it in everyone if it not in kept)
