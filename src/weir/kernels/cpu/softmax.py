"""The softmax of one row of logits, as kernels of decode attention take it."""

from __future__ import annotations

import numpy as np

from weir.kernels.cpu.compilation import compiled

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)
ATTENTION_MATH = ("reassoc", "contract", "nsz")
"""What LLVM may do to add in parallel; infinities keep their meaning."""


def _softmax(row: np.ndarray, power: np.ndarray) -> None:
    """Logits [slots], float32, become shares; all of them 0 where every logit is -inf, and
    not a number where one is not, or is infinite.

    Args:
        row: what is written over.
        power: as many int32, for powers of two.
    """
    count = row.shape[0]
    scaled = power.view(np.float32)
    top, total = row[0], np.float32(0.0)
    for slot in range(count):
        top = max(top, row[slot])
        total += row[slot]
    if top == np.inf or total != total:
        row[:] = np.nan
        return
    if top == -np.inf:
        top = np.float32(0.0)
    total = np.float32(0.0)
    for slot in range(count):
        # e^x = 2^n e^f, with f in half an octave of 0; the polynomial is Cephes'.
        x = max(row[slot] - top, _LEAST)
        n = np.floor(x * _LOG2E + np.float32(0.5))
        f = x - n * _LN2_HIGH - n * _LN2_LOW
        p = np.float32(1.9875691500e-4)
        p = p * f + np.float32(1.3981999507e-3)
        p = p * f + np.float32(8.3334519073e-3)
        p = p * f + np.float32(4.1665795894e-2)
        p = p * f + np.float32(1.6666665459e-1)
        p = p * f + np.float32(5.0000001201e-1)
        row[slot] = (p * f * f + f + np.float32(1.0)) if x > _LEAST else np.float32(0.0)
        power[slot] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for slot in range(count):
        row[slot] *= scaled[slot]
        total += row[slot]
    share = np.float32(1.0) / total if total > 0 else np.float32(0.0)
    for slot in range(count):
        row[slot] *= share


softmax = compiled(_softmax, fastmath=ATTENTION_MATH)
