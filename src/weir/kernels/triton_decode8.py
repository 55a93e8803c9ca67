"""Attention of one query a head over slots of which the first are in 8 bits, on a GPU.

The quantised slots are read as they lie: numbers are widened in registers, to a dtype that has all
of them exactly, and the steps go into logits and weights, <q, c> * step and p * step. The exact
slots behind them are read by the kernel of `triton_decode`, and its second kernel brings the sums
of both together. Roofline: of every quantised slot a byte for each number and its steps are read
once, for all query heads of its group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weir.kernels.triton_decode import (
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


@triton.jit
def _widened(numbers, dtype: tl.constexpr):
    """Whole numbers of 8 bits in a dtype of floating point, each of which has all of them."""
    return numbers.to(tl.float32).to(dtype)  # the interpreter knows no way from there to bfloat16


@triton.jit(do_not_specialize=["start_slot", "stop_slot", "per_split"])
def _read(
    queries, keys, key_steps, values, value_steps, mask, out, tops, totals,
    query_row, query_head, query_group,
    key_row, key_head, key_slot,
    value_row, value_head, value_slot,
    step_row, step_head, step_slot,
    mask_row, mask_head, mask_slot,
    kv_heads, start_slot, stop_slot, per_split, scale,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    SLOTS_TILE: tl.constexpr, SPLITS: tl.constexpr,
    MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The sums of one head's queries over one part of its quantised slots."""
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
        value = values_of(
            values + row * value_row + head * value_head, value_slot, slot, there,
            VALUE_DIM, VALUE_TILE,
        )  # fmt: skip
        of_step = row * step_row + head * step_head + slot * step_slot
        key_step = tl.load(key_steps + of_step, mask=there, other=0.0)
        value_step = tl.load(value_steps + of_step, mask=there, other=0.0)
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
        value = _widened(value, query.dtype)
        sums = sums * shrink[:, None] + weighted_sum(share * value_step[None, :], value, WIDEN)
        top = new_top

    line = (head_of_all * SPLITS + split) * GROUP + group
    keep_part(out, tops, totals, line, real, top, total, sums, VALUE_DIM, VALUE_TILE)


def decode8(
    queries: Tensor,
    coded: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
    *,
    splits: int | None = None,
) -> Tensor:
    """The answers [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        coded: whole numbers [batch, kv_heads, coded, dim], int8, and steps
            [batch, kv_heads, coded], float32, of keys and then of values.
        keys, values: of the exact slots behind them [batch, kv_heads, slots, dim].
        mask: log-weights of all slots, the same in both sums, -inf where a query must not look
            [batch, kv_heads, slots], float32; None where all are 0.
        scale: factor of the logits.
        slots: of all slots, from the first that is read to behind the last.
        splits: into how many parts the quantised slots are split, and the exact ones, a power of
            two; None for as many as keep the device busy.
    """
    batch, kv_heads, group, _, key_dim = queries.shape
    (start, stop), count = slots, coded[0].shape[2]
    exact, value_dim, heads = stop - count, values.shape[3], batch * kv_heads
    queries = queries[:, :, :, 0].to(keys.dtype).contiguous()
    numbers, key_steps, value_numbers, value_steps = (t.contiguous() for t in coded)
    tile = slots_tile(keys, values)
    parts = splits or splits_of(heads, triton.cdiv(count - start, tile), queries.device)
    behind = (splits or splits_of(heads, triton.cdiv(exact, tile), queries.device)) if exact else 0
    every = parts + behind
    of_all = queries.new_empty((heads, every, group), dtype=torch.float32)
    sums = of_all.new_empty(heads, every, group, value_dim)
    tops, totals = of_all, torch.empty_like(of_all)
    _read[(heads, parts)](
        queries, numbers, key_steps, value_numbers, value_steps, mask, sums, tops, totals,
        *queries.stride()[:3], *numbers.stride()[:3], *value_numbers.stride()[:3],
        *key_steps.stride(), *((0, 0, 0) if mask is None else mask.stride()),
        kv_heads, start, count, triton.cdiv(triton.cdiv(count - start, parts), tile) * tile,
        scale,
        GROUP=group, GROUP_TILE=tile_of(group),
        KEY_DIM=key_dim, KEY_TILE=tile_of(key_dim),
        VALUE_DIM=value_dim, VALUE_TILE=tile_of(value_dim),
        SLOTS_TILE=tile, SPLITS=every,
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
