"""Attention of one query per head over slots whose first part has 8 or 4 bits, on a GPU.

Quantized slots are read as stored. Their numbers are widened in registers, to a dtype that
represents all of them exactly. The quantization step of a key multiplies its logit, and the step of
a value multiplies its weight. A value of 4 bits can have several steps, one for each group of its
numbers, so these steps multiply the numbers instead of the weight. The exact slots after the
quantized ones are read by `read_exact`, and `gather` combines the sums of both (`decode.py`).

Roofline: the stored bytes and the peaks of every quantized slot are read once, for all query heads
of its group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weir.kernels.gpu.decode import (
    dot,
    gather,
    keep_part,
    keys_of,
    queries_of,
    read_exact,
    slots_tile,
    splits_of,
    tile_of,
    values_of,
    weighted_sum,
)
from weir.kernels.signatures import QuantizedVectors


@triton.jit
def _steps_at(peaks, mask, levels):
    """Load peaks and return their quantization steps, float32."""
    return tl.div_rn(tl.load(peaks, mask=mask, other=0.0).to(tl.float32), levels)


@triton.jit
def _widened(numbers, dtype: tl.constexpr):
    """Convert numbers of 8 bits to a floating-point dtype, exactly.

    int8 numbers are signed integers; uint8 ones are float8 with 4 bits of exponent and 3 of
    mantissa. The bits of a float8 number, moved to their places in float16, give a number that is
    2^8 times smaller, also for subnormal numbers.
    """
    if numbers.dtype == tl.uint8:
        bits = numbers.to(tl.uint16)
        half = ((bits & 127) << 7 | (bits & 128) << 8).to(tl.float16, bitcast=True)
        wide = half.to(tl.float32) * 256.0
    else:
        wide = numbers.to(tl.float32)
    return wide.to(dtype)  # by way of float32: the interpreter has no other path to bfloat16


@triton.jit
def _halves_of(
    values, value_slot, peaks, slot, there, levels,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Load values of 4 bits of some slots of one head [slots, VALUE_TILE], float32.

    The low bits of byte i are number i of the vector, the high bits are number i + half the
    vector's length. Each byte is loaded twice, the second time from the GPU's cache. `GROUPED`
    numbers share a peak.
    """
    half: tl.constexpr = VALUE_DIM // 2
    dim = tl.arange(0, VALUE_TILE)
    mask = there[:, None] & (dim < VALUE_DIM)[None, :]
    byte = tl.load(
        values + slot[:, None] * value_slot + (dim % half)[None, :], mask=mask, other=0
    )  # fmt: skip
    level = (byte >> tl.where(dim < half, 0, 4).to(tl.uint8)[None, :]) & 15
    groups: tl.constexpr = VALUE_DIM // GROUPED
    step = _steps_at(peaks + slot[:, None] * groups + (dim // GROUPED)[None, :], mask, levels)
    return (level.to(tl.float32) - 8.0) * step


@triton.jit(do_not_specialize=["start_slot", "stop_slot", "per_split"])
def _read(
    queries, keys, key_peaks, values, value_peaks, mask, out, tops, totals,
    query_row, query_head, query_group,
    key_row, key_head, key_slot,
    value_row, value_head, value_slot,
    key_peak_row, key_peak_head, key_peak_slot,
    value_peak_row, value_peak_head, value_peak_slot,
    mask_row, mask_head, mask_slot,
    kv_heads, start_slot, stop_slot, per_split, scale, key_levels, value_levels,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    SLOTS_TILE: tl.constexpr, SPLITS: tl.constexpr,
    HALVES: tl.constexpr, GROUPED: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sum over one part of the quantized slots of one head, for the queries of that head."""
    head_of_all = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row, head = head_of_all // kv_heads, head_of_all % kv_heads
    group = tl.arange(0, GROUP_TILE)
    real = group < GROUP

    query = queries_of(
        queries + row * query_row + head * query_head, query_group,
        GROUP, GROUP_TILE, KEY_DIM, KEY_TILE,
    )  # fmt: skip
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    sums = tl.zeros([GROUP_TILE, VALUE_TILE], tl.float32)
    start = start_slot + split * per_split
    stop = tl.minimum(start + per_split, stop_slot)
    for first in range(start, stop, SLOTS_TILE):
        slot = (first + tl.arange(0, SLOTS_TILE)).to(tl.int64)
        there = slot < stop
        key = keys_of(
            keys + row * key_row + head * key_head, key_slot, slot, there, KEY_DIM, KEY_TILE
        )
        of_peaks = key_peaks + row * key_peak_row + head * key_peak_head
        key_step = _steps_at(of_peaks + slot * key_peak_slot, there, key_levels)
        logits = dot(query, _widened(key, query.dtype), WIDEN) * (key_step * scale)[None, :]
        if MASKED:
            weight = tl.load(
                mask + row * mask_row + head * mask_head + slot * mask_slot,
                mask=there,
                other=float("-inf"),
            )
            logits += weight[None, :]
        logits = tl.where(there[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - level)
        share = tl.exp(logits - level[:, None])
        total = total * shrink + tl.sum(share, axis=1)
        of_values = values + row * value_row + head * value_head
        of_peaks = value_peaks + row * value_peak_row + head * value_peak_head
        if HALVES:
            value = _halves_of(
                of_values, value_slot, of_peaks, slot, there, value_levels,
                VALUE_DIM, VALUE_TILE, GROUPED,
            )  # fmt: skip
            value = value.to(query.dtype)
        else:
            value = _widened(
                values_of(of_values, value_slot, slot, there, VALUE_DIM, VALUE_TILE), query.dtype
            )
            step = _steps_at(of_peaks + slot * value_peak_slot, there, value_levels)
            share *= step[None, :]
        sums = sums * shrink[:, None] + weighted_sum(share, value, WIDEN)
        top = new_top

    line = (head_of_all * SPLITS + split) * GROUP + group
    keep_part(out, tops, totals, line, real, top, total, sums, VALUE_DIM, VALUE_TILE)


def decode_quantized(
    queries: Tensor,
    coded: tuple[QuantizedVectors, QuantizedVectors],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
    *,
    splits: int | None = None,
) -> Tensor:
    """Compute attention outputs [batch, kv_heads, group, 1, value_dim].

    The output of a query that sees no slot is zero. All arguments except `splits` are those of
    `weir.kernels.cpu.decode_quantized.decode_quantized`.

    Args:
        splits: a power of two, the number of parts that the quantized slots are split into; the
            exact slots are split into as many. None for enough parts to keep the device busy.
    """
    batch, kv_heads, group, _, key_dim = queries.shape
    (start, stop), count = slots, coded[0][0].shape[2]
    exact, value_dim, heads = stop - count, values.shape[3], batch * kv_heads
    queries = queries[:, :, :, 0].to(keys.dtype).contiguous()
    (numbers, key_peaks, key_levels), (value_numbers, value_peaks, value_levels) = (
        (numbers.contiguous(), peaks.contiguous(), float(levels))
        for numbers, peaks, levels in coded
    )
    tile = slots_tile(keys, values)
    parts = splits or splits_of(heads, triton.cdiv(count - start, tile), queries.device)
    behind = (splits or splits_of(heads, triton.cdiv(exact, tile), queries.device)) if exact else 0
    every = parts + behind
    of_all = queries.new_empty((heads, every, group), dtype=torch.float32)
    sums = of_all.new_empty(heads, every, group, value_dim)
    tops, totals = of_all, torch.empty_like(of_all)
    _read[(heads, parts)](
        queries, numbers, key_peaks, value_numbers, value_peaks, mask, sums, tops, totals,
        *queries.stride()[:3], *numbers.stride()[:3], *value_numbers.stride()[:3],
        *key_peaks.stride()[:3], *value_peaks.stride()[:3],
        *((0, 0, 0) if mask is None else mask.stride()),
        kv_heads, start, count, triton.cdiv(triton.cdiv(count - start, parts), tile) * tile,
        scale, key_levels, value_levels,
        GROUP=group, GROUP_TILE=tile_of(group),
        KEY_DIM=key_dim, KEY_TILE=tile_of(key_dim),
        VALUE_DIM=value_dim, VALUE_TILE=tile_of(value_dim),
        SLOTS_TILE=tile, SPLITS=every,
        HALVES=value_numbers.shape[3] < value_dim, GROUPED=value_dim // value_peaks.shape[3],
        MASKED=mask is not None, WIDEN=triton.knobs.runtime.interpret,
    )  # fmt: skip
    if behind:
        weights = mask[:, :, count:stop] if mask is not None else None
        if weights is None:
            weights = queries.new_zeros((), dtype=torch.float32).expand(batch, kv_heads, exact)
        read_exact(
            queries, keys[:, :, :exact], values[:, :, :exact], weights, weights, scale,
            sums, tops, totals, parts=behind, first=parts,
        )  # fmt: skip
    out = values.new_empty(batch, kv_heads, group, 1, value_dim)
    gather(sums, tops, totals, out)
    return out
