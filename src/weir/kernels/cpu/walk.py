"""The self-balancing walk on the CPU, over inner products that are given or computed on the way.

`walk` returns the same signs as `weir.pools.balance.halving.walk`, with blocks in parallel. Both
add the rows of the inner products to the sums of all later tokens, in the order of the walk and in
float32. A product times a sign is exact, so there is only one answer. Roofline: each inner product
above the diagonal is read once.

`walk_pairs` does the work of `Gram.of`, `Gram.products` and `walk` of `weir.pools.balance`, which
take about sixty operations of PyTorch; calling each takes longer than computing it. Products
of tokens are computed tile by tile (`vectors`). Of each tile, only the products of pairs are kept,
where a pair stands for the difference of its two tokens. A product may differ from PyTorch's by
rounding. So the sign of a pair may also differ, if its random
number is almost equal to its probability. Roofline: for every two tokens of a block, a product and
a sum for each number of a key and of a value, and an exponential.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from weir.kernels.cpu.compilation import compile_kernel
from weir.kernels.cpu.softmax import LEAST, split_exponential
from weir.kernels.cpu.threads import run_on_rows
from weir.kernels.cpu.vectors import MATH, lanes, multiply, pack

_WORTH_A_THREAD, _PAIRS_WORTH_A_THREAD = 2**20, 2**18
"""Numbers of inner products below which a separate thread costs more than it saves: of products
that `walk` reads, and of those that `walk_pairs` computes.
"""
_LEAST, _ONE, _NONE = map(np.float32, (LEAST, 1.0, 0.0))


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


_compiled_signs = compile_kernel(_signs)


def walk(products: Tensor, gain: Tensor, u: Tensor, free: Tensor) -> Tensor:
    """Compute signs [..., n] on the CPU; arguments are those of `weir.pools.balance.halving.walk`.

    Args:
        products: inner products of the tokens of each block [..., n, n].
        gain: the gain of each block [...]. A sign is + with probability 1/2 - gain * sum, where
            sum adds up the token's inner products with all earlier tokens, each times the
            earlier token's sign.
        u: uniform numbers, one for each token [..., n].
        free: which tokens take part [..., n]; the others get a sign of 0.
    """
    n = u.shape[-1]
    signs = torch.zeros(u.shape, dtype=torch.float32, device="cpu")
    if signs.numel():
        parts = (products.float(), gain.float(), u.double(), free, signs)
        shapes = ((-1, n, n), (-1,), (-1, n), (-1, n), (-1, n))
        arrays = [t.contiguous().view(s).numpy() for t, s in zip(parts, shapes, strict=True)]
        run_on_rows(_compiled_signs, arrays, 1 + arrays[0].size // _WORTH_A_THREAD)
    return signs


# --- pairs of tokens, with their inner products


@njit(nogil=True, fastmath=set(MATH))
def _weigh(
    products: np.ndarray,
    rate: np.float32,
    top: np.float32,
    sums: np.ndarray,
    bits: np.ndarray,
    power: np.ndarray,
) -> None:
    """Compute `sums *= e^(rate * products - top)`, where no exponent is above 0. `bits` and `power`
    are the same memory for as many numbers, as int32 and as float32.
    """
    for j in range(len(sums)):
        near_one, bits[j] = split_exponential(max(products[j] * rate - top, _LEAST))
        sums[j] *= near_one
    for j in range(len(sums)):
        sums[j] *= power[j]


@njit(nogil=True, fastmath=set(MATH))
def _center(keys: np.ndarray, mean: np.ndarray, out: np.ndarray) -> np.float32:
    """Write keys minus their mean into `out`, and return the largest squared length of one of
    them.
    """
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
def _largest_weight(weight: np.ndarray) -> np.float32:
    """Return the largest log-weight; 0 if every log-weight is -inf."""
    top = weight.max()
    return _NONE if np.isinf(top) else top


def _walk_pairs(
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
    lanes: int,
) -> None:
    (blocks, tokens, dim), width = keys.shape, values.shape[2]
    pairs, panels, half = tokens // 2, (tokens + lanes - 1) // lanes, lanes // 2
    mean, total = np.empty(dim, np.float32), np.empty(panels * half, np.float32)
    # A token's contribution to the denominator is stored as one more number of its contribution to
    # the numerator.
    centered = np.zeros((panels * lanes, dim), np.float32)
    heavy = np.zeros((panels * lanes, width + 1), np.float32)
    of_keys = np.empty((panels, dim * lanes), np.float32)
    of_sums = np.empty((panels, (width + 1) * lanes), np.float32)
    products, sums = np.empty(lanes * lanes, np.float32), np.empty(lanes * lanes, np.float32)
    bits = np.empty(lanes * lanes, np.int32)
    power = bits.view(np.float32)
    to_products, to_sums = products.ctypes.data, sums.ctypes.data
    differences = np.empty((panels * half, panels * half), np.float32)
    root = np.sqrt(constant)
    for block in range(blocks):
        top = np.float32(rate) * _center(keys[block], mean, centered)
        gain = np.float64(np.float32(gamma * np.exp(min(np.float64(top), steepest))))
        most_above, most_below = _largest_weight(a[block]), _largest_weight(b[block])
        for i in range(tokens):
            weight, value, line = np.exp(a[block, i] - most_above), values[block, i], heavy[i]
            for part in range(width):
                line[part] = value[part] * weight
            line[width] = np.float32(np.exp(b[block, i] - most_below) * root)
        for panel in range(panels):
            first = panel * lanes
            pack(centered.reshape(-1), first * dim, dim, dim, 1.0, lanes, of_keys[panel])
            more = width + 1
            pack(heavy.reshape(-1), first * more, more, more, 1.0, lanes, of_sums[panel])
        for one in range(panels):
            for other in range(one, panels):
                ours, theirs = of_keys[one].ctypes.data, of_keys[other].ctypes.data
                mine, others = of_sums[one].ctypes.data, of_sums[other].ctypes.data
                multiply(ours, theirs, dim, to_products, lanes)
                multiply(mine, others, width + 1, to_sums, lanes)
                _weigh(products, np.float32(rate), top, sums, bits, power)
                for i in range(half):
                    line = differences[one * half + i]
                    for j in range(half):
                        at = 2 * j * lanes + 2 * i
                        first = sums[at] - sums[at + lanes]
                        second = sums[at + 1] - sums[at + lanes + 1]
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


_compiled_walk = compile_kernel(_walk_pairs)


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
    """Compute the signs of the pairs of tokens in each block [blocks, tokens / 2], float32; 0 for
    pairs that do not take part.

    Args:
        keys, values: [blocks, tokens, dim], float32. The number of tokens is even, and no block
            is padded: each token has a finite log-weight, a or b.
        a, b: log-weights [blocks, tokens], float32.
        u: uniform numbers [blocks, tokens / 2], float64.
        free: which pairs take part [blocks, tokens / 2], bool.
        rate: the factor of the inner products of keys.
        constant: the weight of the denominator in an inner product of tokens.
        gamma: the gain of a walk (as in `walk`) is gamma times e^x, where x is the largest squared
            length of a key minus the mean of its block, times the rate.
        steepest: the largest x that is used; a greater x is replaced by it.
    """
    signs = u.new_empty(u.shape, dtype=torch.float32)
    if signs.numel():
        arrays = [t.contiguous().numpy() for t in (keys, values, a, b, u, free, signs)]
        numbers = rate, constant, gamma, steepest, lanes()
        threads = 1 + keys.shape[0] * keys.shape[1] ** 2 // _PAIRS_WORTH_A_THREAD
        run_on_rows(lambda *blocks: _compiled_walk(*blocks, *numbers), arrays, threads)
    return signs
