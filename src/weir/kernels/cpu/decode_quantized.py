"""Attention of one query per head over slots, the first of which have 8 or 4 bits, on a CPU.

The peak of a vector is its largest absolute number. If all keys and values are whole numbers of 8
bits with one peak, and not short, they are passed to `decode`. Otherwise (floating point in bytes,
two numbers in a byte, several peaks, or short vectors), keys and values are widened here to
float32, slot by slot. The quantization step, a peak divided by the number of steps in it, is
applied to a slot's logit, <q, c> * step, and to its share p of the attention, p * step, where q is
a query and c are the stored numbers of a key. If each group of a value's numbers has a separate
peak, the steps are applied to these numbers instead. So quantized keys and values are read once,
and only one of them at a time is in memory as float32. Sums are float32. One pass computes the
logits of all slots, one their exponentials, and one the weighted values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.kernels.cpu.compilation import ANY_ORDER, compile_kernel
from weir.kernels.cpu.decode import decode_stored
from weir.kernels.cpu.softmax import softmax
from weir.kernels.cpu.vectors import as_float
from weir.kernels.dispatch import LEAST_WIDE
from weir.kernels.signatures import QuantizedVectors

# This tensor is on the CPU, whatever PyTorch's default device is.
_BYTES = torch.from_numpy(np.arange(256, dtype=np.uint8))
_E4M3 = _BYTES.view(torch.float8_e4m3fn).float().numpy()
"""The number that each byte represents: 4 bits of exponent and 3 of mantissa."""
_NO_TABLE, _NO_MASK = np.empty(0, np.float32), np.empty((0, 0), np.float32)


def _widen(codes: np.ndarray, table: np.ndarray, wide: np.ndarray) -> None:
    """Convert the numbers of one slot to float32: floating point in bytes by a table, two numbers
    in a byte, or whole numbers.
    """
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


_widen_one = compile_kernel(_widen)


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
    """Write answers [heads, group, value_dim] into `out`; see `decode_quantized`."""
    heads, group, dim = queries.shape
    coded = codes.shape[1]
    width = values.shape[2]
    groups = value_peaks.shape[2]
    grouped = width // groups
    exact = stop - coded
    count = coded - first + exact
    logits = np.empty((group, count), np.float32)
    power = np.empty(count, np.int32)
    steps = np.empty((coded, groups + 1), np.float32)
    wide_key, wide_value = np.empty(dim, np.float32), np.empty(width, np.float32)
    for head in range(heads):
        for slot in range(first, coded):
            steps[slot, groups] = as_float(peaks[head, slot, 0]) / levels
            for part in range(groups):
                steps[slot, part] = as_float(value_peaks[head, slot, part]) / value_levels
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


_run = compile_kernel(_attend, fastmath=ANY_ORDER)


def decode_quantized(
    queries: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
) -> Tensor:
    """Compute answers [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        coded: for keys and for values, the numbers [batch, kv_heads, coded, stored], the peaks
            [batch, kv_heads, coded, groups], bfloat16, and the number of quantization steps in a
            peak; keys have one group. Numbers are whole numbers, int8; or floating point (e4m3) in
            bytes, for both keys and values; or, for values, two in a byte, the ones at i and at
            i + value_dim / 2, with 4 bits each and 8 added.
        keys, values: keys and values of the exact slots after the quantized ones
            [batch, kv_heads, slots, dim].
        mask: log-weights of all slots, the same in numerator and denominator, -inf where a query
            must not look [batch, kv_heads, slots], float32; None if all are 0.
        scale: factor of the logits.
        slots: the first slot that is read, and the one after the last, counted over all slots.
    """
    exact, width = slots[1] - coded[0][0].shape[2], values.shape[3]
    if _is_int8(coded) and min(keys.shape[3], width) >= LEAST_WIDE:
        out = decode_stored(queries, coded, keys, values, mask, scale, (slots[0], 0, exact))
        return out.to(values.dtype)
    out = torch.empty(*queries.shape[:4], width, dtype=torch.float32, device="cpu")
    stored = [
        (_flat(numbers), _flat(peaks.view(torch.int16)), np.float32(levels))
        for numbers, peaks, levels in coded
    ]
    _run(
        _flat((queries.float() * scale)[:, :, :, 0]),
        *stored[0],
        *stored[1],
        *(_flat(t[:, :, :exact].float()) for t in (keys, values)),
        _NO_MASK if mask is None else _flat(mask),
        _E4M3 if coded[0][0].dtype == torch.uint8 else _NO_TABLE,
        *slots,
        out.flatten(0, 1)[:, :, 0].numpy(),
    )
    return out.to(values.dtype)


def _flat(t: Tensor) -> np.ndarray:
    """Convert a tensor [batch, heads, ...] to a contiguous array [batch * heads, ...]."""
    array: np.ndarray = t.contiguous().flatten(0, 1).numpy()
    return array


def _is_int8(coded: tuple[QuantizedVectors, QuantizedVectors]) -> bool:
    """Whether all numbers are whole numbers of 8 bits, and each vector has one peak."""
    return all(numbers.dtype == torch.int8 and peaks.shape[3] == 1 for numbers, peaks, _ in coded)
