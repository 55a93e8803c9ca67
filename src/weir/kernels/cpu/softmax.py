"""The softmax of one row of logits, for the kernels of decode attention."""

from __future__ import annotations

import numpy as np
from numba import njit

from weir.kernels.cpu.compilation import ANY_ORDER, compile_kernel

LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
LEAST = -87.0
"""At this exponent and below it, e^x counts as 0."""
POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""Polynomial of Cephes, highest power first: e^f is 1 + f + f^2 times this, for f between
-ln(2) / 2 and ln(2) / 2.
"""

_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(LOG2E), np.float32(LN2_HIGH), np.float32(LN2_LOW)
_LEAST, _HALF, _ONE, _ZERO = map(np.float32, (LEAST, 0.5, 1.0, 0.0))
_P0, _P1, _P2, _P3, _P4, _P5 = map(np.float32, POLYNOMIAL)


@njit(nogil=True, fastmath={"contract"})
def split_exponential(x: np.float32) -> tuple[np.float32, np.int32]:
    """Return e^x in two parts: a number near 1, and the power of two to multiply it by, given as
    the bits of a float32.

    It is compiled separately, so that sums keep their order in callers that allow any order.
    Otherwise the two parts of ln 2 could be added first, which would round their product with n.
    """
    n = np.floor(x * _LOG2E + _HALF)
    f = x - n * _LN2_HIGH - n * _LN2_LOW
    p = _P0 * f + _P1
    p = p * f + _P2
    p = p * f + _P3
    p = p * f + _P4
    p = p * f + _P5
    return p * f * f + f + _ONE, (np.int32(n) + np.int32(127)) << np.int32(23)


def _exponentials(row: np.ndarray, power: np.ndarray, top: np.float32) -> np.float32:
    """Replace each x of a row by e^(x - top), and return the sum. `power` is as for `softmax`."""
    scaled, total = power.view(np.float32), _ZERO
    for slot in range(row.shape[0]):
        x = max(row[slot] - top, _LEAST)
        near_one, power[slot] = split_exponential(x)
        row[slot] = near_one if x > _LEAST else _ZERO
    for slot in range(row.shape[0]):
        row[slot] *= scaled[slot]
        total += row[slot]
    return total


exponentials = compile_kernel(_exponentials, fastmath=ANY_ORDER)


def _largest(row: np.ndarray, top: np.float32) -> np.float32:
    """Return the largest of a row and a number; undefined if one of them is NaN."""
    for slot in range(row.shape[0]):
        top = row[slot] if row[slot] > top else top
    return top


largest = compile_kernel(_largest, fastmath=(*ANY_ORDER, "nnan"))
"""Without NaN, a maximum is the same in any order, so it can be vectorized."""


def _softmax(row: np.ndarray, power: np.ndarray) -> None:
    """Replace logits [slots], float32, by shares. All are 0 if every logit is -inf, and NaN if one
    is NaN or +inf.

    Args:
        row: the logits, which are overwritten.
        power: memory for as many int32, for powers of two.
    """
    count = row.shape[0]
    top, total = row[0], _ZERO
    for slot in range(count):
        top = max(top, row[slot])
        total += row[slot]
    if top == np.inf or total != total:
        row[:] = np.nan
        return
    if top == -np.inf:
        top = _ZERO
    total = exponentials(row, power, top)
    share = _ONE / total if total > 0 else _ZERO
    for slot in range(count):
        row[slot] *= share


softmax = compile_kernel(_softmax, fastmath=ANY_ORDER)
