"""Attention of one query a head on a CPU, over exact slots and, before them, slots of 8 bits.

PyTorch's fused attention is made for many queries. With one, it takes several times as long as it
takes to read keys and values. Here each is read once, for three query heads that share it, whose
sums stay in registers (`slot_products`). Numbers of 8 bits are widened there, and the steps go into
logits and shares: <q, c> * step and p * step. Sums are float32.
"""

from __future__ import annotations

import struct
import sys

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weir.kernels.cpu.compilation import (
    WHOLE,
    bytes_at,
    compile_kernel,
    doubles_at,
    floats_at,
    longs_at,
    shorts_at,
)
from weir.kernels.cpu.slot_products import VECTORS, dot_products, pad_query, weighted_sums
from weir.kernels.cpu.softmax import ATTENTION_MATH, softmax
from weir.kernels.cpu.threads import TeamKernel, take_part, threads_for
from weir.kernels.cpu.vectors import as_float, lanes
from weir.kernels.dispatch import QuantizedVectors

LEAST = 8 * VECTORS
"""Numbers of a head from which on vectors fit into it."""
Codes = tuple[int, int, float]
"""Addresses of int8 numbers and of bfloat16 peaks of vectors, and how many steps make a peak."""
_NO_CODES = 0, 0, 1


def _attend(
    lanes: int,
    halves: int,
    heads: int,
    group: int,
    dim: int,
    width: int,
    slots: int,
    quantized: int,
    queries_at: int,
    key_codes: Codes,
    value_codes: Codes,
    keys_at: int,
    values_at: int,
    mask_at: int,
    masked: int,
    scale: float,
    coded: int,
    start: int,
    stop: int,
    out_at: int,
    begun: int,
    done: int,
) -> None:
    """Answers of heads from `begun` up to `done`. Tensors are contiguous, and given by address.

    Args:
        lanes: numbers of a vector, 8 or 16.
        halves: 1 where keys and values are the bits of bfloat16, 0 where they are float32.
        heads, group, dim, width: how many there are, with one query for each of a group, and the
            numbers of a key and of a value.
        slots, quantized: exact slots of a head, and quantized ones.
        queries_at: float32 [heads, group, dim].
        key_codes, value_codes: of the quantized slots [heads, quantized, dim].
        keys_at, values_at: of the exact slots [heads, slots, dim].
        mask_at: float32 [heads, masked], log-weights of all slots; 0 where all are 0.
        masked: slots that have one.
        scale: factor of the logits.
        coded: the first quantized slot that is read.
        start, stop: which exact slots are read.
        out_at: float32 [heads, group, width], which are written.
    """
    queries = floats_at(queries_at, (heads * group, dim))
    out, mask = floats_at(out_at, (heads * group, width)), floats_at(mask_at, (heads, masked))
    keys, values = floats_at(keys_at, WHOLE)[0], floats_at(values_at, WHOLE)[0]
    half_keys, half_values = shorts_at(keys_at, WHOLE)[0], shorts_at(values_at, WHOLE)[0]
    codes, value_bytes = bytes_at(key_codes[0], WHOLE)[0], bytes_at(value_codes[0], WHOLE)[0]
    peaks, value_peaks = shorts_at(key_codes[1], WHOLE)[0], shorts_at(value_codes[1], WHOLE)[0]
    levels, value_levels = np.float32(key_codes[2]), np.float32(value_codes[2])
    read, exact, factor = quantized - coded, stop - start, np.float32(scale)
    count, first = read + exact, coded + start
    logits, power = np.empty((group, count), np.float32), np.empty(count, np.int32)
    asked = np.empty((group, (dim + lanes - 1) // lanes * lanes), np.float32)
    steps, more = np.empty((2, read), np.float32), np.empty((group, width), np.float32)
    for head in range(begun, done):
        for member in range(group):
            pad_query(queries[head * group + member], factor, lanes, asked[member])
        begin, older = head * slots + start, head * quantized + coded
        for slot in range(read):
            steps[0, slot] = as_float(peaks[older + slot]) / levels
            steps[1, slot] = as_float(value_peaks[older + slot]) / value_levels
        if read:
            dot_products(asked, codes, older, dim, logits, 0, read, lanes)
        if halves:
            dot_products(asked, half_keys, begin, dim, logits, read, exact, lanes)
        else:
            dot_products(asked, keys, begin, dim, logits, read, exact, lanes)
        for member in range(group):
            row = logits[member]
            for slot in range(read):
                row[slot] *= steps[0, slot]
            if mask_at:
                for slot in range(count):
                    row[slot] += mask[head, first + slot]
            softmax(row, power)
            for slot in range(read):
                row[slot] *= steps[1, slot]
        answers = out[head * group : (head + 1) * group]
        found = more if read else answers
        if read:
            weighted_sums(logits, 0, read, value_bytes, older, answers, lanes)
        if halves:
            weighted_sums(logits, read, exact, half_values, begin, found, lanes)
        else:
            weighted_sums(logits, read, exact, values, begin, found, lanes)
        if read and exact:
            answers += more


_run = compile_kernel(_attend, fastmath=ATTENTION_MATH)


def _attend_parts(address: int) -> None:
    """Answers of some heads, part after part; threads share them."""
    n = longs_at(address, (1, 26))[0]
    scale = doubles_at(address + 8 * 21, (1, 1))[0, 0]
    key_codes, value_codes = (n[11], n[12], float(n[13])), (n[14], n[15], float(n[16]))
    parts, heads = n[1], n[4]
    part = take_part(address)
    while part < parts:
        begun, done = heads * part // parts, heads * (part + 1) // parts
        sizes = n[2], n[3], heads, n[5], n[6], n[7], n[8], n[9]
        held = n[17], n[18], n[19], n[20], scale
        _run(*sizes, n[10], key_codes, value_codes, *held, n[22], n[23], n[24], n[25], begun, done)
        part = take_part(address)


_attend_together = TeamKernel(_attend_parts)
_WORTH_A_THREAD = 2**14
"""Numbers of keys below which a thread of their own costs more than it saves."""


def decode_exact(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
) -> Tensor:
    """The answers [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        keys, values: [batch, kv_heads, slots, dim], float32 or bfloat16.
        mask: log-weights of slots, the same in both sums, -inf where a query must not look
            [batch, kv_heads, slots], float32; None where all are 0.
        scale: factor of the logits.
        slots: the first that is read, and behind the last.
    """
    width = values.shape[3]
    if min(keys.shape[3], width) < LEAST:  # heads of toys, which are made wide enough
        queries, keys, values = (_pad(t) for t in (queries, keys, values))
    out = decode_int8(queries, None, keys, values, mask, scale, (0, *slots))
    return out[..., :width].to(values.dtype).contiguous()


def decode_int8(
    queries: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors] | None,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int, int],
) -> Tensor:
    """As `decode_exact`, float32, with quantized slots before the exact ones.

    Args:
        queries, keys, values, mask, scale: as there; dims of `LEAST` or more.
        coded: keys and values of the quantized slots, whole numbers of 8 bits; None for none.
        slots: the first quantized slot that is read, and which exact ones.
    """
    batch, heads, group, _, dim = queries.shape
    (count, width), quantized = values.shape[2:], 0
    asked = queries.detach().float().contiguous()
    if keys.dtype not in (torch.float32, torch.bfloat16):
        keys, values = keys.float(), values.float()
    keys, values = keys.contiguous(), values.contiguous()
    mask = None if mask is None else mask.contiguous()
    codes, held = [_NO_CODES, _NO_CODES], []
    if coded is not None:
        quantized = coded[0][0].shape[2]
        held = [(n.contiguous(), peaks.contiguous(), levels) for n, peaks, levels in coded]
        codes = [(n.data_ptr(), p.data_ptr(), levels) for n, p, levels in held]
    out = asked.new_empty((batch, heads, group, 1, width))
    _attend_together(
        threads_for(keys.numel() + batch * heads * quantized * dim, _WORTH_A_THREAD),
        lanes() if width >= lanes() * VECTORS else 8,
        int(keys.dtype is torch.bfloat16),
        batch * heads,
        group,
        dim,
        width,
        count,
        quantized,
        asked.data_ptr(),
        *codes[0],
        *codes[1],
        keys.data_ptr(),
        values.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if mask is None else mask.shape[2],
        int.from_bytes(struct.pack("d", scale), sys.byteorder, signed=True),
        *slots,
        out.data_ptr(),
    )
    return out


def _pad(t: Tensor) -> Tensor:
    """With zeros behind its last numbers."""
    return F.pad(t, (0, max(0, LEAST - t.shape[-1])))
