"""Attention of one query per head over slots with two log-weights, on a GPU.

Computes what `weir.slab.attention.two_weight_attention` computes for queries of length 1, in one
pass over the slots. If there are few rows and heads, the slots are split among several programs,
and a second, small kernel combines their sums. Sums are float32 whatever the inputs are. Roofline:
every key and value is read once, for all query heads of its group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_AT_LEAST = 16
"""Rows of the smallest tile that tensor cores multiply; a smaller group of heads is padded."""
_PROGRAMS_PER_CORE = 4
"""How many programs keep one multiprocessor busy reading memory."""


@triton.jit
def dot(x, y, WIDEN: tl.constexpr):
    """Compute x @ y with float32 sums.

    `WIDEN` converts x and y to float32 first, for Triton's interpreter, which lacks bfloat16.
    """
    if WIDEN:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def weighted_sum(weights, values, WIDEN: tl.constexpr):
    """Compute weights @ values with float32 sums and weights of at least 16 significant bits."""
    if values.dtype == tl.bfloat16:
        # Tensor cores for bfloat16 do not accept float32, so each weight is split into a high and a
        # low bfloat16 of 8 bits each, whose sum is exact to 2^-16.
        high = weights.to(tl.bfloat16)
        low = (weights - high.to(tl.float32)).to(tl.bfloat16)
        return dot(high, values, WIDEN) + dot(low, values, WIDEN)
    # Weights can be below 6e-8, the smallest float16, so both operands are float32.
    return dot(weights, values.to(tl.float32), WIDEN)


@triton.jit
def queries_of(
    queries, query_group,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Load the queries of one head [GROUP_TILE, KEY_TILE], padded with zeros."""
    group, dim = tl.arange(0, GROUP_TILE), tl.arange(0, KEY_TILE)
    return tl.load(
        queries + group[:, None] * query_group + dim[None, :],
        mask=(group < GROUP)[:, None] & (dim < KEY_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def keys_of(keys, key_slot, slot, there, KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr):
    """Load the keys of some slots of one head [KEY_TILE, slots], padded with zeros."""
    dim = tl.arange(0, KEY_TILE)
    return tl.load(
        keys + slot[None, :] * key_slot + dim[:, None],
        mask=there[None, :] & (dim < KEY_DIM)[:, None],
        other=0,
    )


@triton.jit
def values_of(values, value_slot, slot, there, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr):
    """Load the values of some slots of one head [slots, VALUE_TILE], padded with zeros."""
    dim = tl.arange(0, VALUE_TILE)
    return tl.load(
        values + slot[:, None] * value_slot + dim[None, :],
        mask=there[:, None] & (dim < VALUE_DIM)[None, :],
        other=0,
    )


@triton.jit
def keep_part(
    out, tops, totals, line, real, top, total, sums,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """Store the partial sums of one program; `line` has the row to write for each query."""
    dim = tl.arange(0, VALUE_TILE)
    tl.store(tops + line, top, mask=real)
    tl.store(totals + line, total, mask=real)
    tl.store(
        out + line[:, None] * VALUE_DIM + dim[None, :],
        sums,
        mask=real[:, None] & (dim < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["slots", "per_split", "first_split"])
def _read(
    queries, keys, values, a, b, bias, sinks, out, tops, totals,
    query_row, query_head, query_group,
    key_row, key_head, key_slot,
    value_row, value_head, value_slot,
    a_row, a_head, a_slot,
    b_row, b_head, b_slot,
    bias_row, bias_head, bias_group, bias_slot,
    kv_heads, slots, per_split, first_split, scale, softcap,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    SLOTS_TILE: tl.constexpr, SPLITS: tl.constexpr,
    CAPPED: tl.constexpr, BIASED: tl.constexpr, SUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Sum over one part of the slots of one head, for the queries of that head.

    The sums are stored as part `first_split` + program number, of `SPLITS` parts in all.
    """
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
    if SUNK:
        # A sink logit counts as one more slot of the denominator, in the first part.
        sink = tl.load(sinks + head * GROUP + group, mask=real, other=float("-inf"))
        sink = tl.where(split == 0, sink, float("-inf"))
        top = sink
        total = tl.where(sink == float("-inf"), 0.0, 1.0)

    start = split * per_split
    for first in range(start, tl.minimum(start + per_split, slots), SLOTS_TILE):
        slot = (first + tl.arange(0, SLOTS_TILE)).to(tl.int64)
        there = slot < tl.minimum(start + per_split, slots)
        key = keys_of(
            keys + row * key_row + head * key_head, key_slot, slot, there, KEY_DIM, KEY_TILE
        )
        value = values_of(
            values + row * value_row + head * value_head, value_slot, slot, there,
            VALUE_DIM, VALUE_TILE,
        )  # fmt: skip
        above = tl.load(
            a + row * a_row + head * a_head + slot * a_slot, mask=there, other=float("-inf")
        )
        below = tl.load(
            b + row * b_row + head * b_head + slot * b_slot, mask=there, other=float("-inf")
        )
        logits = dot(query, key, WIDEN) * scale
        if CAPPED:
            # softcap * tanh(logits / softcap)
            logits = softcap - 2.0 * softcap / (tl.exp(logits * (2.0 / softcap)) + 1.0)
        if BIASED:
            logits += tl.load(
                bias + row * bias_row + head * bias_head
                + group[:, None] * bias_group + slot[None, :] * bias_slot,
                mask=real[:, None] & there[None, :],
                other=0.0,
            ).to(tl.float32)  # fmt: skip
        upper = logits + above[None, :]
        lower = logits + below[None, :]
        new_top = tl.maximum(top, tl.max(tl.maximum(upper, lower), axis=1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - level)
        total = total * shrink + tl.sum(tl.exp(lower - level[:, None]), axis=1)
        sums = sums * shrink[:, None] + weighted_sum(tl.exp(upper - level[:, None]), value, WIDEN)
        top = new_top

    line = (head_of_all * SPLITS + first_split + split) * GROUP + group
    if SPLITS == 1:
        sums = tl.where((total == 0.0)[:, None], 0.0, sums / total[:, None])
    keep_part(out, tops, totals, line, real, top, total, sums, VALUE_DIM, VALUE_TILE)


@triton.jit
def _gather(
    parts, tops, totals, out,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
):  # fmt: skip
    """Combine the partial sums of one query into its attention output."""
    query = tl.program_id(0).to(tl.int64)
    head_of_all, member = query // GROUP, query % GROUP
    split = tl.arange(0, SPLITS_TILE)
    value_dim = tl.arange(0, VALUE_TILE)
    line = (head_of_all * SPLITS + split) * GROUP + member
    top = tl.load(tops + line, mask=split < SPLITS, other=float("-inf"))
    highest = tl.max(top, axis=0)
    factor = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(totals + line, mask=split < SPLITS, other=0.0) * factor, axis=0)
    part = tl.load(
        parts + line[:, None] * VALUE_DIM + value_dim[None, :],
        mask=(split < SPLITS)[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    sums = tl.sum(part * factor[:, None], axis=0)
    tl.store(
        out + query * VALUE_DIM + value_dim,
        tl.where(total == 0.0, 0.0, sums / total),
        mask=value_dim < VALUE_DIM,
    )


def decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    splits: int | None = None,
) -> Tensor:
    """Compute attention outputs [batch, kv_heads, group, 1, value_dim].

    The output of a query that sees no slot is zero.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim], in the dtype of the keys.
        keys: [batch, kv_heads, slots, key_dim], bfloat16, float16 or float32.
        values: [batch, kv_heads, slots, value_dim].
        a, b: log-weights [batch, kv_heads, slots], float32; -inf leaves a slot out of a sum.
        scale: factor of the logits.
        softcap: logits become softcap * tanh(logits / softcap); None for no capping.
        sinks: logits that take part in the denominator only [kv_heads, group]; None for none.
        bias: added to the logits, -inf where a query must not look; broadcasts with
            [batch, kv_heads, group, 1, slots].
        splits: number of parts the slots are split into, a power of two; None for enough to keep
            the device busy.
    """
    batch, kv_heads, group = queries.shape[:3]
    slots, value_dim = values.shape[2:]
    heads = batch * kv_heads
    parts = splits or splits_of(heads, triton.cdiv(slots, slots_tile(keys, values)), keys.device)
    if bias is not None:
        bias = bias.expand(batch, kv_heads, group, 1, slots)[:, :, :, 0]
    if sinks is not None:
        sinks = sinks.float().contiguous()

    def buffer(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=keys.device)

    out = keys.new_empty((batch, kv_heads, group, 1, value_dim), dtype=values.dtype)
    sums = out if parts == 1 else buffer(heads, parts, group, value_dim)
    tops, totals = buffer(heads, parts, group), buffer(heads, parts, group)
    read_exact(
        queries[:, :, :, 0], keys, values, a, b, scale, sums, tops, totals,
        parts=parts, softcap=softcap, sinks=sinks, bias=bias,
    )  # fmt: skip
    if parts > 1:
        gather(sums, tops, totals, out)
    return out


def read_exact(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    sums: Tensor,
    tops: Tensor,
    totals: Tensor,
    *,
    parts: int,
    first: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Compute partial sums over slots, for `gather` to combine.

    Other kernels can add parts over other slots of the same heads. If there is only one part in
    all, its sums are divided already, and are the attention output.

    Args:
        queries: [batch, kv_heads, group, key_dim].
        keys, values, a, b, scale, softcap, sinks: as for `decode`.
        sums: receives the sums of each part [heads, all parts, group, value_dim], float32; if there
            is only one part, the attention output, in any dtype.
        tops, totals: receive the largest exponent and the denominator of each part
            [heads, all parts, group], float32.
        parts: number of parts these slots are split into, a power of two.
        first: index of the first of these parts among all parts.
        bias: [batch, kv_heads, group, slots].
    """
    batch, kv_heads, group, key_dim = queries.shape
    slots, value_dim = values.shape[2:]
    queries, keys, values = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (queries, keys, values)
    )
    tile = slots_tile(keys, values)
    per_split = triton.cdiv(triton.cdiv(slots, parts), tile) * tile
    _read[(batch * kv_heads, parts)](
        queries, keys, values, a, b, bias, sinks, sums, tops, totals,
        *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        *a.stride(), *b.stride(), *((0, 0, 0, 0) if bias is None else bias.stride()),
        kv_heads, slots, per_split, first, scale, softcap or 0.0,
        GROUP=group, GROUP_TILE=tile_of(group),
        KEY_DIM=key_dim, KEY_TILE=tile_of(key_dim),
        VALUE_DIM=value_dim, VALUE_TILE=tile_of(value_dim),
        SLOTS_TILE=tile, SPLITS=tops.shape[1],
        CAPPED=softcap is not None, BIASED=bias is not None, SUNK=sinks is not None,
        WIDEN=triton.knobs.runtime.interpret,
    )  # fmt: skip


def gather(sums: Tensor, tops: Tensor, totals: Tensor, out: Tensor) -> None:
    """Combine the partial sums of all parts into attention outputs.

    Args:
        sums, tops, totals: as `read_exact` leaves them.
        out: receives the outputs [batch, kv_heads, group, 1, value_dim].
    """
    heads, parts, group, value_dim = sums.shape
    _gather[(heads * group,)](
        sums, tops, totals, out,
        GROUP=group, VALUE_DIM=value_dim, VALUE_TILE=tile_of(value_dim), SPLITS=parts,
        SPLITS_TILE=triton.next_power_of_2(parts),
    )  # fmt: skip


def tile_of(size: int) -> int:
    """Return the size of the tile that holds `size` rows or columns."""
    return max(_AT_LEAST, triton.next_power_of_2(size))


def slots_tile(keys: Tensor, values: Tensor) -> int:
    """Return how many slots fit into registers and shared memory at once."""
    widest = max(tile_of(keys.shape[-1]), tile_of(values.shape[-1]))
    return 64 if values.dtype == torch.bfloat16 and widest <= 128 else 32


def splits_of(heads: int, tiles: int, device: torch.device) -> int:
    """Choose how many parts to split the slots into.

    The number is a power of two, so that few variants of the kernel are compiled as slots grow.
    """
    if device.type != "cuda":
        return 1
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.next_power_of_2(triton.cdiv(_PROGRAMS_PER_CORE * cores, heads))
    return min(wanted, triton.next_power_of_2(tiles))
