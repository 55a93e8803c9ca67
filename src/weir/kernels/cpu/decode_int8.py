"""Attention of one query a head over slots of which the first are of 8 bits, on a CPU.

What most slots are by default. As `decode_quantized`, and as there the steps go into logits and
shares, but numbers are widened into vectors of registers, where sums stay (`slot_products`).
"""

from __future__ import annotations

import numpy as np

from weir.kernels.cpu.compilation import compiled
from weir.kernels.cpu.decode_exact import all_dots, all_sums, asked_as_read
from weir.kernels.cpu.slot_products import VECTORS
from weir.kernels.cpu.softmax import ATTENTION_MATH, softmax

LEAST = 8 * VECTORS
"""Numbers of a head from which on vectors fit into it."""


def _attend(
    lanes: int,
    queries: np.ndarray,
    codes: np.ndarray,
    peaks: np.ndarray,
    levels: np.float32,
    value_codes: np.ndarray,
    value_peaks: np.ndarray,
    value_levels: np.float32,
    keys: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    first: int,
    stop: int,
    out: np.ndarray,
) -> None:
    """Answers [heads, group, value_dim] into `out`; as `decode_quantized.decode_quantized`.

    Args:
        lanes: numbers of a vector, 8 or 16.
        queries: [heads, group, key_dim], scaled.
        codes, value_codes: [heads, coded, dim], int8.
        peaks, value_peaks: [heads, coded, 1], the bits of bfloat16 as int16.
        levels, value_levels: how many steps make a peak.
        keys, values: of the exact slots [heads, exact, dim], float32.
        mask: log-weights of all slots [heads, slots]; empty where all are 0.
        first, stop: which slots are read.
        out: what is written.
    """
    heads, group, dim = queries.shape
    coded, exact = codes.shape[1], keys.shape[1]
    read = coded - first
    count = read + exact
    logits, power = np.empty((group, count), np.float32), np.empty(count, np.int32)
    asked = np.empty((group, (dim + lanes - 1) // lanes * lanes), np.float32)
    bits = np.empty((2, read), np.int32)
    steps = bits.view(np.float32)
    shares, newer = np.empty((group, read), np.float32), np.empty((group, exact), np.float32)
    more = np.empty((group, out.shape[2]), np.float32)
    for head in range(heads):
        for member in range(group):
            asked_as_read(queries[head, member], np.float32(1.0), lanes, asked[member])
        for slot in range(read):
            # A bfloat16 is the upper half of a float32.
            bits[0, slot] = np.int32(peaks[head, first + slot, 0]) << 16
            bits[1, slot] = np.int32(value_peaks[head, first + slot, 0]) << 16
        all_dots(asked, codes, head * coded + first, dim, logits, 0, read, lanes)
        all_dots(asked, keys, head * exact, dim, logits, read, exact, lanes)
        for member in range(group):
            row = logits[member]
            for slot in range(read):
                row[slot] *= steps[0, slot] / levels
            if mask.shape[0]:
                for slot in range(count):
                    row[slot] += mask[head, first + slot]
            softmax(row, power)
            for slot in range(read):
                shares[member, slot] = row[slot] * (steps[1, slot] / value_levels)
            newer[member] = row[read:]
        all_sums(shares, value_codes, head * coded + first, out[head], lanes)
        if exact:
            all_sums(newer, values, head * exact, more, lanes)
            out[head] += more


decode_int8 = compiled(_attend, fastmath=ATTENTION_MATH)
