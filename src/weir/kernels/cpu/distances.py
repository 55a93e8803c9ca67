"""Euclidean distances on the CPU, from differences, in float64.

Computes the same as `torch.cdist` without matrix products, in another order of sums; the distance
of equal vectors is exactly zero. Roofline: each pair of numbers is subtracted, squared and added
once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.kernels.cpu.compilation import ANY_ORDER, compile_kernel
from weir.kernels.cpu.threads import run_on_rows

_WORTH_A_THREAD = 2**22
"""For fewer differences than this, a separate thread costs more than it saves."""


def _measure(keys: np.ndarray, others: np.ndarray, out: np.ndarray) -> None:
    heads, count, dim = keys.shape
    for head in range(heads):
        for place in range(count):
            key = keys[head, place]
            for other in range(others.shape[1]):
                line = others[head, other]
                total = 0.0
                for i in range(dim):
                    apart = key[i] - line[i]
                    total += apart * apart
                out[head, place, other] = np.sqrt(total)


_compiled_measure = compile_kernel(_measure, fastmath=ANY_ORDER)


def distances(keys: Tensor, others: Tensor) -> Tensor:
    """Compute the distance of each key from each of the others [batch, kv_heads, n, m], float64.

    Args:
        keys: [batch, kv_heads, n, key_dim].
        others: [batch, kv_heads, m, key_dim].
    """
    out = torch.empty((*keys.shape[:3], others.shape[2]), dtype=torch.float64, device="cpu")
    if out.numel():
        parts = (keys.double(), others.double(), out)
        arrays = [t.contiguous().flatten(0, 1).numpy() for t in parts]
        run_on_rows(_compiled_measure, arrays, 1 + out.numel() * keys.shape[3] // _WORTH_A_THREAD)
    return out
