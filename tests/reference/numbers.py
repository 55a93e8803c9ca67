"""Numbers that look random, and are the same with every version of Python and PyTorch.

With this file, two programs in different environments make the same tensors. Whole numbers are
mixed as in SplitMix64 (Steele, Lea and Flood 2014), so nothing is rounded. The file imports only
PyTorch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mixed(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def numbers(seed: int, *shape: int) -> Tensor:
    """Sums of three numbers evenly spread from -1 to 1, float32."""
    count = math.prod(shape)
    drawn = [
        sum((_mixed((seed << 40) + 3 * i + part + 1) >> 42) / (1 << 21) - 1 for part in range(3))
        for i in range(count)
    ]
    return torch.tensor(drawn, dtype=torch.float32).view(*shape)
