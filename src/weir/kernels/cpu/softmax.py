"""Softmax of one row of logits, for the kernels of decode attention."""

from __future__ import annotations

import numpy as np
from numba import njit

from weir.kernels.cpu.compilation import ANY_ORDER, compile_kernel

LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
LEAST = -87.0
"""The exponent below which e^x is taken for 0."""
POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""Cephes': e^f is 1 + f + f^2 times this, highest power first, for f in half an octave of 0."""

_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(LOG2E), np.float32(LN2_HIGH), np.float32(LN2_LOW)
_LEAST, _HALF, _ONE, _ZERO = map(np.float32, (LEAST, 0.5, 1.0, 0.0))
_P0, _P1, _P2, _P3, _P4, _P5 = map(np.float32, POLYNOMIAL)


@njit(nogil=True, fastmath={"contract"})
def split_exponential(x: np.float32) -> tuple[np.float32, np.int32]:
    """e^x as a number near 1 and the bits, as float32, of a power of two to multiply it by.

    Compiled for itself, so that sums keep their order in callers that allow any: the two parts of
    ln 2 would be added first, and what is subtracted rounded as their product with n.
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
    """e^(x - top) in place of each x of a row; returns their sum. `power` is as for `softmax`."""
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
    """The largest of a row and a number; any number where one of them is not a number."""
    for slot in range(row.shape[0]):
        top = row[slot] if row[slot] > top else top
    return top


largest = compile_kernel(_largest, fastmath=(*ANY_ORDER, "nnan"))
"""Without NaN a maximum in any order is the same, so that it is made of vectors."""


def _softmax(row: np.ndarray, power: np.ndarray) -> None:
    """Logits [slots], float32, become shares; all of them 0 where every logit is -inf, and
    not a number where one is not, or is infinite.

    Args:
        row: what is written over.
        power: as many int32, for powers of two.
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
