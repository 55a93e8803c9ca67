"""Attention of one query a head on a CPU, over slots of 4 bits and exact ones behind them.

Slots of 4 bits hold rotated vectors (`weir.slab.quantization`). Instead of them, the query is
rotated, and their share of the answer afterwards: so both parts have a query and a sum of their
own, and one softmax. The numbers of a head are widened to bytes, which stay in the processor's
cache for the loops of `decode`. Roofline: each stored byte is read once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.kernels.cpu.compilation import (
    WHOLE,
    bytes_at,
    compile_kernel,
    floats_at,
    shorts_at,
)
from weir.kernels.cpu.slot_products import VECTORS, dot_products, pad_query, weighted_sums
from weir.kernels.cpu.softmax import ATTENTION_MATH, softmax
from weir.kernels.cpu.threads import run_in_threads
from weir.kernels.cpu.vectors import as_float, lanes
from weir.kernels.dispatch import QuantizedVectors

_WORTH = 1 << 16
"""Numbers of keys and values that are worth a thread."""
Codes = tuple[int, int, float]
"""Addresses of bytes of two numbers and of bfloat16 peaks, and how many steps make a peak."""


def _attend(
    lanes: int,
    halves: int,
    heads: tuple[int, int],
    group: int,
    dim: int,
    width: int,
    slots: int,
    quantized: int,
    queries_at: int,
    rotated_at: int,
    key_codes: Codes,
    value_codes: Codes,
    keys_at: int,
    values_at: int,
    mask_at: int,
    masked: int,
    scale: float,
    coded: int,
    stop: int,
    out_at: int,
    exact_at: int,
) -> None:
    """Answers of some heads. Tensors are contiguous, and given by address.

    Args:
        lanes: numbers of a vector, 8 or 16.
        halves: 1 where exact keys and values are the bits of bfloat16, 0 where they are float32.
        heads: from which to which.
        group, dim, width: queries of a head, and the numbers of a key and of a value.
        slots, quantized: exact slots of a head, and quantized ones.
        queries_at, rotated_at: float32 [heads, group, dim], for exact and for quantized slots.
        key_codes, value_codes: of the quantized slots [heads, quantized, dim / 2].
        keys_at, values_at: of the exact slots [heads, slots, dim].
        mask_at: float32 [heads, masked], log-weights of all slots; 0 where all are 0.
        masked: slots that have one.
        scale: factor of the logits.
        coded: the first quantized slot that is read.
        stop: how many exact slots are read.
        out_at, exact_at: float32 [heads, group, width], written: the share of the quantized slots,
            rotated, and that of the exact ones.
    """
    first, last = heads
    queries = floats_at(queries_at, (last * group, dim))
    rotated = floats_at(rotated_at, (last * group, dim))
    out = floats_at(out_at, (last * group, width))
    more = floats_at(exact_at, (last * group, width))
    mask = floats_at(mask_at, (last, masked))
    keys, values = floats_at(keys_at, WHOLE)[0], floats_at(values_at, WHOLE)[0]
    half_keys, half_values = shorts_at(keys_at, WHOLE)[0], shorts_at(values_at, WHOLE)[0]
    pairs, value_pairs = bytes_at(key_codes[0], WHOLE)[0], bytes_at(value_codes[0], WHOLE)[0]
    peaks, value_peaks = shorts_at(key_codes[1], WHOLE)[0], shorts_at(value_codes[1], WHOLE)[0]
    levels, value_levels = np.float32(key_codes[2]), np.float32(value_codes[2])
    read, factor = quantized - coded, np.float32(scale)
    count = read + stop
    logits, power = np.empty((group, count), np.float32), np.empty(count, np.int32)
    padded = (dim + lanes - 1) // lanes * lanes
    exact_query, coded_query = np.empty((2, group, padded), np.float32)
    wide = np.empty(read * max(dim, width), np.int8)
    for head in range(first, last):
        here, there = head * group, (head + 1) * group
        for member in range(group):
            pad_query(queries[head * group + member], factor, lanes, exact_query[member])
            pad_query(rotated[head * group + member], factor, lanes, coded_query[member])
        begin, older = head * slots, head * quantized + coded
        _widen(pairs, older, read, dim // 2, wide)
        dot_products(coded_query, wide, 0, dim, logits, 0, read, lanes)
        if halves:
            dot_products(exact_query, half_keys, begin, dim, logits, read, stop, lanes)
        else:
            dot_products(exact_query, keys, begin, dim, logits, read, stop, lanes)
        for member in range(group):
            row = logits[member]
            for slot in range(read):
                row[slot] *= as_float(peaks[older + slot]) / levels
            if mask_at:
                for slot in range(count):
                    row[slot] += mask[head, coded + slot]
            softmax(row, power)
            for slot in range(read):
                row[slot] *= as_float(value_peaks[older + slot]) / value_levels
        _widen(value_pairs, older, read, width // 2, wide)
        weighted_sums(logits, 0, read, wide, 0, out[here:there], lanes)
        if halves:
            weighted_sums(logits, read, stop, half_values, begin, more[here:there], lanes)
        else:
            weighted_sums(logits, read, stop, values, begin, more[here:there], lanes)


def _widen_pairs(pairs: np.ndarray, first: int, count: int, half: int, wide: np.ndarray) -> None:
    """Slots of two numbers to a byte, that at i and that at i + half, as bytes of one."""
    for slot in range(count):
        at, to = (first + slot) * half, slot * 2 * half
        for i in range(half):
            pair = np.uint8(pairs[at + i])
            wide[to + i] = np.int8(pair & 15) - np.int8(8)
            wide[to + half + i] = np.int8(pair >> 4) - np.int8(8)


_widen = compile_kernel(_widen_pairs)
_run = compile_kernel(_attend, fastmath=ATTENTION_MATH)


def decode_int4(
    queries: Tensor,
    rotated: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """The shares of the answers [batch, kv_heads, group, 1, value_dim], float32, of the quantized
    slots, which are to be rotated, and of the exact ones. Both zero for a query that sees nothing.

    Args:
        queries, rotated: [batch, kv_heads, group, 1, key_dim], as they are and rotated.
        coded: of keys and of values their numbers [batch, kv_heads, coded, dim / 2], two to a byte,
            the peaks [batch, kv_heads, coded, 1], bfloat16, and how many steps make a peak.
        keys, values: of the exact slots behind them [batch, kv_heads, slots, dim].
        mask: log-weights of all slots, -inf where a query must not look [batch, kv_heads, slots],
            float32; None where all are 0.
        scale: factor of the logits.
        slots: of all slots, from the first that is read to behind the last.
    """
    batch, heads, group, _, dim = queries.shape
    (count, width), quantized = values.shape[2:], coded[0][0].shape[2]
    if keys.dtype not in (torch.float32, torch.bfloat16):
        keys, values = keys.float(), values.float()
    held = [t.detach().float().contiguous() for t in (queries, rotated)]
    exact = [keys.contiguous(), values.contiguous()]
    stored = [(n.contiguous(), p.contiguous(), float(levels)) for n, p, levels in coded]
    mask = None if mask is None else mask.contiguous()
    out, more = (held[0].new_empty((batch, heads, group, 1, width)) for _ in range(2))

    def part(first: int, last: int) -> None:
        _run(
            lanes() if width >= lanes() * VECTORS else 8,
            int(keys.dtype is torch.bfloat16),
            (first, last),
            group,
            dim,
            width,
            count,
            quantized,
            *(t.data_ptr() for t in held),
            *((n.data_ptr(), p.data_ptr(), levels) for n, p, levels in stored),
            *(t.data_ptr() for t in exact),
            0 if mask is None else mask.data_ptr(),
            0 if mask is None else mask.shape[2],
            scale,
            slots[0],
            slots[1] - quantized,
            out.data_ptr(),
            more.data_ptr(),
        )

    worth = batch * heads * quantized * (dim + width) // _WORTH
    run_in_threads(part, batch * heads, worth)
    return out, more
