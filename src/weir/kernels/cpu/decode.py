"""Attention of one query per head on a CPU, over quantized slots and the exact ones after them.

PyTorch's fused attention is made for many queries. With one query, it takes several times as long
as reading keys and values. Here, each key and value is read once for three query heads that share
it, and sums stay in registers (`slot_products`). Numbers of few bits are widened in registers.
Quantization steps are applied to a slot's logit, <q, c> * step, and to its share p of the
attention, p * step, where q is a query and c are the stored numbers of a key. Sums are float32.

Slots of 4 bits hold vectors rotated by a Hadamard matrix (`weir.slab.quantization`). They are not
rotated back: instead of the keys, the query is rotated, and instead of the values, the part of the
answer that they add up to.

A head's slots can be read in several *stretches*, each with separate sums, by several threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from weir.kernels.cpu.compilation import (
    ANY_ORDER,
    WHOLE,
    compile_kernel,
    floats_at,
    ints_at,
    keep,
    longs_at,
    records_at,
    shorts_at,
)
from weir.kernels.cpu.slot_products import (
    AHEAD,
    VECTORS,
    dot_products,
    pad_query,
    padded,
    weighted_sums,
)
from weir.kernels.cpu.softmax import exponentials, largest
from weir.kernels.cpu.threads import TeamKernel, take_part, threads_for
from weir.kernels.cpu.vectors import as_float, lanes
from weir.kernels.signatures import QuantizedVectors

HELD = np.dtype(
    [
        (name, np.int64)
        for name in (
            # Numbers in a vector; queries of a head; numbers in a key and in a value.
            *("lanes", "group", "dim", "width"),
            # Quantized slots of a head, bits of their numbers, and the addresses of numbers and of
            # bfloat16 peaks (a peak is the largest absolute number of a vector); how many neighbors
            # are rotated together, 0 for none.
            *("quantized", "code_bits", "key_codes", "key_peaks", "value_codes", "value_peaks"),
            *("key_block", "value_block"),
            # Exact slots of a head after them, bits of their numbers, and addresses.
            *("exact", "bits", "keys", "values"),
            # Slots of a head that have weights, and addresses of float32: log-weights, factors of
            # numerator and denominator, and logits [units, group] that count only in the
            # denominator. The address of log-weights is 0 if all of them are 0, those of factors
            # are 0 if all factors are 1, and that of the logits is 0 if there are none.
            *("weighted", "mask", "above", "below", "sinks"),
        )
    ]
    # Number of quantization steps from 0 to a peak, the factor of logits, and the value to which
    # logits are capped, or 0.
    + [(name, np.float64) for name in ("key_levels", "value_levels", "scale", "softcap")]
)
"""The slots of a layer in the form that kernels read: contiguous tensors [units, slots, ...], given
by address. A unit is a KV head of a row.
"""
held_at = records_at(HELD)


def hold(
    keys: Tensor,
    values: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors] | None,
    blocks: tuple[int, int],
    group: int,
    scale: float,
    mask: Tensor | None,
    split: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """Describe slots for kernels. Returns an array of one `HELD`, which holds addresses, so the
    caller must keep the tensors alive.

    Args:
        keys, values: exact slots [batch, kv_heads, slots, dim], float32 or bfloat16.
        coded: quantized keys and values, of 4 bits as in `decode_int4`, or whole numbers of 8 bits;
            None if there are none.
        blocks: for 4 bits, how many neighboring numbers of a key and of a value are rotated
            together; zeros for 8 bits.
        group: query heads of a KV head.
        scale: factor of logits.
        mask: log-weights of all slots [batch, kv_heads, slots]; None if all are 0.
        split: factors of numerator and denominator, of the same shape; None for 1.
        sinks: logits [batch, kv_heads, group] in only the denominator.
        softcap: logits become softcap * tanh(logits / softcap); None for no capping.
    """
    dim, width = keys.shape[3], values.shape[3]
    parts = 2 if blocks[0] else 1
    many = lanes()
    while many > 1 and (width < many * VECTORS or dim < many * parts):
        many = many // 2 if many > 8 else 1
    found = np.zeros(1, HELD)
    at = found[0]
    at["lanes"], at["group"], at["dim"], at["width"] = many, group, dim, width
    at["exact"], at["bits"] = keys.shape[2], 8 * keys.itemsize
    at["keys"], at["values"], at["scale"] = keys.data_ptr(), values.data_ptr(), scale
    at["key_block"], at["value_block"] = blocks
    at["softcap"] = softcap or 0.0
    if coded is not None:
        at["quantized"], at["code_bits"] = coded[0][0].shape[2], 4 if blocks[0] else 8
        for name, (numbers, peaks, levels) in zip(("key", "value"), coded, strict=True):
            at[f"{name}_codes"], at[f"{name}_peaks"] = numbers.data_ptr(), peaks.data_ptr()
            at[f"{name}_levels"] = levels
    if mask is not None:
        at["mask"], at["weighted"] = mask.data_ptr(), mask.shape[2]
    if split is not None:
        at["above"], at["below"] = (t.data_ptr() for t in split)
    if sinks is not None:
        at["sinks"] = sinks.data_ptr()
    return found


@njit(nogil=True)
def scratch_size(group: int, dim: int, width: int, count: int) -> int:
    """Return how many float32 numbers of scratch memory `attend` needs for up to `count` slots."""
    return group * (2 * (dim + 32) + width + count) + dim + 3 * count


def _attend(
    held: int,
    unit: int,
    begin: int,
    end: int,
    sunk: int,
    queries_at: int,
    scratch: int,
    out_at: int,
    sums_at: int,
    ahead: int,
    ahead_stop: int,
) -> None:
    """Compute the answers of a head's queries from some of its slots, not yet divided by the sum of
    weights.

    Args:
        held: address of a `HELD`.
        unit: which head of which row.
        begin, end: the first slot that is read, and the one after the last, counted from the first
            quantized slot on; exact slots follow the quantized ones.
        sunk: 1 if sink logits count in this stretch; they must count in only one.
        queries_at: address of float32 [group, dim].
        scratch: address of memory of `scratch_size`.
        out_at: address of float32 [group, width], which are written.
        sums_at: address of another output, float32 [group, 2]: the largest logit, and the sum of
            the weights, which are relative to it.
        ahead, ahead_stop: addresses of memory that is read next, 0 for none. It is prefetched into
            the processor's cache, `AHEAD` bytes per slot and product.
    """
    n = held_at(held, (1, 1))[0, 0]
    lanes, group, dim, width = n.lanes, n.group, n.dim, n.width
    read = max(0, min(end, n.quantized) - begin)
    exact, older = end - begin - read, unit * n.quantized + begin
    count, first = read + exact, unit * n.exact + max(0, begin - n.quantized)
    few = n.code_bits == 4
    parts = 2 if few else 1
    asked_at = scratch
    coded_at = asked_at + 4 * group * (dim + 32)
    more_at = coded_at + 4 * group * (dim + 32)
    logits_at = more_at + 4 * group * width
    turned_at = logits_at + 4 * group * count
    steps_at = turned_at + 4 * dim
    steps, power = floats_at(steps_at, (2, read)), ints_at(steps_at + 8 * read, (1, count))[0]
    size, size_coded = padded(dim, 1, lanes), padded(dim, parts, lanes)
    for member in range(group):
        query_at = queries_at + 4 * member * dim
        pad_query(query_at, n.scale, dim, 1, lanes, asked_at + 4 * member * size)
        if few and read:
            query, turned = floats_at(query_at, (1, dim))[0], floats_at(turned_at, (1, dim))[0]
            for i in range(dim):
                turned[i] = query[i]
            _rotate(turned_at, dim, n.key_block)
            to = coded_at + 4 * member * size_coded
            pad_query(turned_at, n.scale, dim, parts, lanes, to)
    if read:
        peaks, value_peaks = shorts_at(n.key_peaks, WHOLE)[0], shorts_at(n.value_peaks, WHOLE)[0]
        levels, value_levels = np.float32(n.key_levels), np.float32(n.value_levels)
        for slot in range(read):
            steps[0, slot] = as_float(peaks[older + slot]) / levels
            steps[1, slot] = as_float(value_peaks[older + slot]) / value_levels
        codes = n.key_codes + older * dim * n.code_bits // 8
        given = coded_at if few else asked_at
        more = ahead, ahead_stop
        dot_products(given, group, codes, n.code_bits, dim, logits_at, count, read, lanes, *more)
        ahead += read * AHEAD
    at = n.keys + first * dim * n.bits // 8
    more = ahead, ahead_stop
    to = logits_at + 4 * read
    dot_products(asked_at, group, at, n.bits, dim, to, count, exact, lanes, *more)
    ahead += exact * AHEAD
    logits, sums = floats_at(logits_at, (group, count)), floats_at(sums_at, (group, 2))
    weights = 4 * (unit * n.weighted + begin)
    mask, above = (
        floats_at(n.mask + weights, (1, count))[0],
        floats_at(n.above + weights, (1, count))[0],
    )
    below, sinks = floats_at(n.below + weights, (1, count))[0], floats_at(n.sinks, WHOLE)[0]
    for member in range(group):
        row = logits[member]
        for slot in range(read):
            row[slot] *= steps[0, slot]
        if n.softcap:
            cap = np.float32(n.softcap)
            for slot in range(count):
                row[slot] = cap * np.float32(np.tanh(row[slot] / cap))
        if n.mask:
            for slot in range(count):
                row[slot] += mask[slot]
        sink = sinks[unit * group + member] if sunk and n.sinks else np.float32(-np.inf)
        top, total = largest(row, sink), np.float32(0.0)
        for slot in range(count):
            total += row[slot]
        if top == np.inf or total != total:
            row[:] = np.nan
            top, total = np.float32(0.0), np.float32(np.nan)
        elif top == -np.inf:
            row[:] = np.float32(0.0)
            total = np.float32(0.0)
        else:
            total = exponentials(row, power, top)
            if n.below:
                total = np.float32(0.0)
                for slot in range(count):
                    total += row[slot] * below[slot]
                    row[slot] *= above[slot]
            total += np.float32(np.exp(sink - top))
        sums[member, 0], sums[member, 1] = top, total
        for slot in range(read):
            row[slot] *= steps[1, slot]
    if read:
        codes = n.value_codes + older * width * n.code_bits // 8
        bits, more = n.code_bits, (ahead, ahead_stop)
        weighted_sums(logits_at, count, read, group, codes, bits, width, out_at, lanes, *more)
        ahead += read * AHEAD
        if few:
            for member in range(group):
                _rotate(out_at + 4 * member * width, width, n.value_block)
    if exact or not read:
        at, into = n.values + first * width * n.bits // 8, more_at if read else out_at
        shares, more = logits_at + 4 * read, (ahead, ahead_stop)
        weighted_sums(shares, count, exact, group, at, n.bits, width, into, lanes, *more)
        if read:
            out = floats_at(out_at, (1, group * width))[0]
            others = floats_at(more_at, (1, group * width))[0]
            for i in range(group * width):
                out[i] += others[i]


def _rotate_blocks(row_at: int, dim: int, block: int) -> None:
    """Multiply each block of a vector [dim], float32, by the normalized Hadamard matrix."""
    row, width = floats_at(row_at, (1, dim))[0], 1
    while width < block:
        for begin in range(0, dim, 2 * width):
            for i in range(begin, begin + width):
                one, other = row[i], row[i + width]
                row[i], row[i + width] = one + other, one - other
        width *= 2
    row /= np.float32(np.sqrt(block))


def _merge(
    parts_at: int,
    apart: int,
    sums_at: int,
    sums_apart: int,
    parts: int,
    group: int,
    width: int,
    out_at: int,
) -> None:
    """Merge the answers of some stretches into one [group, width]; zero for a query that sees
    nothing.

    Args:
        parts_at, sums_at: addresses of the first stretch's answers and sums, as `attend` writes
            them.
        apart, sums_apart: distances between those of two stretches, in numbers.
        parts, group, width: number of stretches, queries, and numbers in an answer.
        out_at: address of float32 [group, width], which are written.
    """
    found, sums = floats_at(parts_at, WHOLE)[0], floats_at(sums_at, WHOLE)[0]
    out = floats_at(out_at, (group, width))
    for member in range(group):
        top, total = np.float32(-np.inf), np.float32(0.0)
        for part in range(parts):
            top = max(top, sums[part * sums_apart + 2 * member])
        if top == -np.inf:
            top = np.float32(0.0)
        for part in range(parts):
            at = part * sums_apart + 2 * member
            total += np.float32(np.exp(sums[at] - top)) * sums[at + 1]
        row = out[member]
        for part in range(parts):
            at, begin = part * sums_apart + 2 * member, part * apart + member * width
            weight = np.float32(np.exp(sums[at] - top))
            share = weight / total if total != 0 else np.float32(0.0)
            for i in range(width):
                row[i] = share * found[begin + i] + (row[i] if part else np.float32(0.0))


_rotate = compile_kernel(_rotate_blocks)
attend = compile_kernel(_attend, fastmath=ANY_ORDER)
merge = compile_kernel(_merge, fastmath=ANY_ORDER)


def _attend_parts(address: int) -> None:
    """Compute the answers of heads, part after part; threads share the parts."""
    numbers = longs_at(address, (1, 8))[0]
    parts, held, units, begin, end = numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    n = held_at(held, (1, 1))[0, 0]
    group, dim, width = n.group, n.dim, n.width
    size = scratch_size(group, dim, width, end - begin)
    scratch = np.empty(size + 2 * group, np.float32)
    at = np.int64(scratch.ctypes.data)
    sums = at + 4 * size
    part = take_part(address)
    while part < parts:
        for unit in range(units * part // parts, units * (part + 1) // parts):
            out = numbers[7] + 4 * unit * group * width
            attend(
                held, unit, begin, end, 1, numbers[6] + 4 * unit * group * dim, at, out, sums, 0, 0
            )
            merge(out, 0, sums, 0, 1, group, width, out)
        part = take_part(address)
    keep(scratch)


_attend_together = TeamKernel(_attend_parts)
_WORTH_A_THREAD = 2**14
"""For fewer numbers of keys than this, a separate thread costs more than it saves."""


def decode_exact(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
) -> Tensor:
    """Compute answers [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        keys, values: [batch, kv_heads, slots, dim], float32 or bfloat16.
        mask: log-weights of slots, the same in numerator and denominator, -inf where a query must
            not look [batch, kv_heads, slots], float32; None if all are 0.
        scale: factor of the logits.
        slots: the first slot that is read, and the one after the last.
    """
    out = decode_stored(queries, None, keys, values, mask, scale, (0, *slots))
    return out.to(values.dtype)


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
    """Compute the same as `decode_exact`, in float32, with rotated slots of 4 bits before the exact
    ones.

    Args:
        queries, keys, values, mask, scale: as in `decode_exact`; keys and values have at least
            `LEAST_WIDE` numbers (`kernels/dispatch.py`).
        coded: for keys and for values, the numbers [batch, kv_heads, coded, dim / 2], two in a
            byte, the peaks [batch, kv_heads, coded, 1], bfloat16, and the number of steps from 0
            to a peak.
        blocks: how many neighbors of a key and of a value are rotated together.
        slots: the first slot that is read, and the one after the last, counted over all slots.
    """
    span = slots[0], 0, slots[1] - coded[0][0].shape[2]
    return decode_stored(queries, coded, keys, values, mask, scale, span, blocks)


def decode_stored(
    queries: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors] | None,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int, int],
    blocks: tuple[int, int] = (0, 0),
) -> Tensor:
    """Compute the same as `decode_exact`, in float32, with quantized slots before the exact ones.

    Args:
        queries, keys, values, mask, scale: as in `decode_exact`.
        coded: keys and values of the quantized slots, whole numbers of 8 bits, or of 4 as in
            `decode_int4`; None for none.
        slots: the first quantized slot that is read, the first exact one, and the one after the
            last exact one. Exact slots are counted separately. The first exact one is used only if
            there are no quantized slots; otherwise exact slots are read from 0 on.
        blocks: for 4 bits, how many neighbors are rotated together; zeros for 8 bits.
    """
    batch, heads, group, _, dim = queries.shape
    asked, quantized = queries.detach().float().contiguous(), 0
    if keys.dtype not in (torch.float32, torch.bfloat16):
        keys, values = keys.float(), values.float()
    keys, values = keys.contiguous(), values.contiguous()
    mask = None if mask is None else mask.contiguous()
    if coded is not None:
        quantized = coded[0][0].shape[2]
        of_keys, of_values = ((n.contiguous(), p.contiguous(), levels) for n, p, levels in coded)
        coded = of_keys, of_values
    held = hold(keys, values, coded, blocks, group, scale, mask)
    out = asked.new_empty((batch, heads, group, 1, values.shape[3]))
    # Slots are counted from the first quantized one on, so exact slots that follow quantized ones
    # are read without a gap.
    begin = slots[0] if quantized else slots[1]
    _attend_together(
        threads_for(keys.numel() + batch * heads * quantized * dim, _WORTH_A_THREAD),
        held.ctypes.data,
        batch * heads,
        begin,
        quantized + slots[2],
        asked.data_ptr(),
        out.data_ptr(),
    )
    return out
