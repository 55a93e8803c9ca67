"""The walk over the pairs of small blocks on the CPU, inner products and all.

What `Gram.of`, `Gram.differences` and `walk` of `weir.pools.balance` do in some sixty operations of
PyTorch, each of which takes longer to ask for than to do. Products come tile by tile
(`panels`), and what is left of a tile is the differences of its pairs. A product may differ
from PyTorch's by roundings, so a sign may where a pair lay on the edge between both. Roofline: a
product and a sum for each number of each pair of tokens, an exponential for each pair.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from weir.kernels.cpu.compilation import compiled, spread
from weir.kernels.cpu.panels import MATH, multiply, packed
from weir.kernels.cpu.vectors import lanes

_LOG2E, _LN2_HIGH = np.float32(1.4426950408889634), np.float32(0.693359375)
_LN2_LOW, _LEAST = np.float32(-2.12194440e-4), np.float32(-87.0)
_WORTH_A_THREAD = 2**18
"""Inner products below which a thread of their own costs more than it saves."""
_ONE, _HALF, _NONE = np.float32(1.0), np.float32(0.5), np.float32(0.0)


@njit(nogil=True, fastmath=set(MATH))
def _weigh(
    products: np.ndarray,
    rate: np.float32,
    top: np.float32,
    sums: np.ndarray,
    bits: np.ndarray,
    power: np.ndarray,
) -> None:
    """`sums *= e^(rate * products - top)`, where no exponent is above 0; `bits` and `power` are one
    room for as many numbers, as int32 and as float32.
    """
    for j in range(len(sums)):
        # Cephes: e^x = 2^n e^f, with f in half an octave of 0.
        x = max(products[j] * rate - top, _LEAST)
        n = np.floor(x * _LOG2E + _HALF)
        f = x - n * _LN2_HIGH - n * _LN2_LOW
        p = np.float32(1.9875691500e-4) * f + np.float32(1.3981999507e-3)
        p = (p * f + np.float32(8.3334519073e-3)) * f + np.float32(4.1665795894e-2)
        p = (p * f + np.float32(1.6666665459e-1)) * f + np.float32(5.0000001201e-1)
        sums[j] *= p * f * f + f + _ONE
        bits[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for j in range(len(sums)):
        sums[j] *= power[j]


@njit(nogil=True, fastmath=set(MATH))
def _centerd(keys: np.ndarray, mean: np.ndarray, out: np.ndarray) -> np.float32:
    """Keys less their mean, into `out`; the largest squared length of one of them."""
    mean[:] = _NONE
    for i in range(len(keys)):
        key = keys[i]
        for part in range(len(mean)):
            mean[part] += key[part]
    for part in range(len(mean)):
        mean[part] /= np.float32(len(keys))
    longest = _NONE
    for i in range(len(keys)):
        key, line, square = keys[i], out[i], _NONE
        for part in range(len(mean)):
            line[part] = key[part] - mean[part]
        for part in range(len(mean)):
            square += line[part] * line[part]
        longest = max(longest, square)
    return longest


@njit(nogil=True)
def _largest(weight: np.ndarray) -> np.float32:
    """The largest log-weight; 0 where there is no weight."""
    top = weight.max()
    return _NONE if np.isinf(top) else top


def _walk(
    keys: np.ndarray,
    values: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    u: np.ndarray,
    free: np.ndarray,
    signs: np.ndarray,
    rate: float,
    constant: float,
    gamma: float,
    steepest: float,
    widest: int,
) -> None:
    (blocks, tokens, dim), width = keys.shape, values.shape[2]
    pairs, panels, half = tokens // 2, (tokens + widest - 1) // widest, widest // 2
    mean, total = np.empty(dim, np.float32), np.empty(panels * half, np.float32)
    # What a token adds to the denominator is one number more of what it adds to the numerator.
    centerd = np.zeros((panels * widest, dim), np.float32)
    heavy = np.zeros((panels * widest, width + 1), np.float32)
    of_keys = np.empty((panels, dim * widest), np.float32)
    of_sums = np.empty((panels, (width + 1) * widest), np.float32)
    products, sums = np.empty(widest * widest, np.float32), np.empty(widest * widest, np.float32)
    bits = np.empty(widest * widest, np.int32)
    power = bits.view(np.float32)
    to_products, to_sums = products.ctypes.data, sums.ctypes.data
    differences = np.empty((panels * half, panels * half), np.float32)
    root = np.sqrt(constant)
    for block in range(blocks):
        top = np.float32(rate) * _centerd(keys[block], mean, centerd)
        gain = np.float64(np.float32(gamma * np.exp(min(np.float64(top), steepest))))
        most_above, most_below = _largest(a[block]), _largest(b[block])
        for i in range(tokens):
            weight, value, line = np.exp(a[block, i] - most_above), values[block, i], heavy[i]
            for part in range(width):
                line[part] = value[part] * weight
            line[width] = np.float32(np.exp(b[block, i] - most_below) * root)
        for panel in range(panels):
            first = panel * widest
            packed(centerd.reshape(-1), first * dim, dim, dim, 1.0, widest, of_keys[panel])
            more = width + 1
            packed(heavy.reshape(-1), first * more, more, more, 1.0, widest, of_sums[panel])
        for one in range(panels):
            for other in range(one, panels):
                ours, theirs = of_keys[one].ctypes.data, of_keys[other].ctypes.data
                mine, its = of_sums[one].ctypes.data, of_sums[other].ctypes.data
                if widest == 16:
                    multiply(ours, theirs, dim, 16, to_products, 16)
                    multiply(mine, its, width + 1, 16, to_sums, 16)
                else:
                    multiply(ours, theirs, dim, 8, to_products, 8)
                    multiply(mine, its, width + 1, 8, to_sums, 8)
                _weigh(products, np.float32(rate), top, sums, bits, power)
                for i in range(half):
                    line = differences[one * half + i]
                    for j in range(half):
                        at = 2 * j * widest + 2 * i
                        first = sums[at] - sums[at + widest]
                        second = sums[at + 1] - sums[at + widest + 1]
                        line[other * half + j] = first - second
        total[:] = _NONE
        for pair in range(pairs):
            if not free[block, pair]:
                signs[block, pair] = _NONE
                continue
            less = u[block, pair] < 0.5 - gain * np.float64(total[pair])
            sign = _ONE if less else -_ONE
            signs[block, pair] = sign
            line = differences[pair]
            for later in range(pair + 1, pairs):
                total[later] += sign * line[later]


_run = compiled(_walk)


def walk_pairs(
    keys: Tensor,
    values: Tensor,
    a: Tensor,
    b: Tensor,
    u: Tensor,
    free: Tensor,
    rate: float,
    constant: float,
    gamma: float,
    steepest: float,
) -> Tensor:
    """Signs of the pairs of blocks [blocks, tokens / 2], float32; 0 for those that take no part.

    Args:
        keys, values: [blocks, tokens, dim], float32, every one of them a token's; an even number.
        a, b: log-weights [blocks, tokens], float32.
        u: uniform numbers [blocks, tokens / 2], float64.
        free: which pairs take part [blocks, tokens / 2], bool.
        rate: the factor of the inner products of keys.
        constant: how much the denominator counts.
        gamma: the gain of a walk is so many times e to the largest squared length of a key, times
            the rate.
        steepest: that exponent is no larger.
    """
    signs = u.new_empty(u.shape, dtype=torch.float32)
    if signs.numel():
        arrays = [t.contiguous().numpy() for t in (keys, values, a, b, u, free, signs)]
        numbers = rate, constant, gamma, steepest, lanes()
        threads = 1 + keys.shape[0] * keys.shape[1] ** 2 // _WORTH_A_THREAD
        spread(lambda *blocks: _run(*blocks, *numbers), arrays, threads)
    return signs
