"""Counter-based random numbers on the CPU, bit-identical to `weir.pools.counter_rng`.

A number takes about twenty operations on whole numbers, and PyTorch makes a pass over memory for
each. Roofline: each number is written once. Everything is computed modulo 2^64, so there is only
one answer.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from weir.kernels.cpu.compilation import compile_kernel

_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP, _BEGIN = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x632BE59BD9B4E019)


@numba.njit(inline="always")
def _step(x: np.uint64, part: np.uint64) -> np.uint64:
    """Mix one more part of a draw's key into the state (SplitMix64)."""
    x = x + (part * _STEP + _BEGIN)
    x = (x ^ (x >> _SHIFTS[0])) * _FIRST
    x = (x ^ (x >> _SHIFTS[1])) * _SECOND
    return x ^ (x >> _SHIFTS[2])


def _fill(begun: np.ndarray, first: int, position: np.ndarray, out: np.ndarray) -> None:
    batch, heads, slots, count = out.shape
    for row in range(batch):
        for head in range(heads):
            of_head = _step(begun[row], np.uint64(first + head))
            for slot in range(slots):
                of_token = _step(of_head, np.uint64(position[row, head, slot]))
                for index in range(count):
                    x = _step(of_token, np.uint64(index))
                    out[row, head, slot, index] = np.float64(x >> _SHIFTS[3]) * 2.0**-53


_compiled_fill = compile_kernel(_fill)


def draw_uniform(begun: list[int], first: int, position: Tensor, count: int) -> Tensor:
    """Draw uniform numbers in [0, 1) [batch, kv_heads, n, count], float64.

    Args:
        begun: the state of each row [batch], into which seed, layer, pool and purpose have already
            been mixed.
        first: the number of the first head.
        position: places in the stream [batch, kv_heads, n], int64.
        count: how many numbers to draw for each token, with indices from 0 on.
    """
    out = torch.empty((*position.shape, count), dtype=torch.float64, device="cpu")
    if out.numel():
        rows = np.array(begun, np.int64).view(np.uint64)
        _compiled_fill(rows, first, position.contiguous().numpy(), out.numpy())
    return out
