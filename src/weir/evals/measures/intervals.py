"""How sure a share of right answers is."""

from __future__ import annotations

import math
from statistics import NormalDist
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
