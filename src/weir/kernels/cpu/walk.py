"""The self-balancing walk on the CPU, blocks in parallel, sign for sign.

`weir.pools.balance.halving.walk` is what it must equal. Both add the rows of the inner products to
the sums of all later tokens, in the order of the walk and in float32. A product times a sign is
exact, so there is one answer. Roofline: each inner product above the diagonal is read once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.kernels.cpu.compilation import compiled, spread

_WORTH_A_THREAD = 2**20
"""Inner products below which a thread of their own costs more than it saves."""


def _signs(
    products: np.ndarray, gain: np.ndarray, u: np.ndarray, free: np.ndarray, signs: np.ndarray
) -> None:
    blocks, tokens = u.shape
    total = np.empty(tokens, np.float32)
    for block in range(blocks):
        total[:] = 0.0
        lean = np.float64(gain[block])
        for j in range(tokens):
            if not free[block, j]:
                continue
            row = products[block, j]
            if u[block, j] < 0.5 - lean * np.float64(total[j]):
                signs[block, j] = 1.0
                for i in range(j + 1, tokens):
                    total[i] += row[i]
            else:
                signs[block, j] = -1.0
                for i in range(j + 1, tokens):
                    total[i] -= row[i]


_compiled_signs = compiled(_signs)


def walk(products: Tensor, gain: Tensor, u: Tensor, free: Tensor) -> Tensor:
    """Signs [..., n], on the CPU; arguments as in `weir.pools.balance.halving.walk`.

    Args:
        products: inner products of the tokens of each block [..., n, n].
        gain: of each block [...].
        u: uniform numbers, one for each token [..., n].
        free: which tokens are walked [..., n]; the others get a sign of 0.
    """
    n = u.shape[-1]
    signs = torch.zeros(u.shape, dtype=torch.float32, device="cpu")
    if signs.numel():
        parts = (products.float(), gain.float(), u.double(), free, signs)
        shapes = ((-1, n, n), (-1,), (-1, n), (-1, n), (-1, n))
        arrays = [t.contiguous().view(s).numpy() for t, s in zip(parts, shapes, strict=True)]
        spread(_compiled_signs, arrays, 1 + arrays[0].size // _WORTH_A_THREAD)
    return signs
