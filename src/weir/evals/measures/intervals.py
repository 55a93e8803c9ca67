"""How sure a share of right answers is, or a mean of a few figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any


def wilson(right: int, asked: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share: where the true one lies, with this confidence.

    Unlike the interval of the normal distribution it stays within 0 and 1 and is not empty where
    all answers or none are right (Wilson 1927).
    """
    if asked == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = right / asked, z * z / asked
    middle = (share + spread / 2) / (1 + spread)
    reach = z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    # Rounding must not take the ends past what can be.
    return max(0.0, middle - reach), min(1.0, middle + reach)


def counted(right: int, asked: int) -> dict[str, Any]:
    """Right answers as a row of a result: counts, share (None of none), and its 95 % interval."""
    low, high = wilson(right, asked)
    share = right / asked if asked else None
    return {"right": right, "asked": asked, "accuracy": share, "low": low, "high": high}


def around_mean(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None]:
    """The mean of some figures, and how far to either side the true one may lie.

    Student's interval, for a handful of figures that were measured independently; None where there
    is one figure, which says nothing about another.
    """
    if len(values) < 2:
        return fmean(values), None
    reach = student(len(values) - 1, confidence) * stdev(values) / math.sqrt(len(values))
    return fmean(values), reach


def student(freedom: int, confidence: float = 0.95) -> float:
    """How many standard errors lie to either side of a mean, by Student's t.

    Args:
        freedom: figures less one, 1 or more.
        confidence: that the true mean is within.
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The probability of Student's t between -t and t (Abramowitz and Stegun, 26.7.3 and 4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (n - 1) / n
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
