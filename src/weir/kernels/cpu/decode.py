"""Attention of one query a head on a CPU, over exact slots and, before them, slots of few bits.

PyTorch's fused attention is made for many queries. With one, it takes several times as long as it
takes to read keys and values. Here each is read once, for three query heads that share it, whose
sums stay in registers (`slot_products`). Numbers of 8 bits are widened there, and the steps go into
logits and shares: <q, c> * step and p * step. Sums are float32.

Slots of 4 bits hold vectors rotated by a Hadamard matrix (`weir.slab.quantization`). The query is
rotated in place of the keys, and their share of the answer in place of the values, by sums and
differences of neighbors. Their numbers are widened to bytes, a head after the other, which stay in
the processor's cache.
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
"""Addresses of numbers of 8 or 4 bits and of bfloat16 peaks, and how many steps make a peak."""
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
    key_block: int,
    value_block: int,
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
        key_codes, value_codes: of the quantized slots, 8 bits [heads, quantized, dim] or, with
            blocks, 4 bits [heads, quantized, dim / 2].
        keys_at, values_at: of the exact slots [heads, slots, dim].
        mask_at: float32 [heads, masked], log-weights of all slots; 0 where all are 0.
        masked: slots that have one.
        scale: factor of the logits.
        coded: the first quantized slot that is read.
        start, stop: which exact slots are read.
        out_at: float32 [heads, group, width], which are written.
        key_block, value_block: neighbors that are rotated together in quantized slots of 4 bits; 0
            for slots of 8 bits.
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
    wide, asked_codes, few = codes, asked, key_block > 0 and read > 0
    if few:
        wide, asked_codes = np.empty(read * max(dim, width), np.int8), np.empty_like(asked)
    turned = np.empty(dim, np.float32)
    steps, more = np.empty((2, read), np.float32), np.empty((group, width), np.float32)
    for head in range(begun, done):
        for member in range(group):
            pad_query(queries[head * group + member], factor, lanes, asked[member])
            if few:
                turned[:] = queries[head * group + member]
                _rotate(turned, key_block)
                pad_query(turned, factor, lanes, asked_codes[member])
        begin, older = head * slots + start, head * quantized + coded
        for slot in range(read):
            steps[0, slot] = as_float(peaks[older + slot]) / levels
            steps[1, slot] = as_float(value_peaks[older + slot]) / value_levels
        older_wide = 0 if few else older
        if read:
            if few:
                _widen(codes, older, read, dim // 2, wide)
            dot_products(asked_codes, wide, older_wide, dim, logits, 0, read, lanes)
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
        if few:
            _widen(value_bytes, older, read, width // 2, wide)
            weighted_sums(logits, 0, read, wide, 0, answers, lanes)
            for member in range(group):
                _rotate(answers[member], value_block)
        elif read:
            weighted_sums(logits, 0, read, value_bytes, older, answers, lanes)
        found = more if read else answers
        if halves:
            weighted_sums(logits, read, exact, half_values, begin, found, lanes)
        else:
            weighted_sums(logits, read, exact, values, begin, found, lanes)
        if read and exact:
            answers += more


def _rotate_blocks(row: np.ndarray, block: int) -> None:
    """Multiply each block of a vector by the normalized Hadamard matrix, in place."""
    width = 1
    while width < block:
        for begin in range(0, row.shape[0], 2 * width):
            for i in range(begin, begin + width):
                one, other = row[i], row[i + width]
                row[i], row[i + width] = one + other, one - other
        width *= 2
    row /= np.float32(np.sqrt(block))


def _widen_pairs(pairs: np.ndarray, first: int, count: int, half: int, wide: np.ndarray) -> None:
    """Slots of two numbers to a byte, that at i and that at i + half, as bytes of one.

    A number from 0 to 15 stands for itself less 8: 120 more, with the highest bit turned, is that
    byte. Four are made at once where a slot has as many.
    """
    stored, found = pairs[first * half : (first + count) * half], wide[: count * 2 * half]
    if half % 4 == 0:
        four, at = stored.view(np.uint32).reshape(count, half // 4), half // 4
        made = found.view(np.uint32).reshape(count, half // 2)
        for slot in range(count):
            low, high = made[slot, :at], made[slot, at:]
            for i in range(at):
                low[i] = ((four[slot, i] & _LOW) + _MORE) ^ _TURN
                high[i] = (((four[slot, i] >> _FOUR) & _LOW) + _MORE) ^ _TURN
        return
    one, bytes_made = stored.reshape(count, half), found.reshape(count, 2, half)
    for slot in range(count):
        for i in range(half):
            pair = np.uint8(one[slot, i])
            bytes_made[slot, 0, i] = np.int8(pair & 15) - np.int8(8)
            bytes_made[slot, 1, i] = np.int8(pair >> 4) - np.int8(8)


_LOW, _MORE, _TURN = np.uint32(0x0F0F0F0F), np.uint32(0x78787878), np.uint32(0x80808080)
_FOUR = np.uint32(4)
_widen = compile_kernel(_widen_pairs)
_rotate = compile_kernel(_rotate_blocks)
_run = compile_kernel(_attend, fastmath=ATTENTION_MATH)


def _attend_parts(address: int) -> None:
    """Answers of some heads, part after part; threads share them."""
    n = longs_at(address, (1, 28))[0]
    scale = doubles_at(address + 8 * 21, (1, 1))[0, 0]
    key_codes, value_codes = (n[11], n[12], float(n[13])), (n[14], n[15], float(n[16]))
    parts, heads = n[1], n[4]
    part = take_part(address)
    while part < parts:
        begun, done = heads * part // parts, heads * (part + 1) // parts
        sizes = n[2], n[3], heads, n[5], n[6], n[7], n[8], n[9]
        held = n[17], n[18], n[19], n[20], scale
        places = n[22], n[23], n[24], n[25], n[26], n[27]
        _run(*sizes, n[10], key_codes, value_codes, *held, *places, begun, done)
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
    return _decode(queries, coded, keys, values, mask, scale, slots)


def decode_int4(
    queries: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors],
    blocks: tuple[int, int],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
) -> Tensor:
    """As `decode_exact`, float32, with rotated slots of 4 bits before the exact ones.

    Args:
        queries, keys, values, mask, scale: as there; dims of `LEAST` or more.
        coded: of keys and of values their numbers [batch, kv_heads, coded, dim / 2], two to a byte,
            the peaks [batch, kv_heads, coded, 1], bfloat16, and how many steps make a peak.
        blocks: neighbors of a key and of a value that are rotated together.
        slots: of all slots, from the first that is read to behind the last.
    """
    span = slots[0], 0, slots[1] - coded[0][0].shape[2]
    return _decode(queries, coded, keys, values, mask, scale, span, blocks)


def _decode(
    queries: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors] | None,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int, int],
    blocks: tuple[int, int] = (0, 0),
) -> Tensor:
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
        *blocks,
    )
    return out


def _pad(t: Tensor) -> Tensor:
    """With zeros behind its last numbers."""
    return F.pad(t, (0, max(0, LEAST - t.shape[-1])))
