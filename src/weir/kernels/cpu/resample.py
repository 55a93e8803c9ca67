"""Weighted reservoirs on the CPU, bit-identical to `weir.pools.subgen.reservoirs`.

The reference computes what each arrival adds to every reservoir; here, one running number per
reservoir is enough. Sums are added in the order of arrivals, in float64, so there is only one
answer. Roofline: each uniform number is read once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.kernels.cpu.compilation import compile_kernel


def _take(
    total: np.ndarray, weight: np.ndarray, into: np.ndarray, u: np.ndarray, last: np.ndarray
) -> None:
    lines, arrivals, entries = u.shape
    for line in range(lines):
        for arrival in range(arrivals):
            reservoir, mine = into[line, arrival], weight[line, arrival]
            if mine == 0.0:
                continue
            after = total[line, reservoir] + mine
            total[line, reservoir] = after
            drawn, held = u[line, arrival], last[line, reservoir]
            for entry in range(entries):
                held[entry] = arrival if drawn[entry] * after < mine else held[entry]


_compiled_take = compile_kernel(_take)


def resample(total: Tensor, weight: Tensor, into: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Fill reservoirs; arguments and results are those of `weir.pools.subgen.resample`."""
    after = total.clone(memory_format=torch.contiguous_format)
    last = torch.full((*total.shape, u.shape[3]), -1, device="cpu")
    if weight.numel():
        parts = (after, weight, into, u, last)
        arrays = [t.contiguous().flatten(0, 1).numpy() for t in parts]
        _compiled_take(*arrays)
    return last, after
