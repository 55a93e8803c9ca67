"""Attention of one query a head over slots of which the first are in 8 bits or 4, on a CPU.

Numbers are widened in registers, and the steps go into logits and weights: <q, c> * step and
p * step; steps of groups of a value's numbers into those. So keys and values are read once, as they
lie, and no copy of them is made. Sums are float32. One pass has the logits of all slots, one their
exponentials, one the weighted values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.kernels.cpu.compilation import compiled
from weir.kernels.cpu.decode_int8 import LEAST, decode_int8
from weir.kernels.cpu.slot_products import VECTORS
from weir.kernels.cpu.softmax import ATTENTION_MATH, softmax
from weir.kernels.cpu.vectors import lanes
from weir.kernels.dispatch import QuantizedVectors

_BYTES = torch.from_numpy(np.arange(256, dtype=np.uint8))  # on the CPU, whatever the default is
_E4M3 = _BYTES.view(torch.float8_e4m3fn).float().numpy()
"""What each byte says as a number of 4 bits of exponent and 3 of mantissa."""
_NO_TABLE = np.empty(0, np.float32)


def _widen(codes: np.ndarray, table: np.ndarray, wide: np.ndarray) -> None:
    """The numbers of one slot as float32: bytes by a table, two to a byte, or whole numbers."""
    half = codes.shape[0]
    if table.shape[0]:
        for i in range(half):
            wide[i] = table[codes[i]]
    elif half < wide.shape[0]:
        for i in range(half):
            wide[i] = np.float32(np.int32(codes[i] & 15) - 8)
            wide[half + i] = np.float32(np.int32(codes[i] >> 4) - 8)
    else:
        for i in range(half):
            wide[i] = np.float32(codes[i])


_widen_one = compiled(_widen)


def _attend(
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
    table: np.ndarray,
    first: int,
    stop: int,
    out: np.ndarray,
) -> None:
    """Answers [heads, group, value_dim] into `out`; see `decode_quantized`."""
    heads, group, dim = queries.shape
    coded = codes.shape[1]
    width = values.shape[2]
    groups = value_peaks.shape[2]
    grouped = width // groups
    exact = stop - coded
    count = coded - first + exact
    logits = np.empty((group, count), np.float32)
    power = np.empty(count, np.int32)
    bits = np.empty((coded, groups + 1), np.int32)
    steps = bits.view(np.float32)
    wide_key, wide_value = np.empty(dim, np.float32), np.empty(width, np.float32)
    for head in range(heads):
        for slot in range(first, coded):
            # A bfloat16 is the upper half of a float32.
            bits[slot, groups] = np.int32(peaks[head, slot, 0]) << 16
            steps[slot, groups] /= levels
            for part in range(groups):
                bits[slot, part] = np.int32(value_peaks[head, slot, part]) << 16
                steps[slot, part] /= value_levels
        for slot in range(first, coded):
            _widen_one(codes[head, slot], table, wide_key)
            for member in range(group):
                query = queries[head, member]
                total = np.float32(0.0)
                for i in range(dim):
                    total += query[i] * wide_key[i]
                logits[member, slot - first] = total * steps[slot, groups]
        for slot in range(exact):
            key = keys[head, slot]
            for member in range(group):
                query = queries[head, member]
                total = np.float32(0.0)
                for i in range(dim):
                    total += query[i] * key[i]
                logits[member, coded - first + slot] = total
        for member in range(group):
            row = logits[member]
            if mask.shape[0]:
                for slot in range(count):
                    row[slot] += mask[head, first + slot]
            softmax(row, power)
            if groups == 1:
                for slot in range(first, coded):
                    row[slot - first] *= steps[slot, 0]
        out[head] = 0.0
        for slot in range(first, coded):
            _widen_one(value_codes[head, slot], table, wide_value)
            if groups > 1:
                for part in range(groups):
                    step = steps[slot, part]
                    for i in range(part * grouped, (part + 1) * grouped):
                        wide_value[i] *= step
            for member in range(group):
                weight = logits[member, slot - first]
                answer = out[head, member]
                for i in range(width):
                    answer[i] += weight * wide_value[i]
        for slot in range(exact):
            value = values[head, slot]
            for member in range(group):
                weight = logits[member, coded - first + slot]
                answer = out[head, member]
                for i in range(width):
                    answer[i] += weight * value[i]


_run = compiled(_attend, fastmath=ATTENTION_MATH)


def decode_quantized(
    queries: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
) -> Tensor:
    """The answers [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        coded: of keys and of values their numbers [batch, kv_heads, coded, stored], the peaks of
            each [batch, kv_heads, coded, groups], bfloat16, and how many steps make a peak; keys
            have one group. Numbers are whole ones, int8; or of floating point (e4m3), as bytes, of
            keys and values alike; or of values two to a byte, that at i and that at
            i + value_dim / 2, of 4 bits and 8 more than they say.
        keys, values: of the exact slots behind them [batch, kv_heads, slots, dim].
        mask: log-weights of all slots, the same in both sums, -inf where a query must not look
            [batch, kv_heads, slots], float32; None where all are 0.
        scale: factor of the logits.
        slots: of all slots, from the first that is read to behind the last.
    """
    batch, kv_heads, group = queries.shape[:3]
    exact = slots[1] - coded[0][0].shape[2]

    def flat(t: Tensor) -> np.ndarray:
        return t.reshape(batch * kv_heads, *t.shape[2:]).numpy()

    def stored(numbers: Tensor, peaks: Tensor, levels: int) -> tuple[object, ...]:
        return flat(numbers), flat(peaks.view(torch.int16)), np.float32(levels)

    asked = flat((queries.float() * scale)[:, :, :, 0])
    width = values.shape[3]
    out = torch.empty(batch, kv_heads, group, 1, width, dtype=torch.float32, device="cpu")
    given = (
        asked,
        *stored(*coded[0]),
        *stored(*coded[1]),
        flat(keys[:, :, :exact].float().contiguous()),
        flat(values[:, :, :exact].float().contiguous()),
        np.empty((0, 0), np.float32) if mask is None else flat(mask.contiguous()),
    )
    found = out.view(batch * kv_heads, group, -1).numpy()
    if _eight(coded) and min(keys.shape[3], width) >= LEAST:
        decode_int8(lanes() if width >= lanes() * VECTORS else 8, *given, *slots, found)
    else:
        table = _E4M3 if coded[0][0].dtype == torch.uint8 else _NO_TABLE
        _run(*given, table, *slots, found)
    return out.to(values.dtype)


def _eight(coded: tuple[QuantizedVectors, QuantizedVectors]) -> bool:
    """Whether all numbers are whole ones of 8 bits, each vector with one peak."""
    return all(
        numbers.dtype == torch.int8 and peaks.shape[3] == 1 and numbers.is_contiguous()
        for numbers, peaks, _ in coded
    )
